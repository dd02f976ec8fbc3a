//! Which products Hopper's kernel takes, how it divides them, and what its code depends on.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use super::epilogue::VECTOR;
use super::partial::MOST_SPLITS;
use super::wide;
use crate::experts_mlp::sort::EVEN;
use crate::linear::packed::FP8_COLUMNS;
use crate::linear::parts::{BLOCK, PARTS};
use crate::linear::{Division, LinearForm, LinearSizes, WeightFormat};
use crate::ptx::wgmma::{Elem, Layout, Mma, Source};

/// Rows of the weights that a cube multiplies at a time: 64 for each of its warpgroups. Of a gated output half of them are of the
/// gate.
pub(super) const WEIGHT_ROWS: usize = 128;
/// Tokens that a tile of an expert is multiplied for at least: with fewer, the tensor cores wait for the weights.
const LEAST_TRIMMED: usize = 128;
/// Tokens of a tile load there: more than it is trimmed by, so that there are few loads.
const TRIMMED_LOAD: usize = 64;
/// Tokens of a tile up to which a stage has blocks of codes with one scale of FP8, and sums take it, or four of FP4, one word.
const MOST_TOGETHER: usize = 128;
/// Those whose sums and decoded weights fit in the registers that all units have; where they have two sums, one without its scale.
const MOST_OF_ALL: usize = 128;
const MOST_OF_ALL_TWICE: usize = 96;
/// Those up to which two cubes have the registers of a multiprocessor; of FP4, which has one sum, in rows that experts divide.
const MOST_OF_TWO: usize = 32;
const MOST_OF_TWO_FP4: usize = 64;
/// Input channels of a block: 128 bytes, the width of the swizzle.
pub(in crate::linear) const CHANNELS: usize = 64;
/// Units of a warpgroup.
pub(super) const GROUP: u32 = 128;
/// Registers of a unit where two warpgroups take those of the one whose first warp loads: all that a multiprocessor has.
pub(super) const COMPUTE_REGISTERS: u32 = 232;
pub(super) const LOAD_REGISTERS: u32 = 40;
/// Cubes of a cluster: they have the same tokens and neighbouring rows of the weights.
pub(in crate::linear) const CUBES: u32 = 2;
/// Shared memory for stages and the staging of the output: what is left beside the barriers.
pub(super) const SHARED_BYTES_MAX: u32 = 224 << 10;
/// How weights lie, as A.
pub(super) const WEIGHTS: Layout = Layout::Terms { rows: WEIGHT_ROWS };
/// Rows of gate or up that lie side by side: those that a unit has both of.
pub(super) const INTERLEAVED: usize = 8;

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
pub(in crate::linear) enum Shares {
    /// The tokens; their rows of the weights are neighbours.
    Tokens,
    /// The rows of the weights; their tiles of tokens are neighbours. For dense rows that are not gated.
    Weights,
}

/// How a launch divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::linear) struct Tiling {
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
    pub fn has_code_of(self, other: Self) -> bool {
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
    /// In which format weights are stored.
    pub format: WeightFormat,
}

const _: () = assert!(CHANNELS == BLOCK && MOST_SPLITS == PARTS, "a split may be a part");

impl Form {
    /// Whether a cube adds up all parts, in registers.
    pub fn all_parts(self) -> bool {
        self.in_parts && !self.split
    }

    /// Type of the factors.
    pub fn elem(self) -> Elem {
        if self.halves() { Elem::F16 } else { self.out_elem() }
    }

