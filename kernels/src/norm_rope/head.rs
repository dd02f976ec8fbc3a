//! The head of a unit: its norm and its rotation, also for other kernels that read one.

use cubecl::prelude::*;

use super::{Form, Norm};

/// A head, the scale of its norm, and its rotation.
#[derive(CubeType)]
pub(crate) struct Head {
    /// Its first vector.
    pub first: usize,
    /// Its vectors that are normed: the first ones, or all.
    normed: usize,
    scale: f32,
    /// Its channels without RoPE.
    still: usize,
    /// The first pair of its token in the tables.
    rotation: usize,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Head {
    /// Number `row` of `rows`. Called by all units of a cube; `column` is the place of this one among those of the head.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new<E: Float, N: Size>(
        x: &[Vector<E, N>],
        row: usize,
        rows: usize,
        heads: usize,
        vectors: usize,
        pairs: usize,
        eps: f32,
        column: usize,
        #[comptime] form: Form,
    ) -> Head {
        let lanes = N::value().comptime();
        let still = vectors * lanes - 2 * pairs;
        let mut normed = vectors;
        if comptime!(!form.norm_whole_head) {
            normed = still / lanes;
        }
        let first = row * vectors;
        let mut scale = 1.0f32;
        if comptime!(form.norm != Norm::None) {
            let mut squares = 0.0f32;
            if row < rows {
                let mut at = column;
                while at < normed {
                    let values = Vector::<f32, N>::cast_from(x[first + at]);
                    #[unroll]
                    for lane in 0..lanes {
                        squares += values.extract(lane) * values.extract(lane);
                    }
                    at += comptime!(form.columns);
                }
            }
            let mean = sum_of_row(squares, column, form) / f32::cast_from(normed * lanes);
            scale = 1.0 / (mean + eps).sqrt();
        }
        Head { first, normed, scale, still, rotation: row / heads * pairs, form }
    }

    /// A vector of the head, normed and rotated.
    pub(crate) fn values<E: Float, N: Size>(
        &self,
        x: &[Vector<E, N>],
        weight: &[f32],
        cos: &[f32],
        sin: &[f32],
        column: usize,
    ) -> Vector<f32, N> {
        let lanes = N::value().comptime();
        let mut values = self.normed::<E, N>(x, weight, column);
        let channel = column * lanes;
        if channel >= self.still {
            let first = channel - self.still;
            if comptime!(lanes == 1) {
                let other = self.normed::<E, N>(x, weight, self.still + (first ^ 1)).extract(0usize);
                let own = values.extract(0usize);
                let pair = self.rotation + first / 2;
                let (c, s) = (cos[pair], angle_sine(sin[pair], self.form.inverse));
                let odd = first % 2 == 1;
                values.insert(0usize, own * c + other * select(odd, s, -s));
            } else {
                #[unroll]
                for i in 0..comptime!(lanes / 2) {
                    let pair = self.rotation + first / 2 + i;
                    let (c, s) = (cos[pair], angle_sine(sin[pair], self.form.inverse));
                    let (u, v) = (values.extract(comptime!(2 * i)), values.extract(comptime!(2 * i + 1)));
                    values.insert(comptime!(2 * i), u * c - v * s);
                    values.insert(comptime!(2 * i + 1), v * c + u * s);
                }
            }
        }
        values
    }

    /// A vector of the head after the norm.
    fn normed<E: Float, N: Size>(&self, x: &[Vector<E, N>], weight: &[f32], column: usize) -> Vector<f32, N> {
        let lanes = N::value().comptime();
        let mut values = Vector::<f32, N>::cast_from(x[self.first + column]);
        if comptime!(self.form.norm != Norm::None) {
            let is_normed = column < self.normed;
            if is_normed {
                #[unroll]
                for lane in 0..lanes {
                    let mut scale = self.scale;
                    if comptime!(self.form.norm == Norm::Weighted) {
                        scale *= weight[column * lanes + lane];
                    }
                    values.insert(lane, values.extract(lane) * scale);
                }
            }
        }
        values
    }
}

/// The sine of an angle, or of its opposite.
#[cube]
fn angle_sine(sine: f32, #[comptime] inverse: bool) -> f32 {
    if comptime!(inverse) { -sine } else { sine }
}

/// The sum over the units of a row. Called by all units of a cube.
#[cube]
fn sum_of_row(own: f32, column: usize, #[comptime] form: Form) -> f32 {
    let mut sums = Shared::<[f32]>::new_slice(form.units);
    let unit = UNIT_POS as usize;
    sums[unit] = own;
    sync_cube();
    let mut distance = comptime!(form.columns / 2).runtime();
    while distance > 0 {
        if column < distance {
            let other = sums[unit + distance];
            sums[unit] += other;
        }
        sync_cube();
        distance /= 2;
    }
    sums[unit - column]
}
