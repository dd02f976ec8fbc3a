//! Flash attention of one tile of queries, in plain loops, for every runtime. Which keys the queries see, and where these
//! keys are, is up to the operation (`TileKeys`).
//!
//! One cube of 16 x 16 units owns `TILE` query rows of one sequence and one head and is given keys, `TILE` at a time:
//! scores `q k^T` into registers (4 x 4 for a unit), an online softmax over them in shared memory, and `p v` added to the
//! output rows, which stay in registers (4 rows x a sixteenth of the columns for a unit).
//!
//! Shared memory holds a slice of `DEPTH` channels of q and k at a time, never whole rows, so its size does not depend on
//! the widths: `SHARED_BYTES`, 25.75 KiB, within the 32 KiB that wgpu's devices have.

use cubecl::prelude::*;

use crate::common::device::UNITS;

/// Units along a side of the cube.
const SIDE: usize = 16;
/// Scores of a unit along a side of the tile. They are a cube's side apart, so that neighbours read neighbouring banks.
const PER_UNIT: usize = 4;
/// Query rows of a cube, and keys that it looks at together.
pub(crate) const TILE: usize = SIDE * PER_UNIT;
/// Channels of q and k, and rows of v, that are in shared memory together.
pub(crate) const DEPTH: usize = 32;
/// Units that share the softmax of a row.
const PARTS: usize = UNITS / TILE;
/// Row strides in shared memory are odd: units that read a column read different banks.
const SCORE_STRIDE: usize = TILE + 1;
/// q and k channels; the scores take their place once they are computed.
const STAGE: usize = 2 * TILE * (DEPTH + 1);
/// The shared memory of a cube, in bytes: q and k or the scores, v, one number for each unit and one for each row.
pub(crate) const SHARED_BYTES: usize = (STAGE + DEPTH * TILE + UNITS + TILE) * size_of::<f32>();

const _: () = assert!(SIDE * SIDE == UNITS, "a cube has a unit for each place of the square");
const _: () = assert!(TILE * SCORE_STRIDE <= STAGE, "the scores fit where q and k were");
const _: () = assert!(SHARED_BYTES <= 32 * 1024, "wgpu's devices have 32 KiB");

/// A hidden score, and the maximum before the first score. Finite: WGSL may assume that no infinity occurs.
const HIDDEN: f32 = -1.0e30;
/// The bits of -inf, for the same reason not written as a number.
pub(crate) const NEG_INFINITY_BITS: u32 = 0xff80_0000;

/// From here on tanh is 1 in f32. Beyond it, some devices compute it as inf / inf.
const TANH_IS_ONE: f32 = 10.0;

/// A score `s` that does not exceed a cap `c` > 0: `c tanh(s / c)`.
#[cube]
pub(crate) fn soft_capped(score: f32, softcap: f32) -> f32 {
    softcap * clamp(score / softcap, -TANH_IS_ONE, TANH_IS_ONE).tanh()
}

/// The keys in the `TILE` places of a tile.
#[cube]
pub(crate) trait TileKeys {
    /// No query sees a key from this place on; may lie past the tile.
    fn visible_end(&self) -> u32;
    /// Whether there is a key in a place. If not, nothing is read for it: what stands there may be NaN.
    fn is_key(&self, place: usize) -> bool;
    /// The row of the key in k and v.
    fn row(&self, place: usize) -> usize;
    /// Whether there is a key and row `query` of the tile of queries sees it.
    fn is_visible(&self, query: usize, place: usize) -> bool;
    /// The score, from the product of query and key.
    fn score(&self, product: f32) -> f32;
}

/// The row of a query and this cube's head in `[query_tokens, H, ..]`. The cubes of a grid have their heads along y.
#[cube]
pub(crate) fn row_of(token: u32) -> usize {
    token as usize * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize
}

