//! Which products the kernel takes, what it does before and beside them, and how it divides the work. Constants here were measured;
//! the README of `linear` says where.

use cubecl::features::MmaConfig;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::{CHUNK, K, LANES, M, N, PLANES, VECTOR};
use crate::common::launch::multiprocessors;
use crate::linear::grid::{Grid, Rows};
use crate::linear::parts::BLOCK;
use crate::linear::{Before, LatentRows, LinearArgs, LinearForm, LinearSizes, Products, WeightFormat, Work};
use crate::merge_splits::MergeSplitsArgs;
use crate::norm_rope::NormRopeArgs;
use crate::residual_norm::{AddRmsNormArgs, Summand};

/// Codes of a row that a unit takes at a time: 16, or, of FP4 alone, 32, which have a scale.
pub(super) const LEAST_CODES: usize = 16;
pub(super) const MOST_CODES: usize = 32;

/// Channels of a single row of codes at most: a cube writes it into shared memory.
const MAX_SINGLE_ROW: usize = 1 << 15;
/// And what they are a multiple of: blocks of either format are whole.
const SINGLE_CHANNELS: usize = 128;

/// Channels of a row that four loads of a plane have at most.
const SHORT_ROW: usize = 2048;

/// Chunks whose loads a plane starts before it computes.
const AHEAD: usize = 4;
/// Channels from which all loads of a plane are worth starting at once.
const DEEP: usize = AHEAD * CHUNK * PLANES;
/// Cubes that a multiprocessor has at a time, at most: more of them norm a row one after the other, which takes longer than a launch.
const CUBES_AT_A_TIME: usize = 4;
/// Groups of outputs that a cube takes one after the other, at most, and how often all multiprocessors have new cubes, at least.
const MOST_GROUPS: usize = 8;
const LEAST_ROUNDS: usize = 8;
/// Groups of 8 tokens in a tile at most.
const MAX_STEPS: usize = 8;
/// Channels of a row that a cube writes for itself at most: they are in shared memory.
const MAX_OWN_ROW: usize = 1 << 14;

/// Bytes of splits that the cubes of a multiprocessor read in less time than a launch takes, by the speed of an H200's L2 cache.
const MOST_BYTES: usize = 1 << 16;
/// The same of the rows of a sum: a launch of its own takes longer, with a single cube.
const MOST_BYTES_OF_SUM: usize = 1 << 18;

/// Whether the device has what the kernel needs, the channels come out even, and rows and matrices lie so that 16 bytes can be
/// loaded at once.
pub(in crate::linear) fn supported(client: &Client, sizes: &LinearSizes) -> bool {
    let &LinearSizes { inputs, outputs, carried, matrix_stride, elems: [_, elem], format, .. } = sizes;
    // Blocks of codes end with a vector, so that a load is of one block.
    let reads = match format {
        WeightFormat::Dense | WeightFormat::Fp8 | WeightFormat::Fp4 => true,
    };
    reads
        && has_instruction(client, elem)
        && inputs.is_multiple_of(CHUNK)
        // With the other half of a gated output.
        && (inputs / VECTOR).checked_mul(outputs).is_some_and(|vectors| vectors <= u32::MAX as usize / 2)
        && [carried, matrix_stride].into_iter().all(|len| len.is_multiple_of(VECTOR))
}

/// Whether the device has the matrix instruction for such numbers, and planes of 32 units.
pub(in crate::linear) fn has_instruction(client: &Client, elem: ElemType) -> bool {
    let (features, float) = (client.features(), ElemType::Float(FloatKind::F32));
    let config = MmaConfig { a_type: elem, b_type: elem, cd_type: float, m: M as u32, n: N as u32, k: K as u32 };
    let hardware = &client.properties().hardware;
    features.matmul.mma.contains(&config)
        && features.memory_reinterpret
        && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32)
}

/// Whether cubes should do this themselves.
pub(crate) fn takes(client: &Client, products: &Products, grid: &Grid, before: &Before) -> bool {
    match before {
        Before::Nothing => true,
        // Cubes that write a row for themselves share its channels.
        _ if has_short_rows(client, products, grid) => false,
        Before::Merge(merge) => merges(client, products, grid, merge),
        Before::Norm(norm) => norms(client, products, grid, norm),
        Before::NormRope(norm_rope) => norm_ropes(client, products, grid, norm_rope),
    }
}

