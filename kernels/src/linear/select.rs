//! Which kernel computes products, and how it divides the work. Constants here were measured; the README says where.

use std::fmt;

use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use super::mma;
use super::plain;
#[cfg(feature = "cuda")]
use super::sizes::Division;
use super::sizes::{LinearSizes, VECTOR, pairs};
use super::{UNITS, WeightFormat, choose};
#[cfg(feature = "cuda")]
use super::{sm90, tiled};
#[cfg(feature = "cuda")]
use crate::common::launch::multiprocessors;
use crate::common::select::{Path, Table, Variant};

/// Outputs up to which a row has all units of a cube: with more cubes there is enough to do for a GPU (a router's logits).
pub(crate) const FEW_OUTPUTS: usize = 512;
/// Outputs up to which that leaves much of a GPU without work, and channels from which on more units for each row are the faster (the
/// mixers of DeepSeek-V4's streams). See [`plain_units`].
const FEWEST_OUTPUTS: usize = 128;
const LONG: usize = 4096;
/// Units of a cube there at most, for each byte of an element: 1024 have 64 registers each, in which loads of f32 fit.
const UNITS_PER_BYTE: usize = 256;
/// Channels that every kernel takes at once.
const JOINED: usize = 32;
/// The same of codes, where rows have a multiple of as many: of some rows, and of a single one.
const JOINED_CODES: [usize; 2] = [64, 128];

/// The implementations, the fastest first.
pub(super) const TABLE: Table<LinearSizes, Choice> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; f16 or bf16, or a weight in f32 of rows in bf16; inputs and outputs of a multiple of 8 \
                (batch-invariant, and weights in blocks, which are not: inputs of a multiple of 32); more rows than a small batch has",
        form: sm90_choice,
        #[cfg(feature = "offline")]
        offline: sm90::offline,
    },
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Mma,
        needs: "matrix instructions; f16 or bf16, inputs of a multiple of 32 (with asynchronous copies, for more than 64 rows of a \
                matrix: inputs and outputs of a multiple of 8), matrices and carried channels of 16 bytes",
        form: |client, sizes| tiled_choice(client, sizes).or_else(|| small_batch_choice(client, sizes)),
        #[cfg(feature = "offline")]
        offline: || [mma::offline(), super::streamed::offline(), tiled::offline()].into_iter().flatten().collect(),
    },
    Variant {
        path: Path::Plain,
        needs: "nothing",
        form: |_, sizes| match sizes.format {
            WeightFormat::Dense | WeightFormat::Fp8 | WeightFormat::Fp4 => Some(Choice::of(Path::Plain, plain::TOKENS)),
        },
        #[cfg(feature = "offline")]
        offline: plain::offline,
    },
]);

/// A kernel, and how it divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Which one.
    pub path: Path,
    /// Tokens of a tile.
    pub tokens: usize,
    /// Whether sums have the order of `parts.rs`.
    #[cfg(feature = "cuda")]
    pub(super) in_parts: bool,
    /// How Hopper's kernel divides the work.
    #[cfg(feature = "cuda")]
    pub(super) tiling: Option<sm90::Tiling>,
    /// Whether matrix instructions multiply tiles of many rows in shared memory.
    #[cfg(feature = "cuda")]
    pub(super) tiled: bool,
}

impl Choice {
    pub(super) fn of(path: Path, tokens: usize) -> Self {
        Self {
            path,
            tokens,
            #[cfg(feature = "cuda")]
            in_parts: false,
            #[cfg(feature = "cuda")]
            tiling: None,
            #[cfg(feature = "cuda")]
            tiled: false,
        }
    }

    /// Whether it is the kernel for many rows of GPUs other than Hopper.
    pub fn is_tiled(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.tiled;
        #[cfg(not(feature = "cuda"))]
        false
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.tokens)?;
        #[cfg(feature = "cuda")]
        if let Some(sm90::Tiling { splits, shares, .. }) = self.tiling {
            write!(f, " x {splits}, shared {shares:?}")?;
        }
        if self.is_tiled() {
            write!(f, ", tiled")?;
        }
        Ok(())
    }
}

/// What the table chooses.
pub(super) fn by_table(client: &Client, sizes: &LinearSizes) -> Choice {
    let (_, choice) = TABLE.choose(client, sizes).expect("the plain kernel takes everything");
    choice
}

/// Units of a cube of the plain kernel. They decide the order of a row's sums: so the matrix and the device decide them, and how many
/// rows there are plays no part.
pub(super) fn plain_units(device: &DeviceProperties, [inputs, outputs]: [usize; 2], elem: ElemType) -> usize {
    if !has_many_units(inputs, outputs) {
        return UNITS;
    }
    // All of a row in one round of loads, of 16 bytes each, but no more than there are registers for.
    let wanted = (inputs * elem.size()).div_ceil(16 * plain::AHEAD).next_power_of_two();
    let hardware = &device.hardware;
    let most = hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize;
    // Rounded down to a power of two.
    wanted.min(UNITS_PER_BYTE * elem.size()).min(1 << most.max(UNITS).ilog2()).max(UNITS)
}