/// The query rows of a cube, and their attention to the keys so far.
#[derive(CubeType)]
pub(crate) struct TileAttention {
    /// The first query token.
    query: u32,
    /// The token after the last query, if the tile has fewer than `TILE`.
    end: u32,
    /// q and k `[2, TILE, depth + 1]`, or scores `[TILE, SCORE_STRIDE]`.
    stage: Shared<[f32]>,
    /// `[DEPTH, TILE]`.
    values: Shared<[f32]>,
    /// A number of each unit.
    partial: Shared<[f32]>,
    /// By how much what was summed before shrinks, for each row.
    correction: Shared<[f32]>,
    /// Not yet normalised: rows `y + 16 i`, columns `x + 16 j` for the unit (x, y), at `4 j + i`.
    acc: Array<f32>,
    /// The maximum of a row's scores, in each of the [`PARTS`] units that share the row.
    max: f32,
    /// The sum of `exp(score - max)` over this unit's keys of the row.
    sum: f32,
    #[cube(comptime)]
    key_width: usize,
    #[cube(comptime)]
    value_width: usize,
}

#[cube]
impl TileAttention {
    /// For the queries `query .. end`, of which it takes the first `TILE`.
    pub fn new(query: u32, end: u32, #[comptime] key_width: usize, #[comptime] value_width: usize) -> Self {
        TileAttention {
            query,
            end,
            stage: Shared::<[f32]>::new_slice(STAGE),
            values: Shared::<[f32]>::new_slice(comptime!(DEPTH * TILE)),
            partial: Shared::<[f32]>::new_slice(UNITS),
            correction: Shared::<[f32]>::new_slice(TILE),
            acc: zeros(comptime!(PER_UNIT * value_width.div_ceil(SIDE))),
            max: f32::new(HIDDEN),
            sum: f32::new(0.0),
            key_width,
            value_width,
        }
    }

    /// Attends to the keys of a tile. `W` divides both widths, `DEPTH` and `TILE`.
    pub fn add_keys<E: Float, W: Size, K: TileKeys>(
        &mut self,
        q: &[Vector<E, W>],
        k: &[Vector<E, W>],
        v: &[Vector<E, W>],
        keys: &K,
    ) {
        let products = self.products::<E, W, K>(q, k, keys);
        self.store_scores::<K>(&products, keys);
        self.softmax();
        self.shrink();
        self.add_values::<E, W, K>(v, keys);
    }

    /// `q k^T`: rows `y + 16 i`, keys `x + 16 j` for the unit (x, y), at `4 i + j`. Leaves the shared memory free.
    fn products<E: Float, W: Size, K: TileKeys>(
        &mut self,
        q: &[Vector<E, W>],
        k: &[Vector<E, W>],
        keys: &K,
    ) -> Array<f32> {
        let depth = comptime!(DEPTH.min(self.key_width));
        let mut products = zeros(comptime!(PER_UNIT * PER_UNIT));
        for slice in 0..comptime!(self.key_width.div_ceil(depth)) {
            // Everybody has read what stands there: the slice before, or the scores of the keys before.
            sync_cube();
            self.stage_channels::<E, W, K>(q, k, keys, slice, depth);
            sync_cube();
            self.add_products(&mut products, depth);
        }
        sync_cube();
        products
    }

    /// Copies `depth` channels of all queries and keys to shared memory, as f32; 0 where there are none.
    fn stage_channels<E: Float, W: Size, K: TileKeys>(
        &mut self,
        q: &[Vector<E, W>],
        k: &[Vector<E, W>],
        keys: &K,
        slice: usize,
        #[comptime] depth: usize,
    ) {
        let vector = W::value().comptime();
        let width = comptime!(self.key_width / vector);
        let keys_at = comptime!(TILE * (depth + 1));
        let mut i = UNIT_POS as usize;
        while i < comptime!(TILE * depth / vector) {
            let row = i / comptime!(depth / vector);
            let column = i % comptime!(depth / vector);
            let channel = slice * comptime!(depth / vector) + column;
            let to = row * comptime!(depth + 1) + column * vector;
            let mut query = Vector::<f32, W>::zeroed();
            let mut key = Vector::<f32, W>::zeroed();
            let token = self.query + row as u32;
            if token < self.end && channel < width {
                query = Vector::cast_from(q[row_of(token) * width + channel]);
            }
            if keys.is_key(row) && channel < width {
                key = Vector::cast_from(k[keys.row(row) * width + channel]);
            }
            #[unroll]
            for n in 0..vector {
                self.stage[to + n] = query.extract(n);
                self.stage[keys_at + to + n] = key.extract(n);
            }
            i += comptime!(UNITS);
        }
    }