    /// Type of the output.
    pub fn out_elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }

    /// Whether channels lie so that the codes of a unit are neighbours: where rows are gathered anyway.
    pub fn is_arranged(self) -> bool {
        self.is_grouped() && !self.format.is_dense()
    }

    /// Whether rows in bf16 are multiplied as f16 times a power of two.
    pub fn halves(self) -> bool {
        self.bf16 && self.is_grouped() && self.scales_sums()
    }

    /// Outputs of a cube.
    pub fn outputs(self) -> usize {
        outputs(self.linear)
    }

    /// Whether tiles of the output are copied by TMA, which goes on under the products of the next tile.
    pub fn stores_tiles(self) -> bool {
        self.rows == Rows::Dense && !self.linear.gated && !self.split
    }

    /// Whether rows have the order of their experts.
    pub fn is_grouped(self) -> bool {
        matches!(self.rows, Rows::Sorted | Rows::Scatter)
    }

    /// Whether a tile that has fewer tokens is loaded and multiplied only as far as it has them, in steps of [`EVEN`].
    pub fn is_trimmed(self) -> bool {
        self.is_grouped() && self.tokens > LEAST_TRIMMED
    }

    /// Tokens that a tile is multiplied for.
    pub fn widths(self) -> Vec<usize> {
        if self.is_trimmed() { (LEAST_TRIMMED..=self.tokens).step_by(EVEN).collect() } else { vec![self.tokens] }
    }

    /// Tokens of a tile load.
    pub fn loaded_tokens(self) -> usize {
        match self.shares {
            _ if self.is_trimmed() => TRIMMED_LOAD,
            Shares::Tokens => self.tokens / CUBES as usize,
            Shares::Weights => self.tokens,
        }
    }

    /// Rows of the weights of a tile load.
    pub fn loaded_weight_rows(self) -> usize {
        WEIGHT_ROWS / if self.shares == Shares::Weights { CUBES as usize } else { 1 }
    }

    /// Bytes of the tokens' part of a stage.
    pub fn token_bytes(self) -> u32 {
        self.stage_blocks() * self.block_token_bytes()
    }

    /// The same of a block.
    pub fn block_token_bytes(self) -> u32 {
        (self.tokens * CHANNELS * 2) as u32
    }

    /// Blocks of channels of a stage: those that share a scale, where sums take it.
    pub fn stage_blocks(self) -> u32 {
        if self.tokens <= MOST_TOGETHER { self.blocks_together() } else { 1 }
    }

    /// Bytes of a row of the weights in a stage.
    pub fn weight_row_bytes(self) -> u32 {
        (CHANNELS * bits(self.format) / 8) as u32 * self.stage_blocks()
    }

    /// Elements of the weights' tile map from one block of channels to the next: numbers, or bytes of codes.
    pub fn weight_columns(self) -> u32 {
        if self.format.is_dense() { CHANNELS as u32 } else { self.weight_row_bytes() / self.stage_blocks() }
    }

    /// Bytes of the weights' part of a stage.
    pub fn weight_bytes(self) -> u32 {
        WEIGHT_ROWS as u32 * self.weight_row_bytes()
    }

    /// Whether codes are multiplied as they are, and sums over the channels that share a scale take it: where there are registers for
    /// these sums beside all others.
    pub fn scales_sums(self) -> bool {
        self.format == WeightFormat::Fp8 && self.stage_blocks() > 1
    }

    /// Blocks of channels that are not divided among cubes: those that share a scale of FP8, or a word of FP4's.
    pub fn blocks_together(self) -> u32 {
        if self.format.is_dense() { 1 } else { (FP8_COLUMNS / CHANNELS) as u32 }
    }

    pub fn stage_bytes(self) -> u32 {
        self.weight_bytes() + self.token_bytes()
    }

    pub fn stages(self) -> u32 {
        (SHARED_BYTES_MAX / self.cubes() - 2 * self.staging_bytes()) / self.stage_bytes()
    }

    /// Cubes of a multiprocessor: as many as there are registers for, where decoding is what tiles wait for.
    pub fn cubes(self) -> u32 {
        cubes(self.format, self.tokens, self.is_grouped())
    }

    /// Two warpgroups compute, a warp loads: with those beside it where they give registers away.
    pub fn units(self) -> u32 {
        2 * GROUP + if self.moves_registers() { GROUP } else { 32 }
    }

    /// Whether the warpgroups that compute have more registers than all of a cube have by themselves: for sums of many tokens, and
    /// the weights that codes become.
    pub fn moves_registers(self) -> bool {
        let most = if self.scales_sums() { MOST_OF_ALL_TWICE } else { MOST_OF_ALL };
        !self.format.is_dense() && self.tokens > most
    }

    /// The products of a warpgroup with one block of channels.
    pub fn products(self) -> Mma {
        self.products_of(self.tokens)
    }

    /// Those of so many of a tile's tokens.
    pub fn products_of(self, tokens: usize) -> Mma {
        let a = if self.format.is_dense() { Source::Shared(WEIGHTS) } else { Source::Registers };
        let b = Layout::Terms { rows: self.tokens };
        Mma { n: tokens, steps: CHANNELS / 16, elem: self.elem(), a, b, groups: 1, per_step: 1 }
    }
}

