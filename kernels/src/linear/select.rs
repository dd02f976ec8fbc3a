//! Which kernel computes products, and how it divides the work. Constants here were measured; the README says where.

use std::fmt;

use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use super::mma;
#[cfg(feature = "cuda")]
use super::parts;
use super::plain;
use super::{LinearForm, WeightFormat, forced};
#[cfg(feature = "cuda")]
use super::{sm90, tiled};
#[cfg(feature = "cuda")]
use crate::common::launch::multiprocessors;
use crate::common::select::{Path, Table, Variant};

/// Outputs up to which a row has all units of a cube: with more cubes there is enough to do for a GPU (a router's logits).
pub(crate) const FEW_OUTPUTS: usize = 512;
/// Channels that every kernel takes at once.
const JOINED: usize = 32;
/// Outputs that kernels for many rows write at once.
const VECTOR: usize = 8;

/// The implementations, the fastest first.
pub(super) const TABLE: Table<LinearSizes, Choice> = Table(&[
    #[cfg(feature = "cuda")]
    Variant {
        path: Path::Sm90,
        needs: "TMA and wgmma of a Hopper; f16 or bf16, or a weight in f32 of rows in bf16; inputs and outputs of a multiple of 8 \
                (batch-invariant: inputs of a multiple of 32); more rows than a small batch has",
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
        offline: || [mma::offline(), tiled::offline()].into_iter().flatten().collect(),
    },
    Variant {
        path: Path::Plain,
        needs: "nothing",
        form: |_, sizes| match sizes.format {
            WeightFormat::Dense => Some(Choice::of(Path::Plain, plain::TOKENS)),
        },
        #[cfg(feature = "offline")]
        offline: plain::offline,
    },
]);

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub struct LinearSizes {
    /// Rows of all matrices together.
    pub rows: usize,
    /// Matrices that rows are divided among.
    pub matrices: usize,
    /// How rows find their matrix.
    pub division: Division,
    /// Channels of a row of x.
    pub inputs: usize,
    /// Channels of a row of the output.
    pub outputs: usize,
    /// Channels of a row of x that are copied behind its products.
    pub carried: usize,
    /// Elements from one matrix to the next.
    pub matrix_stride: usize,
    /// What becomes of the products.
    pub form: LinearForm,
    /// Of x, and of weights and output.
    pub elems: [ElemType; 2],
    /// In which format weights are stored.
    pub format: WeightFormat,
    /// Whether the bits of a row must not depend on how many rows there are.
    pub batch_invariant: bool,
}

/// How rows find their matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// One matrix has them all.
    Dense,
    /// Two matrices have them all.
    Pair,
    /// The rows of each head have its own.
    Heads,
    /// The rows of each expert have its own, and are sorted by expert.
    Experts,
    /// They are a single token's, and each has that of another expert.
    Token,
}

impl LinearSizes {
    /// Of so many rows of one matrix.
    pub fn dense(
        [rows, inputs, outputs]: [usize; 3],
        form: LinearForm,
        elems: [ElemType; 2],
        format: WeightFormat,
    ) -> Self {
        let (division, matrix_stride) = (Division::Dense, form.matrix(inputs, outputs));
        let (matrices, carried, batch_invariant) = (1, 0, false);
        Self { rows, matrices, division, inputs, outputs, carried, matrix_stride, form, elems, format, batch_invariant }
    }

    /// Of so many rows of heads, with channels that are carried over.
    pub fn by_head(
        [rows, heads, inputs, outputs, carried]: [usize; 5],
        elems: [ElemType; 2],
        format: WeightFormat,
    ) -> Self {
        let dense = Self::dense([rows * heads, inputs, outputs], LinearForm::default(), elems, format);
        Self { matrices: heads, division: Division::Heads, carried, ..dense }
    }

    /// Of so many pairs of token and expert.
    pub fn experts(
        [pairs, experts, inputs, outputs]: [usize; 4],
        form: LinearForm,
        elem: ElemType,
        format: WeightFormat,
        batch_invariant: bool,
    ) -> Self {
        let dense = Self::dense([pairs, inputs, outputs], form, [elem; 2], format);
        Self { matrices: experts, division: Division::Experts, batch_invariant, ..dense }
    }

    /// Of a single token's pairs, each with a matrix of its own.
    pub fn token([pairs, inputs, outputs]: [usize; 3], form: LinearForm, elem: ElemType, format: WeightFormat) -> Self {
        let dense = Self::dense([pairs, inputs, outputs], form, [elem; 2], format);
        Self { matrices: pairs, division: Division::Token, ..dense }
    }

    /// Rows of a matrix, on average.
    #[cfg(feature = "cuda")]
    pub(super) fn rows_each(&self) -> usize {
        self.rows.div_ceil(self.matrices.max(1))
    }
}

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

/// The kernel for a problem, and how it divides the work.
pub fn choose(client: &Client, sizes: &LinearSizes) -> Choice {
    if let Some(choice) = forced::choice(client, sizes) {
        return choice;
    }
    let (_, choice) = TABLE.choose(client, sizes).expect("the plain kernel takes everything");
    choice
}

/// Whether one launch with a second matrix computes the same bits as one for each, by the outputs of both.
pub fn joins(outputs: usize, second_outputs: usize) -> bool {
    let alike = |is: fn(usize) -> bool| is(outputs) == is(second_outputs);
    alike(|outputs| outputs <= FEW_OUTPUTS) && alike(|outputs| outputs.is_multiple_of(VECTOR))
}

/// Whether a shared expert of another width can be in the same launches as a token's own ones, and computes the same bits.
pub fn joins_experts(width: usize, shared_width: usize) -> bool {
    [width, shared_width].into_iter().all(|width| width.is_multiple_of(JOINED)) && joins(width, shared_width)
}

/// Rows of one matrix, and of each head's, up to which the small-batch kernel is faster.
#[cfg(feature = "cuda")]
const SMALL_BATCH: usize = 8;
#[cfg(feature = "cuda")]
const SMALL_BATCH_OF_HEADS: usize = 64;
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
    let choice = || Choice { in_parts: parts::applies(client, sizes), ..Choice::of(Path::Mma, tokens) };
    mma::supported(client, sizes).then(choice)
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
    let enough = match sizes.division {
        Division::Dense if terms > 1 => rows.saturating_mul(inputs * outputs) >= WORTH_TERMS,
        Division::Dense => rows > SMALL_BATCH,
        Division::Heads => rows > SMALL_BATCH_OF_HEADS * matrices,
        Division::Experts => rows >= matrices,
        Division::Pair | Division::Token => false,
    };
    let in_parts = parts::applies(client, sizes);
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
    // From the one to the other no number of tiles changes.
    let rows = (0..sizes.rows).step_by(step).flat_map(|rows| [rows + 1, rows + step]);
    for tiling in rows.filter_map(|rows| sm90_choice(client, &LinearSizes { rows, ..*sizes })?.tiling) {
        if !all.iter().any(|known| known.has_code_of(tiling)) {
            all.push(tiling);
        }
    }
    all
}