/// Whether cubes should compute the norm that they multiply: that of a single token.
fn norms(client: &Client, products: &Products, grid: &Grid, norm: &AddRmsNormArgs) -> bool {
    let one_token = grid.rows == Rows::Dense && (grid.tokens, norm.rows) == (1, 1) && norm.width == products.inputs;
    // A cube keeps the weights of either matrix while it computes the norm.
    let one_format = grid.second_width == 0 || grid.second.format() == products.weight.format();
    one_token
        && one_format
        && grid.more.is_empty()
        && norm.width <= MAX_OWN_ROW
        && pays_norm(client, norm, grid.cubes(products.outputs, M))
}

/// Whether cubes should merge the splits of the row that they multiply: those of a token's head, if a unit's weights fit into
/// registers meanwhile.
fn merges(client: &Client, products: &Products, grid: &Grid, merge: &MergeSplitsArgs) -> bool {
    let one_token = grid.rows == Rows::Heads && (grid.tokens, merge.batch, merge.rows) == (1, 1, grid.per_token);
    let whole_row = products.carried == 0 && merge.width == products.inputs;
    one_token && whole_row && products.inputs <= 2 * DEEP && pays(client, merge, grid.cubes(products.outputs, M))
}

/// Whether cubes should apply norm and RoPE to the row that they multiply: that of a single token, or one of its groups of heads. The
/// order of the sums is that of vectors as this kernel loads them.
fn norm_ropes(client: &Client, products: &Products, grid: &Grid, args: &NormRopeArgs) -> bool {
    let (inputs, whole) = (products.inputs, args.heads * args.width);
    let one_token = matches!(grid.rows, Rows::Dense | Rows::Heads) && (grid.tokens, args.tokens) == (1, 1);
    let rows_of_heads = args.width > 0 && inputs.is_multiple_of(args.width) && grid.per_token * inputs == whole;
    let one_format =
        grid.more.is_empty() && (grid.second_width == 0 || grid.second.format() == products.weight.format());
    let same_order = args.shape(client.properties()).vector == VECTOR;
    let cubes = grid.cubes(products.outputs, M).div_ceil(multiprocessors(client));
    let pays = cubes <= CUBES_AT_A_TIME && cubes * inputs * args.elem.size() <= MOST_BYTES;
    one_token && rows_of_heads && products.carried == 0 && one_format && same_order && inputs <= MAX_OWN_ROW && pays
}

/// Whether the launch can turn the channels that it carries, and put latents into a cache.
pub(crate) fn takes_latents(carried: usize, latents: &LatentRows) -> bool {
    carried == 2 * latents.pairs && latents.cache_width.is_multiple_of(VECTOR)
}

/// Whether the last cube to write a single token's row of `out` can norm it. The order of the sum is that of vectors as this kernel loads
/// them.
pub(crate) fn takes_norm(client: &Client, args: &LinearArgs, norm: &NormRopeArgs) -> bool {
    let one_token = matches!(args.work, Work::Dense { rows: 1, .. }) && args.inputs * args.outputs > 0;
    one_token && norm.width == args.outputs && norm.shape(client.properties()).vector == VECTOR
}

/// Tokens of a tile for matrices that meet so many rows.
pub(in crate::linear) fn tile_tokens(rows: usize) -> usize {
    rows.div_ceil(N).next_power_of_two().min(MAX_STEPS) * N
}

/// How `single.rs` multiplies a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Single {
    /// Loads of codes of each of its two rows that a unit starts before it decodes any.
    pub loads: usize,
    /// Whether the next load starts as soon as one is decoded, and not when all are.
    pub refills: bool,
    /// Planes of a cube, and how many of them share the channels of a group of outputs.
    pub planes: usize,
    pub sharing: usize,
}

impl Single {
    /// Rows of experts in FP4 are decoded for so long that a plane's share is best large: what it does beside its codes counts less.
    pub const FP4_EXPERTS: Self = Self { loads: 2, refills: true, planes: 4, sharing: 2 };
    /// Of short rows a plane has little, whoever shares them.
    pub const SHORT: Self = Self { loads: 2, refills: false, planes: 4, sharing: 4 };

    /// With all planes for one group of outputs.
    pub fn whole(loads: usize) -> Self {
        Self { loads, refills: false, planes: PLANES, sharing: PLANES }
    }
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub rows: Rows,
    pub linear: LinearForm,
    /// Groups of 8 tokens.
    pub steps: usize,
    /// Whether a plane starts all its loads at once: where a multiprocessor has one cube or two, no other one fills the time.
    pub at_once: bool,
    /// Codes of a row that a unit takes at a time, of weights in blocks: 16, or 32; otherwise 0.
    pub codes: usize,
    /// Whether a cube takes several groups of outputs, one after the other (`groups.rs`).
    pub several: bool,
    /// Of the one row, if that is multiplied as `single.rs` does.
    pub single: Option<Single>,
    /// Whether there is a second matrix.
    pub second: bool,
    /// Vectors of the row that a cube writes for itself; 0 if rows are in memory.
    pub own_row: usize,
    /// Whether a pair's cube chooses its expert.
    pub routed: bool,
    /// Whether sums have the order of `parts.rs`, for Hopper.
    pub in_parts: bool,
    /// Whether each plane has outputs of its own, in place of a share of the channels.
    pub apart: bool,
}

