//! Products of many tokens for Hopper (sm_90a), dense or grouped by expert: tile loads by TMA, products by wgmma, persistent
//! cubes. The README beside this file has the schedule.
//!
//! `wgmma` computes the transpose of the output: its rows are outputs, its columns tokens. So a tile has as few tokens as a batch
//! has, and gate and up of an output are in the registers of one unit.

mod arranged;
mod carry;
mod epilogue;
mod form;
mod maps;
mod packed;
mod partial;
mod ring;
mod schedule;
mod tilings;
mod wide;

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use self::arranged::rescale;
use self::epilogue::{Output, VECTOR};
pub(super) use self::form::{CHANNELS, CUBES, Shares, Tiling, is_hopper, pairs_of_tiles, supported, terms};
use self::form::{COMPUTE_REGISTERS, Form, GROUP, INTERLEAVED, LOAD_REGISTERS, Rows, WEIGHT_ROWS, WEIGHTS};
use self::maps::{out_map, token_map, weight_map};
use self::packed::{Codes, Scales, ScalesArgs};
use self::partial::Partial;
use self::ring::Ring;
use self::schedule::{Place, Schedule};
pub(super) use self::tilings::{LEAST, all_tilings, dense_tiling, divided_tiling};
use crate::common::launch::{dummy, multiprocessors, share};
use crate::experts_mlp::gather;
use crate::experts_mlp::sort::max_tiles;
use crate::linear::{LinearForm, PairRows, Products, Work};
use crate::ptx::{barrier, registers, shared_address, tma, warp};

/// Writes the output of at least one row, of x in the first element and weights and output in the second. Rows of tokens are
/// brought into the order of their experts before.
pub(super) fn launch(
    client: &Client,
    products: Products,
    work: Work,
    linear: LinearForm,
    Tiling { tokens, splits, shares, in_parts }: Tiling,
    address: AddressType,
    [elem, out_elem]: [ElemType; 2],
) {
    let Products { x, weight, out, inputs, outputs, carried, matrix_stride, limit } = products;
    let terms = if elem == out_elem { 1 } else { wide::TERMS };
    let weight = if terms > 1 { wide::launch(client, weight, outputs * inputs) } else { weight };
    let (weight_rows, format) = (terms * outputs, weight.format());
    let (weight, scales) = ScalesArgs::of(weight);
    let (mut heads, mut top_k, mut carry) = (1, 1, None);
    let (rows, x, order, tiles, [count, matrices, token_tiles]) = match work {
        Work::Experts { order, tiles, pairs, experts, rows } => {
            let sizes = [pairs, experts, max_tiles(pairs, experts, tokens)];
            match rows {
                PairRows::Gather { top_k: of_token } => {
                    top_k = of_token;
                    (Rows::Sorted, x, order, tiles, sizes)
                }
                PairRows::Scatter => (Rows::Scatter, x, order, tiles, sizes),
            }
        }
        Work::Dense { rows, .. } => (Rows::Dense, x, dummy(client), dummy(client), [rows, 1, rows.div_ceil(tokens)]),
        Work::Heads { rows, heads: count, .. } => {
            heads = count;
            carry = (carried > 0).then(|| (share(&x), share(&out)));
            (Rows::Heads, x, dummy(client), dummy(client), [rows, heads, heads * rows.div_ceil(tokens)])
        }
        Work::Token { .. } => unreachable!("the table has no such row for these"),
    };
    let bf16 = elem == ElemType::Float(FloatKind::BF16);
    let form = Form { tokens, rows, linear, bf16, split: splits * terms > 1, shares, in_parts, format };
    let gathered = (rows == Rows::Sorted).then(|| share(&order));
    let (x, inverses) = match gathered {
        order if form.is_arranged() => arranged::launch(client, x, order, [count, top_k, inputs], elem, form),
        Some(order) => (gather::launch(client, x, order, [count, top_k, inputs], elem), dummy(client)),
        None => (x, dummy(client)),
    };
    let partial = Partial::new(client, [splits, count, terms, outputs]);
    let x_map = token_map(x, [heads, count, inputs], inputs + carried, elem, form);
    let weight_map = weight_map(weight, [matrices, weight_rows, inputs], terms * matrix_stride, elem, form);
    let out_map = out_map(&out, [count, outputs], elem, form);
    let pairs_of_cubes = splits * pairs_of_tiles([token_tiles, weight_rows], linear, shares);
    let clusters = (multiprocessors(client) * form.cubes() as usize / CUBES as usize).clamp(1, pairs_of_cubes);
    // SAFETY: the buffers have the sizes that the arguments state. Tile loads outside of the tensors give zeros, and rows and
    // columns past the end are not written. Pairs of cubes share no output.
    unsafe {
        linear_sm90_kernel::launch_unchecked(
            client,
            CubeCount::Static(CUBES * clusters as u32, 1, 1),
            CubeDim::new_1d(form.units()),
            address,
            VECTOR,
            x_map,
            weight_map,
            out_map,
            order,
            tiles,
            share(&out),
            partial.arg(),
            inverses,
            scales,
            inputs.div_ceil(CHANNELS).next_multiple_of(form.blocks_together() as usize) as u32,
            weight_rows as u32,
            (outputs + carried) as u32,
            count as u32,
            heads as u32,
            token_tiles as u32,
            splits as u32,
            limit,
            form,
            elem,
        );
    }
    if partial.is_needed() {
        partial.add_up(client, out, out_elem);
    }
    if let Some((x, out)) = carry {
        carry::launch(client, x, out, [count * heads, inputs, outputs, carried], address, elem);
    }
}

