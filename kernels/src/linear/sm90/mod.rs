//! Products of many tokens for Hopper (sm_90a), dense or grouped by expert: tile loads by TMA, products by wgmma, persistent
//! cubes. The README beside this file has the schedule.
//!
//! `wgmma` computes the transpose of the output: its rows are outputs, its columns tokens. So a tile has as few tokens as a batch
//! has, and gate and up of an output are in the registers of one unit.

mod carry;
mod epilogue;
mod partial;
mod ring;
mod schedule;
mod wide;

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use self::epilogue::{Output, VECTOR};
pub(super) use self::partial::MOST_SPLITS;
use self::partial::Partial;
use self::ring::Ring;
use self::schedule::{Place, Schedule};
use crate::common::launch::{dummy, multiprocessors, share};
use crate::experts_mlp::gather;
use crate::experts_mlp::sort::max_tiles;
use crate::linear::parts::{BLOCK, PARTS};
use crate::linear::{Division, LinearForm, LinearSizes, PairRows, Products, WeightArg, WeightFormat, Work};
use crate::ptx::wgmma::{Elem, Layout, Mma, Source};
use crate::ptx::{barrier, shared_address, tma, warp};

/// Rows of the weights that a cube multiplies at a time: 64 for each of its warpgroups. Of a gated output half of them are of the
/// gate.
const WEIGHT_ROWS: usize = 128;
/// Input channels of a block: 128 bytes, the width of the swizzle.
pub(super) const CHANNELS: usize = 64;
/// Units of a warpgroup.
const GROUP: u32 = 128;
/// Two warpgroups compute, a warp loads.
const UNITS: u32 = 2 * GROUP + 32;
/// Cubes of a cluster: they have the same tokens and neighbouring rows of the weights.
pub(super) const CUBES: u32 = 2;
/// Bytes of a stage that are weights.
const WEIGHT_BYTES: u32 = (WEIGHT_ROWS * CHANNELS * 2) as u32;
/// Shared memory for stages and the staging of the output: what is left beside the barriers.
const SHARED_BYTES_MAX: u32 = 224 << 10;
/// How weights lie, as A.
const WEIGHTS: Layout = Layout::Terms { rows: WEIGHT_ROWS };
/// Rows of gate or up that lie side by side: those that a unit has both of.
const INTERLEAVED: usize = 8;

/// Where the rows of the tokens are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Rows {
    /// Rows are their own numbers, and there is one matrix.
    Dense,
    /// Rows have the order of the experts, in x and in the output.
    Sorted,
    /// Rows of x have the order of the experts, those of the output that of the pairs.
    Scatter,
    /// Each head of a row has its own matrix.
    Heads,
}

/// What the cubes of a cluster have in common: each loads half of it for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Shares {
    /// The tokens; their rows of the weights are neighbours.
    Tokens,
    /// The rows of the weights; their tiles of tokens are neighbours. For dense rows that are not gated.
    Weights,
}

/// How a launch divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Tokens of a tile.
    pub tokens: usize,
    /// Parts that the channels are split in, for dense rows that are not gated; with `in_parts` all of those, or one.
    pub splits: usize,
    pub shares: Shares,
    /// Whether sums have the order of `parts.rs`.
    pub in_parts: bool,
}

impl Tiling {
    /// Whether the kernel has the same code.
    pub(super) fn has_code_of(self, other: Self) -> bool {
        let code = |tiling: Self| Self { splits: tiling.splits.min(2), ..tiling };
        code(self) == code(other)
    }
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Tokens of a tile: a multiple of 32 up to 256.
    pub tokens: usize,
    pub rows: Rows,
    pub linear: LinearForm,
    /// bf16, otherwise f16.
    pub bf16: bool,
    /// Whether cubes write their sums in f32, to be added up: the channels are split among them, or weights have several terms.
    pub split: bool,
    pub shares: Shares,
    /// Whether sums have the order of `parts.rs`.
    pub in_parts: bool,
}

const _: () = assert!(CHANNELS == BLOCK && MOST_SPLITS == PARTS, "a split may be a part");

impl Form {
    /// Whether a cube adds up all parts, in registers.
    fn all_parts(self) -> bool {
        self.in_parts && !self.split
    }

    fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Outputs of a cube.
    fn outputs(self) -> usize {
        outputs(self.linear)
    }

    /// Whether tiles of the output are copied by TMA, which goes on under the products of the next tile.
    fn stores_tiles(self) -> bool {
        self.rows == Rows::Dense && !self.linear.gated && !self.split
    }

    /// Tokens of a tile load.
    fn loaded_tokens(self) -> usize {
        self.tokens / if self.shares == Shares::Tokens { CUBES as usize } else { 1 }
    }

    /// Rows of the weights of a tile load.
    fn loaded_weight_rows(self) -> usize {
        WEIGHT_ROWS / if self.shares == Shares::Weights { CUBES as usize } else { 1 }
    }

