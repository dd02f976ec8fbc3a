//! The kernel, and how splits are added up: also where a projection merges them itself.

use cubecl::prelude::*;

use super::select::{CHAIN_SPLITS, Form, MAX_CHAINS};
use crate::merge_state::{EMPTY_LSE, higher, inverse, merged_lse, weight};

/// One vector of each split of a row of a sequence.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Splits {
    /// The rows of `outs` and `lses`.
    pub first: usize,
    pub step: usize,
    pub count: usize,
    pub column: usize,
    /// In vectors.
    pub width: usize,
    /// An empty part's, for splits past the last.
    pub empty_lse: f32,
}

/// The merged state of some splits. `sum` is relative to `highest`, and `out` is not yet divided by it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Merged<N: Size> {
    pub(crate) highest: f32,
    pub(crate) sum: f32,
    out: Vector<f32, N>,
}

#[cube]
impl<N: Size> Merged<N> {
    pub(crate) fn empty() -> Merged<N> {
        Merged::<N> { highest: f32::new(-EMPTY_LSE), sum: f32::new(0.0), out: Vector::new(0.0f32) }
    }

    /// Adds a state whose sum is relative to `highest`.
    fn add(&mut self, highest: f32, sum: f32, out: Vector<f32, N>) {
        let top = max(self.highest, highest);
        let own_factor = (self.highest - top).exp();
        let factor = (highest - top).exp();
        self.sum = fma(sum, factor, self.sum * own_factor);
        self.out = fma(out, Vector::new(factor), self.out * Vector::new(own_factor));
        self.highest = top;
    }

    /// Adds all splits, chain by chain.
    pub(crate) fn add_chains(
        &mut self,
        outs: &[Vector<f32, N>],
        lses: &[f32],
        splits: &Splits,
        chains: usize,
        #[comptime] loads: usize,
    ) {
        for chain in 0..chains {
            let mut own = Merged::<N>::empty();
            own.add_chain(outs, lses, splits, chain, chains, loads);
            self.add(own.highest, own.sum, own.out);
        }
    }

    /// The mean of the values.
    pub(crate) fn mean(&self) -> Vector<f32, N> {
        self.out * Vector::new(inverse(self.sum))
    }

    /// Adds every `step`-th split from `split` on, one after the other.
    fn add_chain(
        &mut self,
        outs: &[Vector<f32, N>],
        lses: &[f32],
        splits: &Splits,
        split: usize,
        step: usize,
        #[comptime] loads: usize,
    ) {
        let mut split = split;
        while split < splits.count {
            // All loads before the first use: they take far longer than the rest.
            let mut part_lses = Sequence::<f32>::new();
            let mut parts = Sequence::<Vector<f32, N>>::new();
            #[unroll]
            for i in 0..loads {
                let other = split + i * step;
                let at = splits.first + min(other, splits.count - 1) * splits.step;
                part_lses.push(select(other < splits.count, lses[at], splits.empty_lse));
                parts.push(outs[at * splits.width + splits.column]);
            }
            #[unroll]
            for i in 0..loads {
                let top = higher(self.highest, part_lses[i]);
                let weight = weight(part_lses[i], top);
                // What an empty part holds is let into no sum.
                let part = select(weight > 0.0, parts[i], Vector::new(0.0f32));
                let factor = (self.highest - top).exp();
                self.sum = fma(self.sum, factor, weight);
                self.out = fma(part, Vector::new(weight), self.out * Vector::new(factor));
                self.highest = top;
            }
            split += loads * step;
        }
    }
}

/// What the splits of a row weigh that are few enough for one chain and one lot of loads: for several vectors of the row, each with the
/// bits that [`Merged`] gives it.
#[cfg(feature = "cuda")]
#[derive(CubeType)]
pub(crate) struct Weights {
    pub(crate) highest: f32,
    pub(crate) sum: f32,
    inverse: f32,
    weights: Sequence<f32>,
    /// What the sum of the splits before is multiplied with.
    factors: Sequence<f32>,
}

#[cfg(feature = "cuda")]
#[cube]
impl Weights {
    pub(crate) fn of(lses: &[f32], splits: &Splits, #[comptime] loads: usize) -> Weights {
        let mut part_lses = Sequence::<f32>::new();
        #[unroll]
        for i in 0..loads {
            part_lses.push(select(i < splits.count, lses[splits.row(i)], splits.empty_lse));
        }
        let (mut weights, mut factors) = (Sequence::<f32>::new(), Sequence::<f32>::new());
        let (mut highest, mut sum) = (f32::new(-EMPTY_LSE), f32::new(0.0));
        #[unroll]
        for i in 0..loads {
            let top = higher(highest, part_lses[i]);
            let (weight, factor) = (weight(part_lses[i], top), (highest - top).exp());
            sum = fma(sum, factor, weight);
            highest = top;
            weights.push(weight);
            factors.push(factor);
        }
        Weights { highest, sum, inverse: inverse(sum), weights, factors }
    }