    /// Adds the products of the `depth` channels in shared memory.
    fn add_products(&self, products: &mut Array<f32>, #[comptime] depth: usize) {
        let stride = comptime!(depth + 1);
        let keys_at = comptime!(TILE * stride);
        let x = UNIT_POS as usize % SIDE;
        let y = UNIT_POS as usize / SIDE;
        for c in 0..depth {
            let mut k_part = Array::<f32>::new(PER_UNIT);
            #[unroll]
            for j in 0..PER_UNIT {
                k_part[j] = self.stage[keys_at + (x + comptime!(j * SIDE)) * stride + c];
            }
            #[unroll]
            for i in 0..PER_UNIT {
                let q_part = self.stage[(y + comptime!(i * SIDE)) * stride + c];
                #[unroll]
                for j in 0..PER_UNIT {
                    products[comptime!(i * PER_UNIT + j)] += q_part * k_part[j];
                }
            }
        }
    }

    /// Writes the scores to shared memory, [`HIDDEN`] where the query does not see the key.
    fn store_scores<K: TileKeys>(&mut self, products: &Array<f32>, keys: &K) {
        let x = UNIT_POS as usize % SIDE;
        let y = UNIT_POS as usize / SIDE;
        #[unroll]
        for i in 0..PER_UNIT {
            let row = y + comptime!(i * SIDE);
            #[unroll]
            for j in 0..PER_UNIT {
                let place = x + comptime!(j * SIDE);
                let mut score = f32::new(HIDDEN);
                if keys.is_visible(row, place) {
                    score = keys.score(products[comptime!(i * PER_UNIT + j)]);
                }
                self.stage[row * SCORE_STRIDE + place] = score;
            }
        }
        sync_cube();
    }

    /// Turns the scores in shared memory into `exp(score - max)`, and brings `max`, `sum` and `correction` up to date.
    fn softmax(&mut self) {
        let unit = UNIT_POS as usize;
        let row = unit / PARTS;
        let part = unit % PARTS;

        let mut part_max = f32::new(HIDDEN);
        for n in 0..comptime!(TILE / PARTS) {
            part_max = max(part_max, self.stage[row * SCORE_STRIDE + n * PARTS + part]);
        }
        self.partial[unit] = part_max;
        sync_cube();
        let mut new_max = self.max;
        for other in 0..PARTS {
            new_max = max(new_max, self.partial[row * PARTS + other]);
        }

        let shrink = (self.max - new_max).exp();
        let mut sum = self.sum * shrink;
        for n in 0..comptime!(TILE / PARTS) {
            let at = row * SCORE_STRIDE + n * PARTS + part;
            let score = self.stage[at];
            let mut weight = f32::new(0.0);
            if score > HIDDEN {
                weight = (score - new_max).exp();
            }
            self.stage[at] = weight;
            sum += weight;
        }
        self.max = new_max;
        self.sum = sum;
        if part == 0 {
            self.correction[row] = shrink;
        }
        sync_cube();
    }

    /// `acc = acc * correction`.
    fn shrink(&mut self) {
        let y = UNIT_POS as usize / SIDE;
        #[unroll]
        for i in 0..PER_UNIT {
            let shrink = self.correction[y + comptime!(i * SIDE)];
            #[unroll]
            for j in 0..comptime!(self.value_width.div_ceil(SIDE)) {
                self.acc[comptime!(j * PER_UNIT + i)] *= shrink;
            }
        }
    }

