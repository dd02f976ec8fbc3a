//! What Blackwell's kernels of one cube for 64 query rows share: products of 64 rows by tcgen05, whose accumulators share columns of
//! tensor memory two by two, for blocks of 64 keys in two stages of two halves. The README of `mla_decode/sm100` has the schedule.

mod cube;
mod products;
mod rows;

pub(crate) use self::cube::{BARRIERS, Barriers, Cube};
pub(crate) use self::products::Products;
pub(crate) use self::rows::Rows;
use super::form::{Form, KEYS, ROWS, VALUE_WIDTH};
use crate::ptx::tcgen05::{Cubes, LANE, Layout, Mma, Source};

/// Columns of tensor memory: all. A second cube would have no room in shared memory either.
pub(crate) const COLUMNS: u32 = 512;
/// The output, 64 rows of 512 channels: the left half in lane 0 and its like, the right half in lane 16.
const OUTPUT_AT: u32 = 0;
/// Scores of two blocks of 64 keys, in lane 0.
const SCORES_AT: u32 = 256;
const SCORES_COLUMNS: u32 = KEYS as u32;
/// Weights of a block, two in a column; the same in lanes 0 and 16, for each half of the output.
const WEIGHTS_AT: u32 = SCORES_AT + 2 * SCORES_COLUMNS;
/// The lane of the right half.
const RIGHT: u32 = 16 * LANE;

/// How queries and keys lie, seen as rows of terms.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
const VALUES: Layout = Layout::Across { terms: KEYS };

/// Scores of a block.
fn scores(form: Form) -> Mma {
    let (steps, elem, a) = (4 * form.tiles, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::One, m: ROWS, n: KEYS, steps, elem, a, b: ROWS_OF_TERMS }
}

/// Half of the output of half a block.
fn output(form: Form) -> Mma {
    let (steps, elem) = (KEYS / 32, form.elem());
    Mma { cubes: Cubes::One, m: ROWS, n: VALUE_WIDTH / 2, steps, elem, a: Source::Tensor, b: VALUES }
}
