//! Projections of a few tokens with matrix instructions, for f16 and bf16: the weights come from the memory once, straight into
//! registers.
//!
//! A cube has 16 rows of the weights and a tile of tokens; its planes share the input channels, and add up in shared memory. A
//! product sums over the channels in any order as long as both factors have the same: so a unit takes 16 bytes in a row, which
//! serve two steps of 16 channels. Of a gated output the cube has 8 rows of the gate and 8 of `up`, placed so that a unit gets
//! both. The row of a single token a cube may write for itself before that (`source.rs`), and the expert of a single
//! token's pair it may choose (`choice.rs`).
//!
//! The order of a sum depends on the sizes of the matrix alone: a token's output does not change with the other tokens. Where
//! `sm90` computes many tokens with the same bits, it is that of `parts.rs`, for which units exchange their channels.

mod kernel;
pub(crate) mod products;

use cubecl::features::MmaConfig;
use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use self::kernel::linear_mma_kernel;
use crate::common::launch::multiprocessors;
use crate::linear::choice::PairExpertsArgs;
use crate::linear::grid::{Grid, Rows};
use crate::linear::latents::BesideArgs;
use crate::linear::parts::BLOCK;
use crate::linear::select::Choice;
use crate::linear::source::{self, RowSourceArgs};
use crate::linear::{Before, LatentRows, LinearForm, LinearSizes, Products};
use crate::merge_splits::MergeSplitsArgs;
use crate::residual_norm::{AddRmsNormArgs, UNITS as NORM_UNITS};

/// Units of a plane. The matrix instructions are defined for this number.
const LANES: usize = 32;
/// Planes of a cube, which share the channels.
const PLANES: usize = 8;

/// The matrix instruction: 16 rows, 8 tokens, 16 channels.
const M: usize = 16;
const N: usize = 8;
const K: usize = 16;

/// Elements of a vector: 16 bytes.
const VECTOR: usize = 8;
/// Channels that four units load at once.
const CHUNK: usize = 4 * VECTOR;
/// Chunks whose loads a plane starts before it computes.
const AHEAD: usize = 4;
/// Channels from which all loads of a plane are worth starting at once.
const DEEP: usize = AHEAD * CHUNK * PLANES;
/// Groups of 8 tokens in a tile at most.
const MAX_STEPS: usize = 8;
/// Channels of a row that a cube writes for itself at most: they are in shared memory.
const MAX_OWN_ROW: usize = 1 << 14;

const _: () =
    assert!(LANES * PLANES == NORM_UNITS, "a cube computes the norm of a row in the same order as another launch");

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    rows: Rows,
    linear: LinearForm,
    /// Groups of 8 tokens.
    steps: usize,
    /// Whether a multiprocessor has one cube or two: a plane starts all its loads at once, since no other one fills the time.
    few_cubes: bool,
    /// Whether there is a second matrix.
    second: bool,
    /// Vectors of the row that a cube writes for itself; 0 if rows are in memory.
    own_row: usize,
    /// Whether a pair's cube chooses its expert.
    routed: bool,
    /// Whether sums have the order of `parts.rs`, for Hopper.
    in_parts: bool,
}

impl Form {
    fn tokens(&self) -> usize {
        self.steps * N
    }

    /// Outputs of a cube.
    fn outputs(&self) -> usize {
        if self.linear.gated { M / 2 } else { M }
    }

    /// Chunks whose loads a plane starts before it computes: fewer where the tokens take the registers.
    fn ahead(&self) -> usize {
        match self.steps {
            _ if self.own_row > 0 => {
                let turns = self.turns();
                // All, or about as many each time; fewer, since the loop takes registers, too.
                let some = turns.div_ceil(turns.div_ceil(AHEAD + AHEAD / 2));
                if turns <= 2 * AHEAD { turns } else { some.next_multiple_of(self.together()) }
            }
            1 if self.few_cubes => 2 * AHEAD,
            1 | 2 => AHEAD,
            _ => AHEAD / 2,
        }
    }

    /// Chunks that a plane takes of the row that a cube writes for itself.
    fn turns(&self) -> usize {
        let channels = self.together() * CHUNK;
        (self.own_row * VECTOR).div_ceil(channels * PLANES) * self.together()
    }