/// Whether the device has what the kernel needs, and rows lie so that tile loads take them.
pub(in crate::linear) fn supported(client: &Client, sizes: &LinearSizes) -> bool {
    let &LinearSizes { inputs, outputs, carried, matrix_stride, elems, format, .. } = sizes;
    let [x_elem, elem] = elems;
    let half = matches!(elem, ElemType::Float(FloatKind::BF16 | FloatKind::F16)) && x_elem == elem;
    let vectors = [inputs, outputs, carried, matrix_stride].into_iter().all(|len| len.is_multiple_of(VECTOR));
    // Rows of codes have a multiple of 16 bytes. Their products have an order of sums that no other kernel has.
    let of_format = match format {
        WeightFormat::Dense => half || is_wide(sizes),
        WeightFormat::Fp8 | WeightFormat::Fp4 => half && inputs.is_multiple_of(32) && !sizes.batch_invariant,
    };
    is_hopper(client) && of_format && vectors && inputs > 0 && outputs > 0
}

/// Whether the device is one.
pub(in crate::linear) fn is_hopper(client: &Client) -> bool {
    client.properties().identity.fingerprint == "ptx_sm90"
}

/// Whether weights in f32 are multiplied as several terms in bf16.
pub(super) fn is_wide(sizes: &LinearSizes) -> bool {
    let elems = [FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
    sizes.elems == elems && sizes.format.is_dense() && sizes.division == Division::Dense && !sizes.form.gated
}

/// Rows of the weights for an output.
pub(in crate::linear) fn terms(sizes: &LinearSizes) -> usize {
    if is_wide(sizes) { wide::TERMS } else { 1 }
}

/// Outputs of a cube.
pub(in crate::linear) fn outputs(linear: LinearForm) -> usize {
    if linear.gated { WEIGHT_ROWS / 2 } else { WEIGHT_ROWS }
}

/// Cubes of a multiprocessor.
pub(in crate::linear) fn cubes(format: WeightFormat, tokens: usize, of_experts: bool) -> u32 {
    let most = if format == WeightFormat::Fp4 && of_experts { MOST_OF_TWO_FP4 } else { MOST_OF_TWO };
    if !format.is_dense() && tokens <= most { 2 } else { 1 }
}

/// Bits of a weight, as tile loads see it.
pub(super) fn bits(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense => 16,
        WeightFormat::Fp8 => 8,
        WeightFormat::Fp4 => 4,
    }
}

/// Bytes that a pair of cubes loads for a block of channels.
pub(in crate::linear) fn pair_bytes(tiling: Tiling, format: WeightFormat) -> usize {
    let (weights, tokens) = match tiling.shares {
        Shares::Tokens => (2 * WEIGHT_ROWS, tiling.tokens),
        Shares::Weights => (WEIGHT_ROWS, 2 * tiling.tokens),
    };
    weights * CHANNELS * bits(format) / 8 + tokens * CHANNELS * 2
}

/// Tiles of pairs of cubes, which compute two tiles of the output each.
pub(in crate::linear) fn pairs_of_tiles(
    [token_tiles, weight_rows]: [usize; 2],
    linear: LinearForm,
    shares: Shares,
) -> usize {
    let cubes = CUBES as usize;
    match shares {
        Shares::Tokens => token_tiles * weight_rows.div_ceil(outputs(linear) * cubes),
        Shares::Weights => token_tiles.div_ceil(cubes) * weight_rows.div_ceil(outputs(linear)),
    }
}