    /// The mean of a vector whose [`Splits::parts`] these are.
    pub(crate) fn mean<N: Size>(&self, parts: &Sequence<Vector<f32, N>>) -> Vector<f32, N> {
        let mut out = Vector::new(0.0f32);
        #[unroll]
        for i in 0..parts.len() {
            let weight = self.weights[i];
            let part = select(weight > 0.0, parts[i], Vector::new(0.0f32));
            out = fma(part, Vector::new(weight), out * Vector::new(self.factors[i]));
        }
        // Added to nothing, as a chain is.
        (out + Vector::new(0.0f32)) * Vector::new(self.inverse)
    }
}

#[cfg(feature = "cuda")]
#[cube]
impl Splits {
    /// The row of a split, or of the last.
    fn row(&self, split: usize) -> usize {
        self.first + min(split, self.count - 1) * self.step
    }

    /// Starts to load a vector of each split, so many behind this one, and of the last split again for those that there are not.
    pub(crate) fn parts<N: Size>(
        &self,
        outs: &[Vector<f32, N>],
        #[comptime] behind: usize,
        #[comptime] loads: usize,
    ) -> Sequence<Vector<f32, N>> {
        let mut parts = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for i in 0..loads {
            parts.push(outs[self.row(i) * self.width + self.column + behind]);
        }
        parts
    }
}

/// Sums that so many splits are divided into.
#[cube]
pub(crate) fn chains(splits: usize) -> usize {
    let mut chains = 1usize;
    while chains < MAX_CHAINS && chains * 2 * CHAIN_SPLITS <= splits {
        chains *= 2;
    }
    chains
}

/// Cube `i * chunks + c` merges chunk `c` of the `i`-th few rows, all of one sequence. The width is in vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(super) fn merge_splits_kernel<E: Float, N: Size>(
    outs: &[Vector<f32, N>],
    lses: &[f32],
    split_ptr: &[i32],
    out: &mut [Vector<E, N>],
    lse: &mut [f32],
    batch: usize,
    rows: usize,
    width: usize,
    chunks: usize,
    cube_rows: usize,
    neg_inf: f32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut group_outs = Shared::<[Vector<f32, N>]>::new_slice(comptime!(form.groups * form.columns));
    let mut group_highest = Shared::<[f32]>::new_slice(form.groups);
    let mut group_sums = Shared::<[f32]>::new_slice(form.groups);
    let row_blocks = rows.div_ceil(cube_rows);
    let sequence = CUBE_POS / chunks / row_blocks;
    if sequence < batch {
        let first = usize::cast_from(split_ptr[sequence]);
        let count = usize::cast_from(split_ptr[sequence + 1]) - first;
        let column = CUBE_POS % chunks * form.columns + UNIT_POS_X as usize;
        let first_row = CUBE_POS / chunks % row_blocks * cube_rows;
        let mut end_row = min(first_row + cube_rows, rows);
        if comptime!(form.single_items_done) && count == 1 {
            end_row = first_row;
        }
        let chains = chains(count);
        for sequence_row in first_row..end_row {
            let row = sequence * rows + sequence_row;
            let splits = Splits {
                first: first * rows + sequence_row,
                step: rows,
                count,
                column: min(column, width - 1),
                width,
                empty_lse: neg_inf,
            };
            let mut all = Merged::<N>::empty();
            if comptime!(form.groups == 1) {
                all.add_chains(outs, lses, &splits, chains, form.loads);
            } else {
                let mut chain = 0usize;
                while chain < chains {
                    let mut own = Merged::<N>::empty();
                    let split = select(chain + (UNIT_POS_Y as usize) < chains, chain + UNIT_POS_Y as usize, count);
                    own.add_chain(outs, lses, &splits, split, chains, form.loads);
                    sync_cube();
                    group_outs[UNIT_POS as usize] = own.out;
                    if UNIT_POS_X == 0 {
                        group_highest[UNIT_POS_Y as usize] = own.highest;
                        group_sums[UNIT_POS_Y as usize] = own.sum;
                    }
                    sync_cube();
                    #[unroll]
                    for g in 0..form.groups {
                        all.add(group_highest[g], group_sums[g], group_outs[g * form.columns + UNIT_POS_X as usize]);
                    }
                    chain += form.groups;
                }
            }
            let merged = all.mean();
            if UNIT_POS_Y == 0 && column < width {
                out[row * width + column] = Vector::cast_from(merged);
            }
            if UNIT_POS_Y == 0 && column == 0 {
                lse[row] = merged_lse(all.highest, all.sum, neg_inf);
            }
        }
    }
}