    /// Chunks that a plane takes one after the other.
    fn together(&self) -> usize {
        if self.in_parts { BLOCK / CHUNK } else { 1 }
    }
}

/// Whether the device has what the kernel needs, the channels come out even, and rows and matrices lie so that 16 bytes can be
/// loaded at once.
pub(super) fn supported(client: &Client, sizes: &LinearSizes) -> bool {
    let &LinearSizes { inputs, carried, matrix_stride, elems: [_, elem], .. } = sizes;
    let (features, float) = (client.features(), ElemType::Float(FloatKind::F32));
    let config = MmaConfig { a_type: elem, b_type: elem, cd_type: float, m: M as u32, n: N as u32, k: K as u32 };
    let hardware = &client.properties().hardware;
    features.matmul.mma.contains(&config)
        && features.memory_reinterpret
        && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32)
        && inputs.is_multiple_of(CHUNK)
        && [carried, matrix_stride].into_iter().all(|len| len.is_multiple_of(VECTOR))
}

/// Whether cubes should do this themselves.
pub(crate) fn takes(client: &Client, products: &Products, grid: &Grid, before: &Before) -> bool {
    match before {
        Before::Nothing => true,
        Before::Merge(merge) => merges(client, products, grid, merge),
        Before::Norm(norm) => norms(client, products, grid, norm),
    }
}

/// Whether cubes should compute the norm that they multiply: that of a single token.
fn norms(client: &Client, products: &Products, grid: &Grid, norm: &AddRmsNormArgs) -> bool {
    let one_token = grid.rows == Rows::Dense && (grid.tokens, norm.rows) == (1, 1) && norm.width == products.inputs;
    one_token && norm.width <= MAX_OWN_ROW && source::pays_norm(client, norm, grid.cubes(products.outputs, M))
}

/// Whether cubes should merge the splits of the row that they multiply: those of a token's head, if a unit's weights fit into
/// registers meanwhile.
fn merges(client: &Client, products: &Products, grid: &Grid, merge: &MergeSplitsArgs) -> bool {
    let one_token = grid.rows == Rows::Heads && (grid.tokens, merge.batch, merge.rows) == (1, 1, grid.per_token);
    let whole_row = products.carried == 0 && merge.width == products.inputs;
    one_token
        && whole_row
        && products.inputs <= 2 * DEEP
        && source::pays(client, merge, grid.cubes(products.outputs, M))
}

/// Whether the launch can turn the channels that it carries, and put latents into a cache.
pub(crate) fn takes_latents(carried: usize, latents: &LatentRows) -> bool {
    carried == 2 * latents.pairs && latents.cache_width.is_multiple_of(VECTOR)
}

/// Tokens of a tile for matrices that meet so many rows.
pub(super) fn tile_tokens(rows: usize) -> usize {
    rows.div_ceil(N).next_power_of_two().min(MAX_STEPS) * N
}

