//! What Blackwell's kernels of a pair of cubes for 128 query rows share: products of 128 rows by tcgen05, of which each cube has 64, over
//! blocks of 128 keys that come in chunks. The README of `mla_decode/sm100` has the schedule.

mod cube;
mod products;
mod ring;
mod rows;
mod weights;

pub(crate) use self::cube::{BARRIERS, Barriers, Cube, RING};
pub(crate) use self::products::Products;
pub(crate) use self::ring::{CHUNK_BYTES, PAIR_KEYS, Ring, load_query, pass};
pub(crate) use self::rows::Rows;
pub(crate) use self::weights::{RowState, Seen, weigh_row, weigh_seen_row};
use super::form::{Form, ROWS, VALUE_WIDTH};
use crate::ptx::tcgen05::{Cubes, Layout, Mma, Source};

/// Words of the weights of a cube's rows.
pub(crate) const WEIGHT_WORDS: usize = ROWS * PAIR_KEYS as usize / 2;

/// Columns of tensor memory: all. A second cube would have no room in shared memory either.
pub(crate) const COLUMNS: u32 = 512;
/// The output, as two products have it: columns 0 to 127 and 256 to 383 of a row in lanes 0 to 63, the others above.
pub(crate) const OUTPUT_AT: u32 = 0;
pub(crate) const OUTPUT_COLUMNS: u32 = 128;
/// Scores of two blocks: of the first 64 keys in lanes 0 to 63, of the others above.
pub(crate) const SCORES_AT: u32 = 2 * OUTPUT_COLUMNS;
const SCORES_COLUMNS: u32 = PAIR_KEYS / 2;

/// How queries, keys and weights lie.
pub(crate) const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };

/// Scores of a block, over the channels of a chunk.
pub(crate) fn scores(form: Form, tiles: usize) -> Mma {
    let (n, steps, elem, a) = (PAIR_KEYS as usize, 4 * tiles, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::Pair, m: 2 * ROWS, n, steps, elem, a, b: ROWS_OF_TERMS }
}

/// Half of the output, of 64 keys.
pub(crate) fn output(form: Form) -> Mma {
    let (n, elem, a) = (VALUE_WIDTH / 2, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::Pair, m: 2 * ROWS, n, steps: 4, elem, a, b: Layout::Across { terms: ROWS } }
}