    /// Bytes of the tokens' part of a stage.
    fn token_bytes(self) -> u32 {
        (self.tokens * CHANNELS * 2) as u32
    }

    fn stage_bytes(self) -> u32 {
        WEIGHT_BYTES + self.token_bytes()
    }

    fn stages(self) -> u32 {
        (SHARED_BYTES_MAX - 2 * self.staging_bytes()) / self.stage_bytes()
    }

    /// The products of a warpgroup with one block of channels.
    fn products(self) -> Mma {
        let (a, b) = (Source::Shared(WEIGHTS), Layout::Terms { rows: self.tokens });
        Mma { n: self.tokens, steps: CHANNELS / 16, elem: self.elem(), a, b, groups: 1 }
    }
}

/// Whether the device has what the kernel needs, and rows lie so that tile loads take them.
pub(super) fn supported(client: &Client, sizes: &LinearSizes) -> bool {
    let &LinearSizes { inputs, outputs, carried, matrix_stride, elems, format: WeightFormat::Dense, .. } = sizes;
    let [x_elem, elem] = elems;
    let half = matches!(elem, ElemType::Float(FloatKind::BF16 | FloatKind::F16)) && x_elem == elem;
    let vectors = [inputs, outputs, carried, matrix_stride].into_iter().all(|len| len.is_multiple_of(VECTOR));
    is_hopper(client) && (half || is_wide(sizes)) && vectors && inputs > 0 && outputs > 0
}

/// Whether the device is one.
pub(super) fn is_hopper(client: &Client) -> bool {
    client.properties().identity.fingerprint == "ptx_sm90"
}

