//! How a tile of query rows and keys is divided among the units of a cube, and the largest that fits.

#[cfg(test)]
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::mla_decode::problem::{DecodeError, DecodeSizes};

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Query rows and keys of a tile, at most. The product must not exceed the number of units.
pub(in crate::mla_decode) const PLAIN_ROWS: usize = 8;
const PLAIN_KEYS: usize = 16;
/// Shared memory that a cube takes at most. What WebGPU drivers offer; on larger devices it lets several cubes run at a
/// time.
const PLAIN_SHARED_BYTES: usize = 32 * 1024;
/// Bytes of one load.
const LOAD_BYTES: usize = 16;

const _: () = assert!(PLAIN_ROWS * PLAIN_KEYS <= UNITS, "a unit for each weight");

/// How a tile is divided among the units of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::mla_decode) struct Tile {
    /// Query rows, a power of two.
    pub(in crate::mla_decode) rows: usize,
    /// Keys, a power of two.
    pub(super) keys: usize,
    /// Elements of a vector.
    pub(super) vector: usize,
    /// Vectors of a key.
    pub(super) key_vectors: usize,
    /// Vectors of a value.
    pub(super) value_vectors: usize,
    /// Rows whose scores with a key one unit computes.
    pub(super) score_rows: usize,
    /// Units that share the channels of a score.
    pub(super) slices: usize,
    /// Units side by side over the channels of a value; each has every that many-th vector.
    pub(super) value_units: usize,
    /// Groups of rows that different units accumulate.
    pub(super) row_groups: usize,
    /// Whether keys may be hidden.
    pub(super) causal: bool,
}

impl Tile {
    fn new(sizes: &DecodeSizes, vector: usize, rows: usize, keys: usize) -> Self {
        let score_rows = rows.min(2);
        let value_vectors = sizes.value_width / vector;
        let value_units = value_vectors.next_power_of_two().min(UNITS);
        Self {
            rows,
            keys,
            vector,
            key_vectors: sizes.key_width / vector,
            value_vectors,
            score_rows,
            slices: UNITS / (rows / score_rows * keys),
            value_units,
            row_groups: (UNITS / value_units).min(rows),
            causal: sizes.causal,
        }
    }

    /// Vectors from one row to the next in shared memory.
    pub(super) fn stride(&self) -> usize {
        self.key_vectors + 1
    }

    fn shared_bytes(&self, elem_size: usize) -> usize {
        let tiles = (self.rows + self.keys) * self.stride() * self.vector * elem_size;
        let numbers = (self.slices + 1) * self.rows * self.keys + self.rows + self.keys;
        tiles + numbers * size_of::<f32>()
    }

    /// Rows that one unit accumulates.
    pub(super) fn group_rows(&self) -> usize {
        self.rows / self.row_groups
    }

    /// Vectors of each row that one unit accumulates.
    pub(super) fn unit_vectors(&self) -> usize {
        self.value_vectors.div_ceil(self.value_units)
    }
}

/// The largest tile of the device that fits.
pub(in crate::mla_decode) fn plain_tile(client: &Client, sizes: &DecodeSizes) -> Result<Tile, DecodeError> {
    let hardware = &client.properties().hardware;
    let available = hardware.max_shared_memory_size.min(PLAIN_SHARED_BYTES);
    plain_tile_within(available, sizes, hardware.max_vector_size)
}

/// The same on a device with enough shared memory.
#[cfg(any(test, feature = "offline"))]
pub(super) fn largest_plain_tile(sizes: &DecodeSizes, max_vector: usize) -> Result<Tile, DecodeError> {
    plain_tile_within(PLAIN_SHARED_BYTES, sizes, max_vector)
}

/// The largest tile that fits into `available` bytes.
fn plain_tile_within(available: usize, sizes: &DecodeSizes, max_vector: usize) -> Result<Tile, DecodeError> {
    let size = sizes.elem.size();
    let mut vector = (LOAD_BYTES / size).min(1 << max_vector.max(1).ilog2());
    let parts = sizes.rows.parts(sizes.key_width);
    let divides = |vector| parts.iter().chain([&sizes.key_width, &sizes.value_width]).all(|width| width % vector == 0);
    while !divides(vector) {
        vector /= 2;
    }
    let mut rows = (sizes.query_len * sizes.heads).next_power_of_two().min(PLAIN_ROWS);
    let mut keys = PLAIN_KEYS;
    loop {
        let tile = Tile::new(sizes, vector, rows, keys);
        let needed = tile.shared_bytes(size);
        if needed <= available {
            return Ok(tile);
        }
        // Rows are worth more than keys: they say how often a loaded key is used.
        match (rows, keys) {
            (1, 1) => return Err(DecodeError::SharedMemory { key_width: sizes.key_width, needed, available }),
            _ if keys >= 2 * rows || rows == 1 => keys /= 2,
            _ => rows /= 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(elem: FloatKind, widths: (usize, usize), rows: usize) -> Result<Tile, DecodeError> {
        let sizes = DecodeSizes::one_sequence(ElemType::Float(elem), rows, widths);
        largest_plain_tile(&sizes, usize::MAX)
    }

    #[test]
    fn tiles_fill_the_shared_memory() {
        let half = tile(FloatKind::F16, (576, 512), 128).expect("fits");
        assert_eq!((half.rows, half.keys, half.vector), (8, 16, 8));
        let float = tile(FloatKind::F32, (576, 512), 128).expect("fits");
        assert_eq!((float.rows, float.keys, float.vector), (4, 8, 4));
        let odd = tile(FloatKind::F16, (7, 5), 3).expect("fits");
        assert_eq!((odd.rows, odd.keys, odd.vector), (4, 16, 1));
    }

    /// Whatever the sizes, all scores have a unit, and all rows of all value channels.
    #[test]
    fn the_units_cover_the_tile() {
        for elem in [FloatKind::F32, FloatKind::F16] {
            for widths in [(576, 512), (80, 64), (7, 5), (1, 1), (2048, 1023), (3000, 3000)] {
                for rows in [1, 2, 3, 8, 200] {
                    let tile = tile(elem, widths, rows).expect("fits");
                    assert!(tile.rows * tile.keys <= UNITS);
                    assert_eq!(tile.rows / tile.score_rows * tile.keys * tile.slices, UNITS);
                    assert_eq!(tile.row_groups * tile.group_rows(), tile.rows);
                    assert!(tile.row_groups * tile.value_units <= UNITS);
                    assert!(tile.unit_vectors() * tile.value_units >= tile.value_vectors);
                }
            }
        }
    }

    #[test]
    fn a_key_that_does_not_fit_is_refused() {
        let error = tile(FloatKind::F32, (4096, 512), 16).expect_err("too wide");
        assert!(matches!(error, DecodeError::SharedMemory { available: PLAIN_SHARED_BYTES, .. }), "{error}");
    }
}