/// Whether a row may have more units than others.
pub(crate) fn has_many_units(inputs: usize, outputs: usize) -> bool {
    inputs >= LONG && outputs <= FEWEST_OUTPUTS
}

/// Of how many of these matrices, from the first one on, one launch computes the products with the bits of one for each. Those in blocks
/// of codes come first. Of rows that have a small batch's kernel; how many there are plays no part.
pub fn joined(client: &Client, sizes: &[LinearSizes]) -> usize {
    let Some((first, others)) = sizes.split_first() else { return 0 };
    let pairs = |other: &LinearSizes| pairs((first.outputs, first.format), (other.outputs, other.format));
    let is_plain = |sizes: &LinearSizes| choose(client, sizes).path == Path::Plain;
    if is_plain(first) {
        // A kernel for two, whose cubes are of one size.
        let joins = |second: &&LinearSizes| pairs(second) && have_same_order(first.outputs, second.outputs);
        return 1 + usize::from(others.first().is_some_and(|second| joins(&second)));
    }
    let joins =
        |(i, other): &(usize, &LinearSizes)| (other.format.is_dense() || *i == 0 && pairs(other)) && !is_plain(other);
    1 + others.iter().enumerate().take_while(joins).count()
}

/// Whether every kernel has one order of sums for matrices of so many outputs.
fn have_same_order(outputs: usize, second_outputs: usize) -> bool {
    let alike = |is: fn(usize) -> bool| is(outputs) == is(second_outputs);
    let few = alike(|outputs| outputs <= FEW_OUTPUTS) && alike(|outputs| outputs <= FEWEST_OUTPUTS);
    few && alike(|outputs| outputs.is_multiple_of(VECTOR))
}

/// Whether a shared expert of another width can be in the same launches as a token's own ones, and computes the same bits: of weights that
/// are numbers, or in blocks.
pub fn joins_experts(width: usize, shared_width: usize, in_blocks: bool) -> bool {
    let widths = [width, shared_width];
    let differ = |codes| width.is_multiple_of(codes) != shared_width.is_multiple_of(codes);
    if in_blocks && JOINED_CODES.into_iter().any(differ) {
        return false;
    }
    let alike = width == shared_width || widths.into_iter().all(|width| width < LONG);
    alike && widths.into_iter().all(|width| width.is_multiple_of(JOINED)) && have_same_order(width, shared_width)
}

/// Rows of a matrix up to which the small-batch kernel is faster, and of each head's where there are few heads.
#[cfg(feature = "cuda")]
const SMALL_BATCH: usize = 8;
#[cfg(feature = "cuda")]
const SMALL_BATCH_OF_HEADS: usize = 16;
#[cfg(feature = "cuda")]
const MANY_HEADS: usize = 64;
/// Those of FP4, which Hopper's kernel decodes for each tile of rows anew.
#[cfg(feature = "cuda")]
const SMALL_BATCH_OF_FP4: usize = 32;
/// Those of FP8 in small matrices, up to so many channels and outputs; of this many channels on, a single row.
#[cfg(feature = "cuda")]
const SMALL_MATRIX: [usize; 2] = [2048, 4096];
#[cfg(feature = "cuda")]
const LONG_OF_CODES: usize = 8192;
/// Rows of FP8 up to which the small-batch kernel is faster.
#[cfg(feature = "cuda")]
fn small_batch_of_fp8([inputs, outputs]: [usize; 2]) -> usize {
    let [few_inputs, few_outputs] = SMALL_MATRIX;
    match inputs {
        LONG_OF_CODES.. => 1,
        _ if inputs <= few_inputs && outputs <= few_outputs => 2 * SMALL_BATCH,
        _ => SMALL_BATCH,
    }
}

/// Rows of an expert, on average, from which on Hopper's kernel is faster.
#[cfg(feature = "cuda")]
fn rows_of_expert(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Dense => 1,
        WeightFormat::Fp8 => 5,
        WeightFormat::Fp4 => 8,
    }
}

/// Rows of a matrix, on average, up to which a kernel that decodes weights in blocks is faster than one that dequantises them first:
/// for experts that is a scratch of many, whose pairs are sorted range by range.
#[cfg(feature = "cuda")]
fn most_rows_of_codes(division: Division) -> usize {
    match division {
        Division::Dense | Division::Experts => 1024,
        _ => 256,
    }
}

/// Products of numbers that are worth two more launches, where weights are in f32.
#[cfg(feature = "cuda")]
const WORTH_TERMS: usize = 1 << 25;

/// Rows of a matrix, on average, up to which the small-batch kernel has one tile of them: it reads the weights once.
#[cfg(feature = "cuda")]
const ONE_TILE: usize = 64;
/// How long a tile of 128 and of 64 tokens takes: half of the products, but as many weights. Not measured.
#[cfg(feature = "cuda")]
const TIMES: [usize; 2] = [10, 6];

#[cfg(feature = "cuda")]
pub(super) fn small_batch_choice(client: &Client, sizes: &LinearSizes) -> Option<Choice> {
    let tokens = mma::tile_tokens(sizes.rows_each());
    let choice = || Choice { in_parts: in_parts(client, sizes), ..Choice::of(Path::Mma, tokens) };
    mma::supported(client, sizes).then(choice)
}

