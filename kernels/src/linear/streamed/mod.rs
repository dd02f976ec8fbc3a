//! Experts of a few tokens each, with weights in blocks of codes, on Hopper: each warp has rows of its own, whose codes it copies by TMA
//! into stages of its own, far ahead, and decodes under way to the tensor cores. The README of `linear` says what came of it.
//!
//! A cube stays. It has neighbouring groups of outputs, so that it writes the rows of x which an expert's tile has into shared memory once,
//! as f16, for all of them. The instruction has 16 rows of the weights and 8 tokens; no warp waits for another, but where a tile ends.
//!
//! The order of a sum depends on the sizes of the matrix alone, but it is not that of a single row: batch-invariant products are not
//! computed here.

mod form;
mod maps;
mod products;
mod ring;
mod rows;

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

pub(super) use self::form::Form;
use self::form::{PIECE_BYTES, TOKENS, WEIGHT_ROWS, form};
use self::products::{Scales, ScalesLaunch, WeightPlace, multiply};
use self::ring::{Items, Maps, Ring};
use self::rows::write_rows;
use crate::common::launch::multiprocessors;
use crate::experts_mlp::sort::{TILE, max_tiles};
use crate::linear::activation::gated_fast;
use crate::linear::grid::Tile;
use crate::linear::{Choice, LinearSizes, PairRows, Products, Work, sm90};
use crate::ptx::{shared_address, tma, warp};

/// Units of a warp.
const WARP: usize = 32;
/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;

/// The kernel for these, if it takes them: on a Hopper, where tiles have as many tokens as its instruction.
pub(super) fn takes(
    client: &Client,
    products: &Products,
    work: &Work,
    choice: Choice,
    sizes: &LinearSizes,
) -> Option<Form> {
    let bf16 = sizes.elems[1] == ElemType::Float(FloatKind::BF16);
    let is_alike = sizes.elems[0] == sizes.elems[1] && choice.tokens == TOKENS && !sizes.batch_invariant;
    if is_alike && sm90::is_hopper(client) { form(products, work, sizes.form, bf16) } else { None }
}

/// Writes the output of at least one pair.
pub(super) fn launch(
    client: &Client,
    products: Products,
    work: Work,
    form: Form,
    address: AddressType,
    elem: ElemType,
) {
    let Work::Experts { order, tiles, pairs, experts, rows } = work else {
        unreachable!("the kernel takes experts only")
    };
    let Products { x, weight, out, outputs, limit, .. } = products;
    let per_token = match rows {
        PairRows::Gather { top_k } => top_k,
        PairRows::Scatter => 1,
    };
    let most = max_tiles(pairs, experts, TOKENS);
    let ([codes_map, scales_map], scales) = maps::maps(weight, [experts, outputs], form);
    let cubes = multiprocessors(client).min(most * outputs / form.outputs());
    // SAFETY: the buffers have the sizes that the arguments state, tiles have experts and pairs that there are, and copies outside of a
    // row give zeros. No two warps share an output.
    unsafe {
        linear_streamed_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(form.units() as u32),
            address,
            VECTOR,
            x,
            codes_map,
            scales_map,
            scales,
            order,
            tiles,
            out,
            most,
            per_token,
            outputs as u32,
            limit,
            form,
            elem,
        );
    }
}

/// Warps of a cube have every so many of its items.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn linear_streamed_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    codes_map: &TensorMap<E, Tiled>,
    scales_map: &TensorMap<E, Tiled>,
    scales: Scales,
    order: &[i32],
    tiles: &[i32],
    out: &mut [E],
    max_tiles: usize,
    per_token: usize,
    outputs: u32,
    limit: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let stages = comptime!(form.warps() * form.stages());
    let codes = Shared::<[u32]>::new_aligned_slice(comptime!(stages * PIECE_BYTES / 4), 1024usize);
    let piece_scales =
        Shared::<[u32]>::new_aligned_slice(comptime!((stages * form.scale_bytes() / 4).max(1)), 128usize);
    let rows = Shared::<[u32]>::new_aligned_slice(comptime!(TOKENS * form.row_bytes() / 4), 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(stages, 128usize);
    let mut largest = Shared::<[u32]>::new_slice(comptime!(form.warps()));
    let mut inverses = Shared::<[f32]>::new_slice(TOKENS);
    let maps = Maps {
        codes: tma::tensor_map_address::<E, Tiled>(codes_map),
        scales: tma::tensor_map_address::<E, Tiled>(scales_map),
    };
    let rows_at = shared_address(&rows);

    let own = warp::uniform(UNIT_POS / 32);
    let counted = count_tiles(tiles, max_tiles, own, &mut largest, form);
    let items = Items::of_cube(counted, outputs / comptime!(form.outputs() as u32));
    let (codes_at, scales_at) = (shared_address(&codes), shared_address(&piece_scales));
    let mut ring = Ring::start(codes_at, scales_at, shared_address(&barriers), &maps, tiles, &items, own, form);
    if items.first < items.end {
        let mut item = items.first + own;
        let mut number = items.first / items.groups;
        let last = (items.end - 1) / items.groups;
        let mut tile = Tile::listed(tiles, number as usize, per_token, form.rows);
        sync_cube();
        write_rows(x, order, &tile, rows_at, own, &mut largest, &mut inverses, form);
        // Once more than there are items, so that all warps have come to the last tile.
        let rounds = (items.end - items.first).div_ceil(comptime!(form.warps() as u32)) + 1;
        let mut round = 0u32;
        while round < rounds {
            let wanted = if round == rounds - 1 { last } else { min(item / items.groups, last) };
            let wanted = warp::uniform(wanted);
            while number < wanted {
                number += 1;
                tile.go_to(tiles, number as usize);
                // Nobody reads the rows of the tile before any longer.
                sync_cube();
                write_rows(x, order, &tile, rows_at, own, &mut largest, &mut inverses, form);
            }
            if item < items.end {
                let output = item % items.groups * comptime!(form.outputs() as u32);
                let place = WeightPlace { expert: tile.expert as u32, output, outputs };
                let sums = multiply(&mut ring, &maps, tiles, &items, &scales, &place, rows_at, form);
                write(sums, order, &tile, &inverses, &place, out, limit, form);
            }
            item += comptime!(form.warps() as u32);
            round = warp::next(round);
        }
    }
}