impl Form {
    /// The same, where so many cubes multiply rows of so many channels. Codes are half of the bytes or less, and what decodes them
    /// would come between their loads: a plane starts all of those at once, too.
    pub fn for_cubes(self, client: &Client, inputs: usize, cubes: usize, format: WeightFormat) -> Self {
        let few = inputs >= DEEP && cubes <= 2 * multiprocessors(client);
        let at_once = self.steps == 1 && (few || !format.is_dense());
        Self { at_once: self.at_once || at_once, ..self }
    }

    /// That of a dense matrix beside others of this form.
    pub fn of_more(self, in_parts: bool) -> Self {
        Self { second: true, at_once: false, codes: 0, single: None, own_row: 0, in_parts, apart: false, ..self }
    }

    /// Channels that four units load at once.
    pub fn chunk(&self) -> usize {
        if self.codes > 0 { 4 * self.codes } else { CHUNK }
    }

    pub fn tokens(&self) -> usize {
        self.steps * N
    }

    /// Sums of a group, of all planes.
    pub fn sums(&self) -> usize {
        self.planes() * M * self.tokens()
    }

    /// Outputs of a cube.
    pub fn outputs(&self) -> usize {
        outputs(self.linear) * (self.planes() / self.sharing())
    }

    /// Planes that share the channels.
    pub fn sharing(&self) -> usize {
        if self.apart { 1 } else { self.single.map_or(PLANES, |single| single.sharing) }
    }

    pub fn planes(&self) -> usize {
        self.single.map_or(PLANES, |single| single.planes)
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        LANES * self.planes()
    }

    /// How the single row is multiplied.
    pub fn single(&self) -> Single {
        self.single.unwrap_or(Single::whole(1))
    }

    /// Chunks whose loads a plane starts before it computes: fewer where the tokens take the registers.
    pub fn ahead(&self) -> usize {
        match self.steps {
            _ if self.own_row > 0 => {
                let turns = self.takes_rope();
                // All, or about as many each time; fewer, since the loop takes registers, too.
                let some = turns.div_ceil(turns.div_ceil(AHEAD + AHEAD / 2));
                if turns <= 2 * AHEAD { turns } else { some.next_multiple_of(self.together()) }
            }
            // Of FP8 as many bytes as of numbers. With fewer loads more cubes fit.
            _ if self.codes > 0 => match self.steps {
                1 | 2 => AHEAD / 2,
                _ => 1,
            },
            1 if self.at_once => 2 * AHEAD,
            1 | 2 => AHEAD,
            _ => AHEAD / 2,
        }
    }

    /// Chunks that a plane takes of the row that a cube writes for itself.
    pub fn takes_rope(&self) -> usize {
        let channels = self.together() * self.chunk();
        (self.own_row * VECTOR).div_ceil(channels * PLANES) * self.together()
    }

    /// Chunks that a plane takes one after the other.
    pub fn together(&self) -> usize {
        if self.in_parts { BLOCK / CHUNK } else { 1 }
    }
}

/// Codes of each row that units take at a time: where all weights are in blocks and rows have a multiple of 64 channels 16, or, of FP4
/// in bf16, 32 where each plane has as many of these: half of the loads. Otherwise 0.
pub(super) fn codes_at_once(products: &Products, grid: &Grid, elem: ElemType) -> usize {
    let has_second = grid.second_width > 0;
    let formats = [products.weight.format(), if has_second { grid.second.format() } else { products.weight.format() }];
    let all = |channels: usize| row_lengths(products, grid).into_iter().all(|inputs| inputs.is_multiple_of(channels));
    let bf16 = elem == ElemType::Float(FloatKind::BF16);
    match formats {
        _ if formats.into_iter().any(WeightFormat::is_dense) || !all(4 * LEAST_CODES) => 0,
        [WeightFormat::Fp4, WeightFormat::Fp4] if bf16 && all(4 * MOST_CODES * PLANES) => MOST_CODES,
        _ => LEAST_CODES,
    }
}