/// Each pair of cubes computes every so many tile of the schedule: a warp loads blocks of channels into the stages, as far ahead
/// as there are stages, also those of the next tile, while two warpgroups multiply.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = CubeDim::new_3d(CUBES, 1, 1)
)]
fn linear_sm90_kernel<E: Float, V: Size>(
    x_map: &TensorMap<E, Tiled>,
    weight_map: &TensorMap<E, Tiled>,
    out_map: &TensorMap<E, Tiled>,
    order: &[i32],
    tiles: &[i32],
    out: &mut [Vector<E, V>],
    partial: &mut [f32],
    inverses: &[f32],
    scales: &Scales,
    blocks: u32,
    outputs: u32,
    width: u32,
    rows: u32,
    heads: u32,
    token_tiles: u32,
    splits: u32,
    limit: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let weights =
        Shared::<[u32]>::new_aligned_slice(comptime!((form.stages() * form.weight_bytes() / 4) as usize), 1024usize);
    let tokens =
        Shared::<[u32]>::new_aligned_slice(comptime!((form.stages() * form.token_bytes() / 4) as usize), 1024usize);
    let staging = Shared::<[u32]>::new_aligned_slice(comptime!(2 * form.staging_bytes() as usize / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 * form.stages() as usize), 128usize);
    let mut ring = Ring::new(shared_address(&weights), shared_address(&tokens), shared_address(&barriers), form);
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(x_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(weight_map));
        if comptime!(form.stores_tiles()) {
            tma::prefetch(tma::tensor_map_address::<E, Tiled>(out_map));
        }
        ring.init(form);
    }
    // Neither cube may copy to the other, or arrive there, before.
    barrier::sync_cluster();

    let group = warp::uniform(UNIT_POS / GROUP);
    let rank = CUBE_POS_X % CUBES;
    let schedule = Schedule::new(blocks, outputs, rows, heads, token_tiles, splits, form);
    let clusters = CUBE_COUNT_X / CUBES;
    let mut number = CUBE_POS_X / CUBES;
    if group == 2 {
        let mut loads = true.runtime();
        if comptime!(form.moves_registers()) {
            registers::fewer(LOAD_REGISTERS);
            // The others are there to give theirs.
            loads = warp::uniform(UNIT_POS / 32) == comptime!(2 * GROUP / 32);
        }
        if loads && warp::elect() {
            let x = tma::tensor_map_address::<E, Tiled>(x_map);
            let weight = tma::tensor_map_address::<E, Tiled>(weight_map);
            while number < schedule.count {
                let place = Place::read(tiles, &schedule, number, rank, form);
                if place.has_work(form) {
                    ring.load(x, weight, &place, rank, form);
                }
                number += clusters;
            }
        }
    } else {
        if comptime!(form.moves_registers()) {
            registers::more(COMPUTE_REGISTERS);
        }
        let size!(A) = comptime!((form.tokens / 2).next_power_of_two());
        let staging_at = shared_address(&staging) + group * comptime!(form.staging_bytes());
        let output = Output { staging_at, group, outputs, width, heads, limit };
        while number < schedule.count {
            let place = Place::read(tiles, &schedule, number, rank, form);
            if place.has_work(form) {
                let codes = Codes::new(scales, &place, group, outputs, form);
                let mut acc = ring.multiply::<A>(scales, &codes, &place, group, form);
                if comptime!(form.halves()) {
                    acc = rescale::<A>(acc, inverses, &place, form);
                }
                if comptime!(form.split) {
                    output.write_partial::<A>(acc, partial, &place, rows, form);
                } else if comptime!(form.stores_tiles()) {
                    output.copy::<A>(acc, tma::tensor_map_address::<E, Tiled>(out_map), &place, form);
                } else {
                    output.write::<E, V, A>(acc, order, out, &place, form);
                }
            }
            number += clusters;
        }
        if comptime!(form.stores_tiles()) {
            tma::wait_for_stores(0u32);
        }
    }
    // A cube stays until the other one's last copies and arrivals have come.
    barrier::sync_cluster();
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::weight;
    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, rows, gated, tokens| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let shares = if name.starts_with("weights") { Shares::Weights } else { Shares::Tokens };
        let (linear, split) = (LinearForm { gated, limited: gated }, name.starts_with("split"));
        let (in_parts, format) = (name.ends_with("parts"), weight::format_of(name));
        let form = Form { tokens, rows, linear, bf16, split, shares, in_parts, format };
        let name = format!("linear.sm90.{}.{name}", form.out_elem().name());
        Entry::new(name, move |device, target| {
            linear_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(CUBES, 1, 1),
                CubeDim::new_1d(form.units()),
                AddressType::U32,
                VECTOR,
                token_map(buffer(), [1, 256, 64], 64, elem, form),
                weight_map(buffer(), [1, 256, 64], 256 * 64, elem, form),
                out_map(&buffer(), [256, 64], elem, form),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                packed::offline(format),
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1.0,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    let (bf16, f16) = (FloatKind::BF16, FloatKind::F16);
    vec![
        entry("256", bf16, Rows::Dense, false, 256),
        entry("192", bf16, Rows::Dense, false, 192),
        entry("weights.160", bf16, Rows::Dense, false, 160),
        entry("gated.256", bf16, Rows::Sorted, true, 256),
        entry("experts_down.256", bf16, Rows::Scatter, false, 256),
        entry("experts_down.192", bf16, Rows::Scatter, false, 192),
        entry("experts_down.128", bf16, Rows::Scatter, false, 128),
        entry("64", f16, Rows::Dense, false, 64),
        entry("experts_up.32", bf16, Rows::Sorted, true, 32),
        entry("heads.128", bf16, Rows::Heads, false, 128),
        entry("split.32", bf16, Rows::Dense, false, 32),
        entry("weights.64", bf16, Rows::Dense, false, 64),
        entry("128.parts", bf16, Rows::Dense, false, 128),
        entry("gated.128.parts", bf16, Rows::Sorted, true, 128),
        entry("32.parts", f16, Rows::Dense, false, 32),
        entry("split.32.parts", bf16, Rows::Dense, false, 32),
        entry("64.fp8", bf16, Rows::Dense, false, 64),
        entry("gated.128.fp8", bf16, Rows::Dense, true, 128),
        entry("128.fp8", bf16, Rows::Dense, false, 128),
        entry("256.fp8", bf16, Rows::Dense, false, 256),
        entry("gated.256.fp8", bf16, Rows::Sorted, true, 256),
        entry("experts_down.192.fp8", bf16, Rows::Scatter, false, 192),
        entry("heads.64.fp8", bf16, Rows::Heads, false, 64),
        entry("heads.256.fp8", bf16, Rows::Heads, false, 256),
        entry("split.32.fp8", f16, Rows::Dense, false, 32),
        entry("split.32.fp8", bf16, Rows::Dense, false, 32),
        entry("experts_up.128.fp8", bf16, Rows::Sorted, true, 128),
        entry("experts_up.96.fp8", bf16, Rows::Sorted, true, 96),
        entry("experts_up.64.fp8", bf16, Rows::Sorted, true, 64),
        entry("experts_down.64.fp8", bf16, Rows::Scatter, false, 64),
        entry("experts_down.96.fp8", bf16, Rows::Scatter, false, 96),
        entry("experts_up.32.fp8", bf16, Rows::Sorted, true, 32),
        entry("weights.32.fp8", bf16, Rows::Dense, false, 32),
        entry("experts_up.32.fp4", bf16, Rows::Sorted, true, 32),
        entry("experts_up.128.fp4", f16, Rows::Sorted, true, 128),
        entry("experts_up.256.fp4", bf16, Rows::Sorted, true, 256),
        entry("experts_up.96.fp4", bf16, Rows::Sorted, true, 96),
        entry("experts_down.96.fp4", bf16, Rows::Scatter, false, 96),
        entry("experts_down.64.fp4", bf16, Rows::Scatter, false, 64),
    ]
    .into_iter()
    .chain(carry::offline())
    .chain(arranged::offline())
    .chain(partial::offline())
    .chain(wide::offline())
    .collect()
}
