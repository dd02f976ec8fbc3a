//! How many units and cubes merge the splits of a row. Constants here were measured; the README says where.

use cubecl::prelude::*;

use super::MergeSplitsArgs;
use crate::common::launch::io_vector_size;

/// Units of a cube, at most.
const UNITS: usize = 256;
/// Sums that the splits of a row are divided into, at most. That many groups of units leave each 16 units, which read whole
/// lines of 256 bytes.
pub(super) const MAX_CHAINS: usize = 16;
/// Splits in each sum, at least, where there are several: what a unit loads at a time.
pub(super) const CHAIN_SPLITS: usize = MAX_LOADS;
/// Units that a large GPU runs at the same time, with the registers that they have.
const BUSY_UNITS: usize = 1 << 17;
/// Cubes that do, with several rows each. Each cube costs its start, also where there is nothing to merge.
const BUSY_CUBES: usize = 1 << 11;
/// Splits that a unit loads at a time.
const MIN_LOADS: usize = 2;
pub(crate) const MAX_LOADS: usize = 8;

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct MergeSizes {
    /// Of all sequences.
    pub rows: usize,
    /// Channels of a row.
    pub width: usize,
    /// Splits of a row, on average.
    pub splits: usize,
    /// Whether sequences with one item are left alone.
    pub single_items_done: bool,
}

impl MergeSplitsArgs {
    /// For at least one row.
    pub(super) fn sizes(&self) -> MergeSizes {
        let &Self { batch, items, rows, width, single_items_done, .. } = self;
        MergeSizes { rows: batch * rows, width, splits: items / batch, single_items_done }
    }
}

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Groups of units, each with every `groups`-th chain.
    pub groups: usize,
    /// Units of a group, each with one vector of the row.
    pub columns: usize,
    /// Splits that a unit loads at a time.
    pub loads: usize,
    /// Whether sequences with one item are left alone.
    pub single_items_done: bool,
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

    pub fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.columns as u32, self.groups as u32)
    }
}

/// How cubes divide the work: each has some rows, or some columns of one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub form: Form,
    /// Channels of a vector.
    pub vector_size: usize,
    /// Cubes that share a row.
    pub chunks: usize,
    /// Rows of a cube, one after the other.
    pub cube_rows: usize,
}

impl Shape {
    /// For vectors of `vector_size` channels.
    fn new(sizes: &MergeSizes, vector_size: usize) -> Self {
        let &MergeSizes { rows, width, splits, single_items_done } = sizes;
        let vectors = width / vector_size;
        let power = |n: usize| 1 << n.max(1).ilog2();
        let free_units = power(BUSY_UNITS / (rows * vectors).max(1));
        let chains = power(splits / CHAIN_SPLITS).min(MAX_CHAINS);
        let groups = chains.min(free_units);
        let loads = splits.div_ceil(chains).next_power_of_two().clamp(MIN_LOADS, MAX_LOADS);
        let form = Form::new(groups, vectors, loads, single_items_done);
        let chunks = vectors.div_ceil(form.columns);
        let cube_rows = if groups == 1 { (rows * chunks).div_ceil(BUSY_CUBES).next_power_of_two() } else { 1 };
        Self { form, vector_size, chunks, cube_rows }
    }
}

/// How the work is divided.
pub(super) fn choose(device: &DeviceProperties, sizes: &MergeSizes) -> Shape {
    // By the f32 of the parts, which are what takes the time.
    Shape::new(sizes, io_vector_size(device, &[sizes.width], size_of::<f32>()))
}

/// A shape for each form that there is, of such rows with whatever number of splits.
pub(super) fn all(shape: Shape, sizes: &MergeSizes) -> impl Iterator<Item = Shape> + use<> {
    let forms = Form::all(sizes.width / shape.vector_size, sizes.single_items_done);
    forms.into_iter().map(move |form| Shape { form, ..shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the rows and splits, the form is one of those that a warm-up names.
    #[test]
    fn all_forms_are_all() {
        for width in [1, 16, 128, 192] {
            let all = Form::all(width, true);
            for rows in (0..20).flat_map(|power| [1 << power, (1 << power) + 1, 3 << power]) {
                for splits in (0..300).chain([1000, 5000]) {
                    let sizes = MergeSizes { rows, width, splits, single_items_done: true };
                    let form = Shape::new(&sizes, 1).form;
                    assert!(all.contains(&form), "{sizes:?}: {form:?}");
                }
            }
        }
    }
}