/// Whether cubes take several groups of outputs: those of experts, whose tiles are listed on the device. Of decoding rows a cube is short, so
/// that what it does before and behind that counts, and there are cubes for more tiles than there turn out to be.
pub(super) fn takes_several(grid: &Grid, codes: usize) -> bool {
    codes > 0 && matches!(grid.rows, Rows::Gather | Rows::Scatter)
}

/// Outputs of a group.
pub(super) fn outputs(linear: LinearForm) -> usize {
    if linear.gated { M / 2 } else { M }
}

/// How many, where there would be so many cubes with one: fewer where there are few, so that all multiprocessors end together.
pub(super) fn groups_of_cube(client: &Client, cubes: usize) -> usize {
    let at_a_time = CUBES_AT_A_TIME * multiprocessors(client);
    (cubes / (LEAST_ROUNDS * at_a_time)).clamp(1, MOST_GROUPS)
}

/// Whether the rows of heads are so short that half of the planes at least would have no channels, and there are many of them: few cubes
/// leave multiprocessors without one. How many tokens there are plays no part.
pub(super) fn has_short_rows(client: &Client, products: &Products, grid: &Grid) -> bool {
    let cubes = grid.per_token * products.outputs.div_ceil(M * PLANES);
    grid.rows == Rows::Heads && products.inputs <= CHUNK * PLANES / 2 && cubes >= multiprocessors(client)
}

/// Whether all weights are in blocks and each cube has one row of x, which is multiplied as `single.rs` does.
pub(super) fn takes_single(products: &Products, grid: &Grid, elem: ElemType) -> bool {
    let one_row = match grid.rows {
        Rows::Dense | Rows::Heads => grid.tokens == 1,
        Rows::TokenGather | Rows::TokenScatter => true,
        Rows::Gather | Rows::Scatter => false,
    };
    let fits = |inputs: usize| inputs.is_multiple_of(SINGLE_CHANNELS) && inputs <= MAX_SINGLE_ROW;
    one_row && codes_at_once(products, grid, elem) > 0 && row_lengths(products, grid).into_iter().all(fits)
}

/// How a row is multiplied by so many groups of outputs. Few need all loads under way; of many, those with fewer loads have registers for
/// more cubes. `is_alone`: the launch does nothing before or beside its products, for which cubes would have all planes.
pub(super) fn single_of(
    client: &Client,
    grid: &Grid,
    groups: usize,
    (format, longest): (WeightFormat, usize),
    is_alone: bool,
) -> Single {
    let is_short = format == WeightFormat::Fp8 && longest <= SHORT_ROW;
    match grid.rows {
        _ if 2 * groups <= 7 * multiprocessors(client) => Single::whole(4),
        Rows::TokenGather | Rows::TokenScatter if is_alone && format == WeightFormat::Fp4 => Single::FP4_EXPERTS,
        Rows::Dense if is_alone && is_short => Single::SHORT,
        Rows::Dense | Rows::Gather | Rows::Scatter => Single::whole(2),
        Rows::TokenGather if is_short => Single::whole(2),
        Rows::TokenGather | Rows::TokenScatter | Rows::Heads => Single::whole(1),
    }
}

/// Channels of the longest row.
pub(super) fn longest_row(products: &Products, grid: &Grid) -> usize {
    row_lengths(products, grid).into_iter().max().unwrap_or(products.inputs)
}

/// Channels of the rows of x: of a token's second product the shared experts' have a width of their own.
fn row_lengths(products: &Products, grid: &Grid) -> [usize; 2] {
    let has_own = grid.rows == Rows::TokenScatter && grid.second_width > 0;
    [products.inputs, if has_own { grid.second_width } else { products.inputs }]
}

/// Whether so many cubes, of which each merges a row, are faster than a launch of [`merge_splits`](crate::merge_splits).
fn pays(client: &Client, merge: &MergeSplitsArgs, cubes: usize) -> bool {
    let bytes = merge.items * merge.width * size_of::<f32>();
    cubes.div_ceil(multiprocessors(client)) * bytes <= MOST_BYTES
}

/// Whether so many cubes, of which each computes the sum and its norm, are faster than a launch of
/// [`residual_norm`](crate::residual_norm).
fn pays_norm(client: &Client, norm: &AddRmsNormArgs, cubes: usize) -> bool {
    let rows = match &norm.y {
        Summand::Rows(_) => 2,
        Summand::Experts(outputs) => 2 + outputs.top_k,
    };
    let bytes = rows * norm.width * norm.elem.size();
    cubes.div_ceil(multiprocessors(client)) * bytes <= MOST_BYTES_OF_SUM
}
