//! How a tile of query rows and keys is divided among the planes of a cube, and which tiles there are. They were measured; the
//! README of the operation says where.

/// Planes of a cube.
pub(in crate::mla_decode) const PLANES: usize = 8;
/// Units of a plane. The matrix instructions are defined for this number.
pub(in crate::mla_decode) const LANES: usize = 32;
pub(in crate::mla_decode) const UNITS: usize = PLANES * LANES;

/// Elements of a vector: a row of what `ldmatrix` loads.
pub(in crate::mla_decode) const VECTOR: usize = 8;

/// The matrix instruction: 16 rows, 8 columns, 16 terms.
pub(in crate::mla_decode) const M: usize = 16;
pub(in crate::mla_decode) const N: usize = 8;
pub(in crate::mla_decode) const K: usize = 16;

/// How a tile is divided among the planes of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::mla_decode) struct MmaTile {
    /// Query rows.
    pub(in crate::mla_decode) rows: usize,
    /// Keys.
    pub(super) keys: usize,
    /// Tiles of keys in shared memory.
    pub(super) stages: usize,
    /// Planes that share the rows, the keys and the channels of the scores; the product is [`PLANES`].
    pub(super) row_groups: usize,
    pub(super) key_groups: usize,
    pub(super) slices: usize,
    /// Vectors of a key.
    pub(super) key_vectors: usize,
    /// Channels of a value, in steps of 16.
    pub(super) value_steps: usize,
    /// Whether keys may be hidden.
    pub(super) causal: bool,
}

impl MmaTile {
    pub(in crate::mla_decode) fn new(
        (rows, keys, stages, row_groups, key_groups): MmaChoice,
        widths: (usize, usize),
        causal: bool,
    ) -> Self {
        Self {
            rows,
            keys,
            stages,
            row_groups,
            key_groups,
            slices: PLANES / (row_groups * key_groups),
            key_vectors: widths.0 / VECTOR,
            value_steps: widths.1 / K,
            causal,
        }
    }

    /// Vectors from one query or key to the next in shared memory: one more than there are, so that the eight rows that
    /// `ldmatrix` loads at a time lie in different banks.
    pub(super) fn stride(&self) -> usize {
        // An odd number of 16-byte rows.
        self.key_vectors | 1
    }

    /// Pairs of scores from one row to the next.
    pub(super) fn score_stride(&self) -> usize {
        self.keys / 2 + 2
    }

    /// Pairs of weights from one row to the next.
    pub(super) fn weight_stride(&self) -> usize {
        self.keys / 2 + 4
    }

    /// Steps of 16 value channels that a plane accumulates, at most.
    pub(super) fn plane_steps(&self) -> usize {
        self.value_steps.div_ceil(PLANES)
    }

    pub(in crate::mla_decode) fn accumulators(&self) -> usize {
        self.rows / M * self.plane_steps() * 8
    }

    /// Units that share a row in the softmax.
    pub(super) fn row_units(&self) -> usize {
        UNITS / self.rows
    }

    pub(in crate::mla_decode) fn shared_bytes(&self) -> usize {
        let elems =
            (self.rows + self.stages * self.keys) * self.stride() * VECTOR + 2 * self.rows * self.weight_stride();
        let numbers = self.slices * self.rows * self.score_stride() * 2 + self.rows;
        // Some more for the barriers and for alignment.
        2 * elems + 4 * numbers + 256
    }
}

/// Rows, keys, stages, row groups and key groups of a tile for matrix instructions.
pub(in crate::mla_decode) type MmaChoice = (usize, usize, usize, usize, usize);

/// Such tiles in the order of preference. With more rows a loaded key is used more often; the number of keys and stages is what
/// fits beside them. The order was measured on an H200.
pub(in crate::mla_decode) const MMA_TILES: [MmaChoice; 9] = [
    (64, 48, 2, 2, 2),
    (64, 32, 2, 2, 2),
    (64, 16, 2, 4, 2),
    (32, 64, 2, 2, 2),
    (32, 32, 2, 2, 2),
    (32, 32, 2, 2, 4),
    (16, 64, 2, 1, 4),
    (16, 32, 2, 1, 4),
    (16, 64, 2, 1, 8),
];
/// Numbers of a unit that the accumulators of the output may take.
const ACCUMULATORS: usize = 128;

/// The best tile for these sizes that fits into `available` bytes of shared memory.
pub(in crate::mla_decode) fn best_mma_tile(
    query_rows: usize,
    widths: (usize, usize),
    causal: bool,
    available: usize,
) -> Option<MmaTile> {
    let (key_width, value_width) = widths;
    if !key_width.is_multiple_of(K) || !value_width.is_multiple_of(K) {
        return None;
    }
    MMA_TILES
        .iter()
        .map(|&choice| MmaTile::new(choice, widths, causal))
        // More rows than there are would only be padding.
        .filter(|tile| tile.rows < 2 * query_rows.max(M / 2 + 1))
        .filter(|tile| (tile.key_vectors / 2).is_multiple_of(tile.slices))
        .find(|tile| tile.shared_bytes() <= available && tile.accumulators() <= ACCUMULATORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All scores have a plane, all channels of all rows, and all weights a unit.
    #[test]
    fn the_planes_cover_the_tile() {
        for (rows, keys, stages, row_groups, key_groups) in MMA_TILES {
            assert_eq!(PLANES % (row_groups * key_groups), 0);
            assert_eq!(rows % (row_groups * M), 0, "{rows} rows");
            assert_eq!(keys % (key_groups * N), 0, "{keys} keys");
            assert_eq!(keys % K, 0);
            assert_eq!(keys / 2 % (UNITS / rows), 0, "{keys} keys of {rows} rows");
            assert!(stages >= 2);
        }
    }
}
