//! Merges the splits of a decode step: as many states for each sequence as the plan on the device says.
//!
//! States, and which of them are empty, are as in [`merge_state`](crate::merge_state). A row of a sequence may have a hundred
//! splits, in a batch of one, or one: where there are few rows, groups of units go over the splits side by side, and their
//! sums are then merged through shared memory; where there are many, a cube takes several rows.
//!
//! The bits of a sequence depend on its own splits alone, and not on how many cubes and groups its batch gives it: they are
//! summed in chains, as many as the number of splits says, and those one after the other. A projection of what is merged can
//! do it by itself (`linear/source.rs`), with the same bits.

use cubecl::prelude::*;

use crate::common::launch::{address_type, io_vector_size, share};
use crate::compiler::names_all_sizes;
use crate::merge_state::{EMPTY_LSE, higher, inverse, merged_lse, weight};

/// Units of a cube, at most.
const UNITS: usize = 256;
/// Sums that the splits of a row are divided into, at most. That many groups of units leave each 16 units, which read whole
/// lines of 256 bytes.
const MAX_CHAINS: usize = 16;
/// Splits in each sum, at least, where there are several: what a unit loads at a time.
const CHAIN_SPLITS: usize = MAX_LOADS;
/// Units that a large GPU runs at the same time, with the registers that they have.
const BUSY_UNITS: usize = 1 << 17;
/// Cubes that do, with several rows each. Each cube costs its start, also where there is nothing to merge.
const BUSY_CUBES: usize = 1 << 11;
/// Splits that a unit loads at a time.
const MIN_LOADS: usize = 2;
pub(super) const MAX_LOADS: usize = 8;

/// Arguments of [`launch`].
pub struct MergeSplitsArgs {
    /// f32 `[items, rows, width]`: the items of a sequence one after the other.
    pub outs: BufferArg,
    /// f32 `[items, rows]`.
    pub lses: BufferArg,
    /// i32 `[batch + 1]`: the items of sequence `b` are `split_ptr[b] .. split_ptr[b + 1]`.
    pub split_ptr: BufferArg,
    /// `[batch, rows, width]`, written.
    pub out: BufferArg,
    /// f32 `[batch, rows]`, written.
    pub lse: BufferArg,
    /// Sequences.
    pub batch: usize,
    /// Items that there may be, which says how many splits to expect.
    pub items: usize,
    /// Query tokens of a sequence times heads.
    pub rows: usize,
    /// Channels of a value.
    pub width: usize,
    /// Whether the results of sequences with one item are in `out` and `lse` already. They are left alone then.
    pub single_items_done: bool,
    /// Of `out`.
    pub elem: ElemType,
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    /// Groups of units, each with every `groups`-th chain.
    groups: usize,
    /// Units of a group, each with one vector of the row.
    columns: usize,
    /// Splits that a unit loads at a time.
    loads: usize,
    /// Whether sequences with one item are left alone.
    single_items_done: bool,
}

impl Form {
    fn new(groups: usize, vectors: usize, loads: usize, single_items_done: bool) -> Self {
        let columns = vectors.next_power_of_two().min(UNITS / groups.max(2));
        Self { groups, columns, loads, single_items_done }
    }

    /// That of each number of splits and rows.
    fn all(vectors: usize, single_items_done: bool) -> Vec<Self> {
        let powers = |least: usize, most: usize| (least.ilog2()..=most.ilog2()).map(|power| 1 << power);
        let one_group = powers(MIN_LOADS, MAX_LOADS).map(|loads| (1, loads));
        // So many chains as to need groups are as long as that.
        let groups = powers(2, MAX_CHAINS).map(|groups| (groups, MAX_LOADS));
        one_group.chain(groups).map(|(groups, loads)| Self::new(groups, vectors, loads, single_items_done)).collect()
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns as u32, self.groups as u32)
    }
}

/// How cubes divide the work: each has some rows, or some columns of one.
#[derive(Debug, Clone, Copy)]
struct Shape {
    form: Form,
    /// Cubes that share a row.
    chunks: usize,
    /// Rows of a cube, one after the other.
    cube_rows: usize,
}

impl Shape {
    /// For so many rows of so many vectors, with so many splits on average.
    fn new(rows: usize, vectors: usize, splits: usize, single_items_done: bool) -> Self {
        let power = |n: usize| 1 << n.max(1).ilog2();
        let free_units = power(BUSY_UNITS / (rows * vectors).max(1));
        let chains = power(splits / CHAIN_SPLITS).min(MAX_CHAINS);
        let groups = chains.min(free_units);
        let loads = splits.div_ceil(chains).next_power_of_two().clamp(MIN_LOADS, MAX_LOADS);
        let form = Form::new(groups, vectors, loads, single_items_done);
        let chunks = vectors.div_ceil(form.columns);
        let cube_rows = if groups == 1 { (rows * chunks).div_ceil(BUSY_CUBES).next_power_of_two() } else { 1 };
        Self { form, chunks, cube_rows }
    }
}

