//! Where a projection finds the row of a single token: in memory, or in what it is computed from, by each cube for itself: the
//! splits of an attention, a residual sum and its norm, or heads before their norm or RoPE. That saves a launch, which takes longer than reading a few rows
//! several times.

use cubecl::prelude::*;

use crate::common::launch::{dummy, or_dummy};
use crate::experts_mlp::combine::{Place, TokenExperts};
use crate::linear::Before;
use crate::merge_splits::{MAX_LOADS, MergeSplitsArgs, Merged, Splits, chains};
use crate::norm_rope::{Form, Head, Norm, Shape};
use crate::residual_norm::{AddRmsNormArgs, Summand, UNITS, add, add_squares, norm, scale_of};

/// Numbers of a part that a unit loads at once: so that those of 512 channels are work for 256 units.
const PAIR: usize = 2;

/// Where a row is. Launches make `RowSourceArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum RowSource<E: Float, V: Size> {
    /// In `x`.
    Memory,
    /// In splits of an attention, for each head its own.
    Splits(SplitRows),
    /// The norm of a sum of `x` and others.
    Normed(NormedRow<E, V>),
    /// Heads in `x` before their norm or RoPE.
    Heads(HeadsRow),
}

/// What becomes of the heads of a row: see [`NormRopeArgs`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct HeadsRow {
    weight: &'static [f32],
    cos: &'static [f32],
    sin: &'static [f32],
    /// Of a row.
    heads: usize,
    pairs: usize,
    eps: f32,
    #[cube(comptime)]
    form: Form,
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

/// What a row is the norm of: `x` and what the experts of the token computed, or without experts (`top_k` is 0) the one row of
/// `outputs`. See [`AddRmsNormArgs`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NormedRow<E: Float, V: Size> {
    outputs: &'static [Vector<E, V>],
    indices: &'static [i32],
    expert_weights: &'static [f32],
    shared: &'static [Vector<E, V>],
    norm_weight: &'static [f32],
    sum: &'static mut [Vector<E, V>],
    normed: &'static mut [Vector<E, V>],
    experts: usize,
    eps: f32,
    #[cube(comptime)]
    top_k: usize,
    #[cube(comptime)]
    place: Place,
}

impl<E: Float, V: Size> RowSourceArgs<E, V> {
    /// What the kernel does of this, and its `x`, in place of what would be written before.
    ///
    /// It is for rows of so many channels, and cubes of so many units.
    pub(crate) fn new(client: &Client, before: Before, x: BufferArg, [inputs, units]: [usize; 2]) -> (Self, BufferArg) {
        match before {
            Before::NormRope(args) => {
                let Shape { form, .. } = args.shape(client.properties());
                let weight_len = if form.norm == Norm::Weighted { args.width } else { 0 };
                let row = HeadsRowLaunch::new(
                    or_dummy(client, args.weight, weight_len),
                    or_dummy(client, args.cos, args.pairs),
                    or_dummy(client, args.sin, args.pairs),
                    inputs / args.width,
                    args.pairs,
                    args.eps,
                    Form { units, ..form },
                );
                (Self::Heads(row), args.x)
            }
            Before::Nothing => (Self::Memory, x),
            Before::Merge(merge) => {
                let MergeSplitsArgs { outs, lses, split_ptr, single_items_done, .. } = merge;
                let splits = SplitRowsLaunch::new(outs, lses, split_ptr, f32::NEG_INFINITY, single_items_done);
                (Self::Splits(splits), x)
            }
            Before::Norm(args) => {
                let AddRmsNormArgs { x, y, weight, sum, normed, eps, .. } = args;
                let any = || dummy(client);
                let row = match y {
                    Summand::Rows(y) => {
                        NormedRowLaunch::new(y, any(), any(), any(), weight, sum, normed, 0, eps, 0, Place::None)
                    }
                    Summand::Experts(it) => {
                        let (shared, place) = it.shared.bind(client);
                        let (rows, indices, weights) = (it.rows, it.indices, it.weights);
                        NormedRowLaunch::new(
                            rows, indices, weights, shared, weight, sum, normed, it.experts, eps, it.top_k, place,
                        )
                    }
                };
                (Self::Normed(row), x)
            }
        }
    }
}