/// Writes the output of at least one tile.
pub(super) fn launch(
    client: &Client,
    products: Products,
    grid: Grid,
    (before, latents): (Before, Option<LatentRows>),
    (linear, Choice { tokens, in_parts, .. }): (LinearForm, Choice),
    address: AddressType,
    elem: ElemType,
) {
    let (steps, second) = (tokens / N, grid.second_width > 0);
    let sizes = grid.sizes(&products, VECTOR);
    let (source, x) = RowSourceArgs::new(client, before, products.x);
    let own_row = if matches!(source, RowSourceArgs::Memory) { 0 } else { products.inputs / VECTOR };
    let routed = grid.route.is_some();
    let mut form = Form { rows: grid.rows, linear, steps, few_cubes: own_row > 0, second, own_row, routed, in_parts };
    let cubes = grid.cubes(products.outputs, form.outputs());
    form.few_cubes |= form.steps == 1 && products.inputs >= DEEP && cubes <= 2 * multiprocessors(client);
    let pairs = PairExpertsArgs::new(client, grid.route);
    let (mut beside, mut cubes_beside) = (BesideArgs::Nothing, 0);
    if let Some(latents) = latents {
        let width = products.inputs + products.carried;
        (beside, cubes_beside) = latents.bind([grid.tokens, width, VECTOR, LANES * PLANES]);
    }
    linear_mma_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes + cubes_beside, CubeDim::new_single()),
        CubeDim::new_2d(LANES as u32, PLANES as u32),
        address,
        VECTOR,
        x,
        products.weight.rows(),
        grid.second.rows(),
        grid.order,
        grid.tiles,
        products.out,
        grid.second_out,
        sizes,
        products.limit,
        source,
        beside,
        pairs,
        form,
        elem,
    );
}
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::linear::grid::offline_sizes as sizes;
    use crate::linear::{choice, latents, weight};
    use crate::offline::{Arch, Entry, form};
    use crate::route_experts as route;
    let beside = |latents| if latents { latents::offline(LANES * PLANES) } else { BesideArgs::Nothing };
    // Rows of a token's head, of V2-Lite, and of V3.
    let source = |own_row| match own_row * VECTOR {
        0 => RowSourceArgs::Memory,
        512 => source::offline_splits(),
        2048 => source::offline_normed(6),
        _ => source::offline_normed(8),
    };
    let cube = CubeDim::new_2d(LANES as u32, PLANES as u32);
    let forms = [FloatKind::F16, FloatKind::BF16].into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        let entry = |name: &'static str, rows, gated, limited, steps, few_cubes| {
            let second = matches!(rows, Rows::TokenGather | Rows::TokenScatter) || name.contains("pair");
            let own_row = match name {
                "linear.mma.merged_heads" => 512 / VECTOR,
                "linear.mma.normed_pair" => 2048 / VECTOR,
                "linear.mma.normed_pair.v3" | "linear.mma.normed_pair.v3.parts" => 7168 / VECTOR,
                _ => 0,
            };
            let route = match name {
                "linear.mma.token_routed_up" => Some(route::V2_LITE),
                "linear.mma.token_routed_up.v3" | "linear.mma.token_routed_up.v3.parts" => Some(route::V3),
                _ => None,
            };
            let pairs = move || route.map_or(PairExpertsArgs::Listed, choice::offline);
            let (linear, routed) = (LinearForm { gated, limited }, route.is_some());
            let in_parts = name.ends_with("parts");
            let form = Form { rows, linear, steps, few_cubes, second, own_row, routed, in_parts };
            let (bits, latents) = (AddressType::U32, name == "linear.mma.turned_heads");
            let form = form!(
                linear_mma_kernel,
                cube,
                [
                    bits,
                    VECTOR,
                    _,
                    weight::offline(),
                    weight::offline(),
                    _,
                    _,
                    _,
                    _,
                    sizes(),
                    1.0,
                    source(own_row),
                    beside(latents),
                    pairs(),
                    form,
                    elem
                ]
            );
            // The order of Hopper's other kernel.
            Entry::of(kind, name, form).on(move |arch| if in_parts { arch == Arch::Sm90a } else { arch != Arch::Sm75 })
        };
        [
            entry("linear.mma.8", Rows::Dense, false, false, 1, false),
            entry("linear.mma.few", Rows::Dense, false, false, 1, true),
            entry("linear.mma.few_gated", Rows::Dense, true, false, 1, true),
            entry("linear.mma.pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair", Rows::Dense, false, false, 1, true),
            entry("linear.mma.normed_pair.v3", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64", Rows::Dense, false, false, 8, false),
            entry("linear.mma.heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.turned_heads", Rows::Heads, false, false, 1, false),
            entry("linear.mma.merged_heads", Rows::Heads, false, false, 1, true),
            entry("linear.mma.experts_up", Rows::Gather, true, true, 1, false),
            entry("linear.mma.experts_down", Rows::Scatter, false, false, 1, false),
            entry("linear.mma.token_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_routed_up.v3", Rows::TokenGather, true, false, 1, false),
            entry("linear.mma.token_down", Rows::TokenScatter, false, false, 1, false),
            entry("linear.mma.few.parts", Rows::Dense, false, false, 1, true),
            entry("linear.mma.64.parts", Rows::Dense, false, false, 8, false),
            entry("linear.mma.normed_pair.v3.parts", Rows::Dense, false, false, 1, true),
            entry("linear.mma.token_routed_up.v3.parts", Rows::TokenGather, true, false, 1, false),
        ]
    });
    forms.collect()
}