/// Merges the splits of each sequence. With an empty result nothing is launched.
pub fn launch(client: &Client, args: MergeSplitsArgs) {
    let rows = args.batch * args.rows;
    if rows == 0 {
        return;
    }
    // By the f32 of the parts, which are what takes the time.
    let vector_size = io_vector_size(client.properties(), &[args.width], size_of::<f32>());
    let vectors = args.width / vector_size;
    let shape = Shape::new(rows, vectors, args.items / args.batch, args.single_items_done);
    if names_all_sizes() {
        for form in Form::all(vectors, args.single_items_done) {
            launch_form(client, &args, vector_size, Shape { form, ..shape });
        }
    }
    launch_form(client, &args, vector_size, shape);
}

fn launch_form(client: &Client, args: &MergeSplitsArgs, vector_size: usize, shape: Shape) {
    let cubes = args.batch * args.rows.div_ceil(shape.cube_rows) * shape.chunks;
    merge_splits_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, cubes, CubeDim::new_single()),
        shape.form.cube_dim(),
        address_type(client, &[&args.outs, &args.lses, &args.out]),
        vector_size,
        share(&args.outs),
        share(&args.lses),
        share(&args.split_ptr),
        share(&args.out),
        share(&args.lse),
        args.batch,
        args.rows,
        args.width / vector_size,
        shape.chunks,
        shape.cube_rows,
        f32::NEG_INFINITY,
        shape.form,
        args.elem,
    );
}

/// One vector of each split of a row of a sequence.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Splits {
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
pub(super) struct Merged<N: Size> {
    highest: f32,
    sum: f32,
    out: Vector<f32, N>,
}

#[cube]
impl<N: Size> Merged<N> {
    pub(super) fn empty() -> Merged<N> {
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
    pub(super) fn add_chains(
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
    pub(super) fn mean(&self) -> Vector<f32, N> {
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

/// Sums that so many splits are divided into.
#[cube]
pub(super) fn chains(splits: usize) -> usize {
    let mut chains = 1usize;
    while chains < MAX_CHAINS && chains * 2 * CHAIN_SPLITS <= splits {
        chains *= 2;
    }
    chains
}

/// Cube `i * chunks + c` merges chunk `c` of the `i`-th few rows, all of one sequence. The width is in vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn merge_splits_kernel<E: Float, N: Size>(
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

/// Values of 512 channels, of sequences with few splits and with many.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let vector_size = io_vector_size(&Arch::Sm90a.properties(), &[512], size_of::<f32>());
    let shapes = [("merge_splits.few", 1 << 14, 1, true), ("merge_splits.many", 16, 128, false)];
    let entry = |kind, (name, rows, splits, single_items_done)| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let shape = Shape::new(rows, 512 / vector_size, splits, single_items_done);
        let dim = shape.form.cube_dim();
        let form =
            form!(merge_splits_kernel, dim, [bits, vector_size, _, _, _, _, _, 1, 1, 1, 1, 1, 0.0, shape.form, elem]);
        Entry::of(kind, name, form)
    };
    let forms = FLOATS.into_iter().flat_map(|kind| shapes.map(|form| entry(kind, form)));
    // Those of a decode step on an H200, by their groups of units, for the estimate of its time (`tools/estimate.sh`).
    let steps = [
        ("merge_splits.step.16", 64, 133, true),
        ("merge_splits.step.8", 128, 67, true),
        ("merge_splits.step.4", 256, 34, true),
        ("merge_splits.step.2", 512, 17, true),
        ("merge_splits.step.1", 1024, 9, true),
        ("merge_splits.step.1.rows.2", 4096, 3, true),
    ];
    let steps = steps.map(|form| entry(FloatKind::BF16, form).on(|arch| arch == Arch::Sm90a));
    forms.chain(steps).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the rows and splits, the form is one of those that a warm-up names.
    #[test]
    fn all_forms_are_all() {
        for vectors in [1, 16, 128, 192] {
            let all = Form::all(vectors, true);
            for rows in (0..20).flat_map(|power| [1 << power, (1 << power) + 1, 3 << power]) {
                for splits in (0..300).chain([1000, 5000]) {
                    let form = Shape::new(rows, vectors, splits, true).form;
                    assert!(all.contains(&form), "{rows} rows of {vectors} vectors, {splits} splits: {form:?}");
                }
            }
        }
    }
}