/// The tiles with pairs, which come first. All units of a cube.
#[cube]
fn count_tiles(tiles: &[i32], max_tiles: usize, own: u32, scratch: &mut [u32], #[comptime] form: Form) -> u32 {
    let mut counted = 0u32;
    let mut first = own as usize * WARP;
    while first < max_tiles {
        let number = first + (UNIT_POS % 32) as usize;
        // Without a branch, at which lanes would part.
        let pairs = tiles[min(number, max_tiles - 1) * TILE + 2];
        counted += warp::ballot(number < max_tiles && pairs > 0).count_ones();
        first += comptime!(form.units());
    }
    let lane = UNIT_POS % 32;
    if lane == 0 {
        scratch[own as usize] = counted;
    }
    sync_cube();
    let mut all = 0u32.runtime();
    let mut i = 0usize;
    while i < comptime!(form.warps()) {
        all += scratch[i];
        i += 1;
    }
    // As a number that the compiler knows to be that of all units: branches by it part none.
    warp::uniform(all)
}

/// Writes the sums of a warp: a unit has two rows of two tokens. Of a gated output they are of the gate and up.
#[cube]
#[allow(clippy::too_many_arguments)]
fn write<E: Float>(
    sums: Vector<f32, Const<4>>,
    order: &[i32],
    tile: &Tile,
    inverses: &[f32],
    place: &WeightPlace,
    out: &mut [E],
    limit: f32,
    #[comptime] form: Form,
) {
    let (row, quad) = ((UNIT_POS % 32 / 4) as usize, (UNIT_POS % 4) as usize);
    #[unroll]
    for i in 0..2usize {
        let token = 2 * quad + i;
        if token < tile.count {
            let inverse = inverses[token];
            let (first, second) = (sums.extract(i) * inverse, sums.extract(comptime!(2 + i)) * inverse);
            let at = tile.output(order, token) * place.outputs as usize + place.output as usize + row;
            if comptime!(form.linear.gated) {
                out[at] = E::cast_from(gated_fast(first, second, limit, form.linear.limited));
            } else {
                out[at] = E::cast_from(first);
                out[at + comptime!(WEIGHT_ROWS / 2)] = E::cast_from(second);
            }
        }
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::grid::Rows;
    use crate::linear::{LinearForm, weight};
    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, inputs| {
        let (elem, format) = (ElemType::Float(kind), weight::format_of(name));
        let is_up = name.starts_with("experts_up");
        let linear = LinearForm { gated: is_up, limited: is_up };
        let rows = if is_up { Rows::Gather } else { Rows::Scatter };
        let form = Form { rows, linear, format, inputs, bf16: kind == FloatKind::BF16 };
        let name = format!("linear.streamed.{}.{name}", if form.bf16 { "bf16" } else { "f16" });
        Entry::new(name, move |device, target| {
            let ([codes, scales_map], scales) = maps::maps(weight::offline_blocks(format, inputs), [1, 16], form);
            linear_streamed_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(form.units() as u32),
                AddressType::U32,
                VECTOR,
                buffer(),
                codes,
                scales_map,
                scales,
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                16,
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
        // V4-Flash, V3, V2-Lite.
        entry("experts_up.fp4", bf16, 4096),
        entry("experts_down.fp4", bf16, 2048),
        entry("experts_up.fp4", f16, 4096),
        entry("experts_up.fp8", bf16, 7168),
        entry("experts_down.fp8", bf16, 1408),
    ]
}
