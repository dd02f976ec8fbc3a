//! Where a projection finds the row of a single token: in memory, or the splits of its attention, which each cube then merges
//! for itself. That saves a launch, which takes longer than reading a few splits several times.

use cubecl::prelude::*;

use crate::portable::launch::multiprocessors;
use crate::portable::merge_splits::{MAX_LOADS, MergeSplitsArgs, Merged, Splits, chains};

/// Bytes of splits that the cubes of a multiprocessor read in less time than a launch takes, by the speed of an H200's L2 cache.
const MOST_BYTES: usize = 1 << 16;
/// Numbers of a part that a unit loads at once: so that those of 512 channels are work for 256 units.
const PAIR: usize = 2;

/// Where a row is. Launches make `RowSourceArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum RowSource {
    /// In `x`.
    Memory,
    /// In splits of an attention, for each head its own.
    Splits(SplitRows),
}

/// The splits of one query token: see [`MergeSplitsArgs`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SplitRows {
    outs: &'static [Vector<f32, Const<PAIR>>],
    lses: &'static [f32],
    split_ptr: &'static [i32],
    neg_inf: f32,
    #[cube(comptime)]
    single_items_done: bool,
}

impl RowSourceArgs {
    /// These splits.
    pub(crate) fn splits(merge: MergeSplitsArgs) -> Self {
        let MergeSplitsArgs { outs, lses, split_ptr, single_items_done, .. } = merge;
        Self::Splits(SplitRowsLaunch::new(outs, lses, split_ptr, f32::NEG_INFINITY, single_items_done))
    }
}

/// Whether so many cubes, of which each merges a row, are faster than a launch of [`merge_splits`].
///
/// [`merge_splits`]: crate::portable::merge_splits
pub(crate) fn pays(client: &Client, merge: &MergeSplitsArgs, cubes: usize) -> bool {
    let bytes = merge.items * merge.width * size_of::<f32>();
    cubes.div_ceil(multiprocessors(client)) * bytes <= MOST_BYTES
}

#[cube]
impl RowSource {
    /// Writes row number `number` of the token's `count`, of so many vectors; nothing, where it is in `x`. Called by all units
    /// of a cube, which then wait for each other.
    pub(crate) fn write<E: Float, V: Size>(
        &self,
        x: &[Vector<E, V>],
        row: &mut [Vector<E, V>],
        number: usize,
        count: usize,
        vectors: usize,
    ) {
        #[comptime]
        match self {
            RowSource::Memory => {}
            RowSource::Splits(splits) => splits.merge::<E, V>(x, row, number, count, vectors),
        }
    }
}

#[cube]
impl SplitRows {
    /// The bits are those of [`merge_splits`](crate::portable::merge_splits).
    fn merge<E: Float, V: Size>(
        &self,
        x: &[Vector<E, V>],
        row: &mut [Vector<E, V>],
        number: usize,
        rows: usize,
        vectors: usize,
    ) {
        let first = usize::cast_from(self.split_ptr[0]);
        let count = usize::cast_from(self.split_ptr[1]) - first;
        let mut column = UNIT_POS as usize;
        if comptime!(self.single_items_done) && count == 1 {
            while column < vectors {
                row[column] = x[number * vectors + column];
                column += CUBE_DIM as usize;
            }
        } else {
            let lanes = V::value().comptime();
            let pairs = row.with_vector_size_mut::<Const<PAIR>>();
            let width = vectors * comptime!(lanes / PAIR);
            let chains = chains(count);
            while column < width {
                let first = first * rows + number;
                let splits = Splits { first, step: rows, count, column, width, empty_lse: self.neg_inf };
                let mut all = Merged::<Const<PAIR>>::empty();
                all.add_chains(self.outs, self.lses, &splits, chains, MAX_LOADS);
                pairs[column] = Vector::cast_from(all.mean());
                column += CUBE_DIM as usize;
            }
        }
    }
}

/// Splits, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> RowSourceArgs {
    use crate::offline::buffer;
    RowSourceArgs::Splits(SplitRowsLaunch::new(buffer(), buffer(), buffer(), 0.0, true))
}