/// Whether weights in f32 are multiplied as several terms in bf16.
fn is_wide(sizes: &LinearSizes) -> bool {
    let elems = [FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
    sizes.elems == elems && sizes.division == Division::Dense && !sizes.form.gated
}

/// Rows of the weights for an output.
pub(super) fn terms(sizes: &LinearSizes) -> usize {
    if is_wide(sizes) { wide::TERMS } else { 1 }
}

/// Outputs of a cube.
pub(super) fn outputs(linear: LinearForm) -> usize {
    if linear.gated { WEIGHT_ROWS / 2 } else { WEIGHT_ROWS }
}

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
    let weight_rows = terms * outputs;
    let (mut heads, mut carry) = (1, None);
    let (rows, x, order, tiles, [count, matrices, token_tiles]) = match work {
        Work::Experts { order, tiles, pairs, experts, rows } => {
            let sizes = [pairs, experts, max_tiles(pairs, experts, tokens)];
            match rows {
                PairRows::Gather { top_k } => {
                    let sorted = gather::launch(client, x, share(&order), [pairs, top_k, inputs], elem);
                    (Rows::Sorted, sorted, order, tiles, sizes)
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
    let form = Form { tokens, rows, linear, bf16, split: splits * terms > 1, shares, in_parts };
    let partial = Partial::new(client, [splits, count, terms, outputs]);
    let x_map = token_map(x, [heads, count, inputs], inputs + carried, elem, form);
    let weight_map = weight_map(weight, [matrices, weight_rows, inputs], terms * matrix_stride, elem, form);
    let out_map = out_map(&out, [count, outputs], elem, form);
    let pairs_of_cubes = splits * pairs_of_tiles([token_tiles, weight_rows], linear, shares);
    let clusters = (multiprocessors(client) / CUBES as usize).clamp(1, pairs_of_cubes);
    // SAFETY: the buffers have the sizes that the arguments state. Tile loads outside of the tensors give zeros, and rows and
    // columns past the end are not written. Pairs of cubes share no output.
    unsafe {
        linear_sm90_kernel::launch_unchecked(
            client,
            CubeCount::Static(CUBES * clusters as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            address,
            VECTOR,
            x_map,
            weight_map,
            out_map,
            order,
            tiles,
            share(&out),
            partial.arg(),
            inputs.div_ceil(CHANNELS) as u32,
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

/// Tokens in tiles, of which each cube of a cluster loads its part for both.
fn token_map(
    x: BufferArg,
    [heads, rows, inputs]: [usize; 3],
    width: usize,
    elem: ElemType,
    form: Form,
) -> TensorMapArg<Tiled> {
    let (shape, strides) = ([heads, rows, inputs], [width, heads * width, 1]);
    let tile = [1, form.loaded_tokens(), CHANNELS];
    // SAFETY: x has as many rows of as many heads, whose channels are `width` apart.
    unsafe { tma::tiled_map(handle(x), &shape, &strides, &tile, elem, TensorMapSwizzle::B128) }
}

/// Weights in tiles of 128 rows. Of a gated output a tile has 8 rows of the gate, the same 8 of up, and so on.
fn weight_map(
    weight: WeightArg,
    [matrices, outputs, inputs]: [usize; 3],
    matrix_stride: usize,
    elem: ElemType,
    form: Form,
) -> TensorMapArg<Tiled> {
    let WeightArg::Dense(elements) = weight;
    let handle = handle(elements);
    // SAFETY: there are as many matrices of as many rows and channels.
    unsafe {
        if form.linear.gated {
            let shape = [matrices, outputs / INTERLEAVED, 2, INTERLEAVED, inputs];
            let strides = [matrix_stride, INTERLEAVED * inputs, outputs * inputs, inputs, 1];
            let tile = [1, WEIGHT_ROWS / (2 * INTERLEAVED), 2, INTERLEAVED, CHANNELS];
            tma::tiled_map(handle, &shape, &strides, &tile, elem, TensorMapSwizzle::B128)
        } else {
            let (shape, strides) = ([matrices, outputs, inputs], [matrix_stride, inputs, 1]);
            tma::tiled_map(
                handle,
                &shape,
                &strides,
                &[1, form.loaded_weight_rows(), CHANNELS],
                elem,
                TensorMapSwizzle::B128,
            )
        }
    }
}

/// The output in tiles that a warpgroup copies.
fn out_map(out: &BufferArg, [rows, outputs]: [usize; 2], elem: ElemType, form: Form) -> TensorMapArg<Tiled> {
    // Where none are copied, it is only a map.
    let (shape, chunk) = if form.stores_tiles() { ([rows, outputs], form.chunk()) } else { ([1, VECTOR], 1) };
    let tile = [chunk, CHANNELS];
    // SAFETY: the output has as many rows of as many channels, or one vector.
    unsafe { tma::tiled_map(handle(share(out)), &shape, &[shape[1], 1], &tile, elem, TensorMapSwizzle::B128) }
}

/// Bytes that a pair of cubes loads for a block of channels.
pub(super) fn pair_bytes(tiling: Tiling) -> usize {
    let (weights, tokens) = match tiling.shares {
        Shares::Tokens => (2 * WEIGHT_ROWS, tiling.tokens),
        Shares::Weights => (WEIGHT_ROWS, 2 * tiling.tokens),
    };
    (weights + tokens) * CHANNELS * 2
}

/// Tiles of pairs of cubes, which compute two tiles of the output each.
pub(super) fn pairs_of_tiles([token_tiles, weight_rows]: [usize; 2], linear: LinearForm, shares: Shares) -> usize {
    let cubes = CUBES as usize;
    match shares {
        Shares::Tokens => token_tiles * weight_rows.div_ceil(outputs(linear) * cubes),
        Shares::Weights => token_tiles.div_ceil(cubes) * weight_rows.div_ceil(outputs(linear)),
    }
}

/// The binding of a buffer that no kernel was given as an alias.
fn handle(buffer: BufferArg) -> cubecl::server::BufferBinding {
    match buffer {
        BufferArg::Handle { handle } => handle.handle,
        BufferArg::Alias { .. } => unreachable!("launchers pass buffers, not aliases"),
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
    let weights = Shared::<[u32]>::new_aligned_slice(comptime!((form.stages() * WEIGHT_BYTES / 4) as usize), 1024usize);
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
        if warp::elect() {
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
        let size!(A) = comptime!(form.tokens / 2);
        let staging_at = shared_address(&staging) + group * comptime!(form.staging_bytes());
        let output = Output { staging_at, group, outputs, width, heads, limit };
        while number < schedule.count {
            let place = Place::read(tiles, &schedule, number, rank, form);
            if place.has_work(form) {
                let acc = ring.multiply::<A>(&place, group, form);
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
    use crate::offline::{Arch, Entry, buffer};
    let entry = |name: &str, kind: FloatKind, rows, gated, tokens| {
        let (elem, bf16) = (ElemType::Float(kind), kind == FloatKind::BF16);
        let shares = if name.starts_with("weights") { Shares::Weights } else { Shares::Tokens };
        let (linear, split) = (LinearForm { gated, limited: gated }, name.starts_with("split"));
        let form = Form { tokens, rows, linear, bf16, split, shares, in_parts: name.ends_with("parts") };
        let name = format!("linear.sm90.{}.{name}", form.elem().name());
        Entry::new(name, move |device, target| {
            linear_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(CUBES, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                VECTOR,
                token_map(buffer(), [1, 256, 64], 64, elem, form),
                weight_map(WeightArg::Dense(buffer()), [1, 256, 64], 256 * 64, elem, form),
                out_map(&buffer(), [256, 64], elem, form),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
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
        entry("gated.256", bf16, Rows::Sorted, true, 256),
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
    ]
    .into_iter()
    .chain(carry::offline())
    .chain(partial::offline())
    .chain(wide::offline())
    .collect()
}