/// Whether sums have the order of `parts.rs`: where both kernels that have it take the matrix. How many rows there are plays no
/// part.
#[cfg(feature = "cuda")]
pub(super) fn in_parts(client: &Client, sizes: &LinearSizes) -> bool {
    sizes.batch_invariant && sm90::supported(client, sizes) && mma::supported(client, sizes)
}

/// Tiles of many rows, on what is no Hopper.
#[cfg(feature = "cuda")]
fn tiled_choice(client: &Client, sizes: &LinearSizes) -> Option<Choice> {
    let &LinearSizes { rows, matrices, outputs, .. } = sizes;
    let many = rows > ONE_TILE * matrices && !sizes.batch_invariant;
    if !many || sm90::is_hopper(client) || !tiled::supported(client, sizes) {
        return None;
    }
    let groups = outputs.div_ceil(tiled::outputs(sizes.form));
    let cost = |tokens: usize, time: usize| {
        let tiles = match sizes.division {
            // An expert's last tile is half empty, on average.
            Division::Experts => rows / tokens + matrices.div_ceil(2),
            _ => matrices * sizes.rows_each().div_ceil(tokens),
        };
        (tiles * groups).div_ceil(multiprocessors(client)) * time
    };
    let tokens = tiled::TOKENS.into_iter().zip(TIMES).min_by_key(|&(tokens, time)| cost(tokens, time));
    tokens.map(|(tokens, _)| of_tiles(tokens))
}

/// The kernel for tiles of so many tokens.
#[cfg(feature = "cuda")]
pub(super) fn of_tiles(tokens: usize) -> Choice {
    Choice { tiled: true, ..Choice::of(Path::Mma, tokens) }
}

#[cfg(feature = "cuda")]
fn sm90_choice(client: &Client, sizes: &LinearSizes) -> Option<Choice> {
    let &LinearSizes { rows, matrices, inputs, outputs, .. } = sizes;
    let terms = sm90::terms(sizes);
    let in_blocks = !sizes.format.is_dense();
    let enough = match sizes.division {
        Division::Dense if terms > 1 => rows.saturating_mul(inputs * outputs) >= WORTH_TERMS,
        Division::Dense if sizes.format == WeightFormat::Fp8 => rows > small_batch_of_fp8([inputs, outputs]),
        Division::Heads if sizes.format == WeightFormat::Fp8 => rows > matrices * SMALL_BATCH,
        Division::Dense | Division::Heads if in_blocks => rows > matrices * SMALL_BATCH_OF_FP4,
        Division::Dense => rows > SMALL_BATCH,
        Division::Heads => rows > matrices * if matrices < MANY_HEADS { SMALL_BATCH_OF_HEADS } else { SMALL_BATCH },
        Division::Experts => rows >= matrices * rows_of_expert(sizes.format),
        Division::Several | Division::Token => false,
    };
    let in_parts = in_parts(client, sizes);
    // Each tile of tokens decodes the weights anew: many are worth a scratch of numbers.
    let enough = enough && (!in_blocks || sizes.rows_each() <= most_rows_of_codes(sizes.division));
    if !enough || !sm90::supported(client, sizes) || sizes.batch_invariant && !in_parts {
        return None;
    }
    let clusters = (multiprocessors(client) / sm90::CUBES as usize).max(1);
    let tiling = match sizes.division {
        Division::Dense => sm90::dense_tiling(sizes, clusters, in_parts)?,
        _ => sm90::divided_tiling(sizes, clusters, in_parts)?,
    };
    Some(of_hopper(tiling))
}

/// Hopper's kernel.
#[cfg(feature = "cuda")]
pub(super) fn of_hopper(tiling: sm90::Tiling) -> Choice {
    Choice { in_parts: tiling.in_parts, tiling: Some(tiling), ..Choice::of(Path::Sm90, tiling.tokens) }
}

/// How Hopper's kernel divides these rows, and fewer: of those that have the same code, one.
#[cfg(feature = "cuda")]
pub(super) fn tilings(client: &Client, sizes: &LinearSizes) -> Vec<sm90::Tiling> {
    let mut all: Vec<sm90::Tiling> = Vec::new();
    let step = sm90::LEAST * if sizes.division == Division::Heads { sizes.matrices } else { 1 };
    // From the one to the other no number of tiles changes; of experts' tiles of 192 one may, but no choice holds for fewer rows.
    let rows = (0..sizes.rows).step_by(step).flat_map(|rows| [rows + 1, rows + step]);
    // The fewest rows that the kernel takes of FP8.
    let fewest = [1, SMALL_BATCH, 2 * SMALL_BATCH].map(|small| sizes.matrices * small + 1);
    let rows = rows.chain(fewest.into_iter().filter(|&rows| rows <= sizes.rows));
    for tiling in rows.filter_map(|rows| sm90_choice(client, &LinearSizes { rows, ..*sizes })?.tiling) {
        if !all.iter().any(|known| known.has_code_of(tiling)) {
            all.push(tiling);
        }
    }
    all
}