#[cube]
impl<E: Float, V: Size> RowSource<E, V> {
    /// Whether rows are in `x`.
    pub(crate) fn is_memory(&self) -> comptime_type!(bool) {
        #[comptime]
        match self {
            RowSource::Memory => comptime!(true),
            RowSource::Splits(_) => comptime!(false),
            RowSource::Normed(_) => comptime!(false),
            RowSource::Heads(_) => comptime!(false),
        }
    }

    /// Writes row number `number` of the token's `count`, of so many vectors; nothing, where it is in `x`. Called by all units
    /// of a cube, which then wait for each other.
    pub(crate) fn write(
        &mut self,
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
            RowSource::Normed(normed) => normed.write(x, row, vectors),
            RowSource::Heads(heads) => heads.write::<E, V>(x, row, number, count, vectors),
        }
    }
}

#[cube]
impl<E: Float, V: Size> NormedRow<E, V> {
    /// The bits are those of [`add_rms_norm`](crate::residual_norm). The first cube writes them to memory, too.
    fn write(&mut self, x: &[Vector<E, V>], row: &mut [Vector<E, V>], vectors: usize) {
        let (top_k, place) = (comptime!(self.top_k), comptime!(self.place));
        let is_first = CUBE_POS == 0;
        let token = TokenExperts::read(self.indices, self.expert_weights, 0usize, self.experts, top_k);
        let mut squares = 0.0f32;
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let y = if comptime!(top_k == 0) {
                self.outputs[column]
            } else {
                token.sum(self.outputs, self.shared, column, vectors, vectors, place)
            };
            let total = add(x[column], y);
            squares = add_squares(total, squares);
            row[column] = total;
            if is_first {
                self.sum[column] = total;
            }
            column += UNITS;
        }
        let lanes = V::value().comptime();
        let scale = scale_of(squares, vectors * lanes, self.eps);
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let normed = norm(row[column], self.norm_weight, column, scale);
            row[column] = normed;
            if is_first {
                self.normed[column] = normed;
            }
            column += UNITS;
        }
    }
}

#[cube]
impl HeadsRow {
    /// The bits are those of [`norm_rope`](crate::norm_rope). As many heads at a time as the units of the cube have.
    fn write<E: Float, V: Size>(
        &self,
        x: &[Vector<E, V>],
        row: &mut [Vector<E, V>],
        number: usize,
        rows: usize,
        vectors: usize,
    ) {
        let form = comptime!(self.form);
        let (unit, width, first) = (UNIT_POS as usize, vectors / self.heads, number * self.heads);
        let (end, of_token) = (first + self.heads, rows * self.heads);
        let mut done = 0usize.runtime();
        while done < self.heads {
            let own = done + unit / form.columns;
            let mut column = unit % form.columns;
            let head = Head::new::<E, V>(x, first + own, end, of_token, width, self.pairs, self.eps, column, form);
            if own < self.heads {
                while column < width {
                    let values = head.values::<E, V>(x, self.weight, self.cos, self.sin, column);
                    row[own * width + column] = Vector::cast_from(values);
                    column += form.columns;
                }
            }
            if comptime!(form.norm != Norm::None) {
                // The next heads' sums take the same place.
                sync_cube();
            }
            done += comptime!(form.heads());
        }
    }
}

#[cube]
impl SplitRows {
    /// The bits are those of [`merge_splits`](crate::merge_splits).
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
pub(crate) fn offline_splits<E: Float, V: Size>() -> RowSourceArgs<E, V> {
    use crate::offline::buffer;
    RowSourceArgs::Splits(SplitRowsLaunch::new(buffer(), buffer(), buffer(), 0.0, true))
}

/// The sum of so many experts and a shared one, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline_normed<E: Float, V: Size>(top_k: usize) -> RowSourceArgs<E, V> {
    use crate::offline::buffer as any;
    let (place, one) = (Place::Behind, 1);
    RowSourceArgs::Normed(NormedRowLaunch::new(any(), any(), any(), any(), any(), any(), any(), one, 1.0, top_k, place))
}

/// Heads of 512 channels that get inverse RoPE, or a row that gets a norm, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline_heads<E: Float, V: Size>(norm: Norm, units: usize) -> RowSourceArgs<E, V> {
    use crate::offline::buffer;
    let inverse = norm == Norm::None;
    let columns = if inverse { 64 } else { 128 };
    let form = Form { norm, norm_whole_head: true, inverse, columns, units };
    RowSourceArgs::Heads(HeadsRowLaunch::new(buffer(), buffer(), buffer(), 1, 1, 1.0, form))
}