    /// `acc = acc + p v`.
    fn add_values<E: Float, W: Size, K: TileKeys>(&mut self, v: &[Vector<E, W>], keys: &K) {
        #[unroll]
        for block in 0..comptime!(self.value_width.div_ceil(TILE)) {
            for chunk in 0..comptime!((TILE / DEPTH) as u32) {
                let place = chunk * comptime!(DEPTH as u32);
                if place < keys.visible_end() {
                    self.stage_values::<E, W, K>(v, keys, place as usize, block);
                    sync_cube();
                    self.add_value_block(place as usize, block);
                    sync_cube();
                }
            }
        }
    }

    /// Copies a block of `TILE` columns of the `DEPTH` values from `place` on to shared memory; 0 where there are none.
    fn stage_values<E: Float, W: Size, K: TileKeys>(
        &mut self,
        v: &[Vector<E, W>],
        keys: &K,
        place: usize,
        #[comptime] block: usize,
    ) {
        let vector = W::value().comptime();
        let width = comptime!(self.value_width / vector);
        let mut i = UNIT_POS as usize;
        while i < comptime!(DEPTH * TILE / vector) {
            let key = place + i / comptime!(TILE / vector);
            let column = comptime!(block * TILE / vector) + i % comptime!(TILE / vector);
            let mut value = Vector::<f32, W>::zeroed();
            if keys.is_key(key) && column < width {
                value = Vector::cast_from(v[keys.row(key) * width + column]);
            }
            #[unroll]
            for n in 0..vector {
                self.values[i * vector + n] = value.extract(n);
            }
            i += comptime!(UNITS);
        }
    }

    /// Adds the weights from `place` on, times the values in shared memory, to this unit's columns of the block.
    fn add_value_block(&mut self, place: usize, #[comptime] block: usize) {
        let x = UNIT_POS as usize % SIDE;
        let y = UNIT_POS as usize / SIDE;
        let first_j = comptime!(block * PER_UNIT);
        let columns = comptime!(PER_UNIT.min(self.value_width.div_ceil(SIDE) - first_j));
        for n in 0..DEPTH {
            let mut weights = Array::<f32>::new(PER_UNIT);
            #[unroll]
            for i in 0..PER_UNIT {
                weights[i] = self.stage[(y + comptime!(i * SIDE)) * SCORE_STRIDE + place + n];
            }
            #[unroll]
            for j in 0..columns {
                let value = self.values[n * TILE + x + comptime!(j * SIDE)];
                #[unroll]
                for i in 0..PER_UNIT {
                    self.acc[comptime!((first_j + j) * PER_UNIT + i)] += weights[i] * value;
                }
            }
        }
    }

    /// Writes the rows of `out` and `lse`; leaves out those of queries that have seen no key.
    pub fn write<E: Float>(&mut self, out: &mut [E], lse: &mut [f32]) {
        let unit = UNIT_POS as usize;
        let x = unit % SIDE;
        let y = unit / SIDE;
        self.partial[unit] = self.sum;
        sync_cube();

        #[unroll]
        for i in 0..PER_UNIT {
            let row = y + comptime!(i * SIDE);
            let token = self.query + row as u32;
            let sum = self.row_sum(row);
            // 0 only where no key was seen: the weight of the greatest score is 1.
            if token < self.end && sum > 0.0 {
                let inverse = 1.0 / sum;
                #[unroll]
                for j in 0..comptime!(self.value_width.div_ceil(SIDE)) {
                    let column = x + comptime!(j * SIDE);
                    if column < self.value_width {
                        out[row_of(token) * self.value_width + column] =
                            E::cast_from(self.acc[comptime!(j * PER_UNIT + i)] * inverse);
                    }
                }
            }
        }
        let row = unit / PARTS;
        let part = unit % PARTS;
        let token = self.query + row as u32;
        let sum = self.row_sum(row);
        if part == 0 && token < self.end && sum > 0.0 {
            lse[row_of(token)] = self.max + sum.ln();
        }
    }

    /// The sum of all units that share a row.
    fn row_sum(&self, row: usize) -> f32 {
        let mut sum = f32::new(0.0);
        for part in 0..PARTS {
            sum += self.partial[row * PARTS + part];
        }
        sum
    }
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = 0.0f32;
    }
    array
}
