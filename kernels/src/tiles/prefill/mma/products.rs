//! Both products of a warp's 16 query rows and a block of keys.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::form::{Form, K, KEYS, LANES, M, N, PAIRS, PANEL, PANEL_BYTES, SCORES, VECTOR};
use crate::ptx::{math, matrix};
use crate::tiles::fragments::{fragment, zeros};

/// Steps of 16 channels in a panel.
const PANEL_STEPS: usize = PANEL / K;

/// Where the rows lie in shared memory that this lane has `ldmatrix` load.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Operands {
    queries_at: u32,
    keys_at: u32,
    values_at: u32,
}

#[cube]
impl Operands {
    /// Of the warp whose query rows begin at `queries_at`.
    pub fn new(queries_at: u32, keys_at: u32, values_at: u32, #[comptime] form: Form) -> Operands {
        let lane = UNIT_POS % LANES as u32;
        let (half, eight) = (lane / 16, lane / 8 % 2);
        Operands {
            // 16 rows of 8 channels, then the same of the next 8.
            queries_at: queries_at + row_at(lane % 16, half, form.key_panels),
            // 8 keys of 8 channels, the same of the next 8, then the next 8 keys.
            keys_at: keys_at + row_at(half * 8 + lane % 8, eight, form.key_panels),
            // 16 keys of 8 channels, then the same of the next 8.
            values_at: values_at + row_at(lane % 16, half, form.value_panels),
        }
    }

    /// The scores of a block.
    pub fn score<E: Float, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        #[comptime] form: Form,
    ) -> Vector<f32, Const<SCORES>> {
        let size!(NA) = def.vector_size(MatrixIdent::A);
        let mut sums = zeros::<NC>(comptime!(KEYS / N));
        #[unroll]
        for step in 0..comptime!(form.key_panels * PANEL_STEPS) {
            let (flip, panel) = comptime!(place_of(step));
            let words = matrix::load_x4(self.queries_at ^ flip, panel, false);
            let a = fragment::<E, NA, Const<4>>(words, 0usize, 4usize);
            // Two columns of tiles at a time.
            #[unroll]
            for pair in 0..comptime!(KEYS / (2 * N)) {
                let offset = comptime!(panel + (pair * 2 * N * form.key_panels) as u32 * PANEL_BYTES);
                let words = matrix::load_x4(self.keys_at ^ flip, offset, false);
                #[unroll]
                for column in 0..2usize {
                    let b = fragment::<E, NA, Const<4>>(words, comptime!(2 * column), 2usize);
                    def.execute_inplace(&a, &b, &mut sums[comptime!(2 * pair + column)]);
                }
            }
        }
        let mut scores = Sequence::<f32>::new();
        #[unroll]
        for i in 0..SCORES {
            scores.push(sums[comptime!(i / 4)][comptime!(i / 2 % 2)].extract(comptime!(i % 2)));
        }
        math::vector::<f32, Const<SCORES>>(&scores)
    }

    /// Adds the values of a block, times their weights.
    pub fn accumulate<E: Float, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        weights: Vector<u32, Const<PAIRS>>,
        out: &mut Sequence<Array<Vector<f32, NC>>>,
        #[comptime] form: Form,
    ) {
        let size!(NA) = def.vector_size(MatrixIdent::A);
        #[unroll]
        for step in 0..comptime!(KEYS / K) {
            let a = fragment::<E, NA, Const<PAIRS>>(weights, comptime!(4 * step), 4usize);
            // Two columns of tiles at a time.
            #[unroll]
            for pair in 0..comptime!(form.value_panels * PANEL_STEPS) {
                let (flip, panel) = comptime!(place_of(pair));
                let offset = comptime!(panel + (step * K * form.value_panels) as u32 * PANEL_BYTES);
                let words = matrix::load_x4(self.values_at ^ flip, offset, true);
                #[unroll]
                for column in 0..2usize {
                    let b = fragment::<E, NA, Const<4>>(words, comptime!(2 * column), 2usize);
                    def.execute_inplace(&a, &b, &mut out[comptime!(2 * pair + column)]);
                }
            }
        }
    }
}

/// Bytes to a vector of the first panel of a row.
#[cube]
fn row_at(row: u32, vector: u32, #[comptime] panels: usize) -> u32 {
    row * comptime!(panels as u32 * PANEL_BYTES) + (vector ^ (row % 8)) * 16
}

/// From the first 16 channels of a row to those of a step: the bits of a vector's place that are different, whatever the row is
/// permuted by, and the bytes to the panel.
fn place_of(step: usize) -> (u32, u32) {
    ((step % PANEL_STEPS * (K / VECTOR) * 16) as u32, (step / PANEL_STEPS) as u32 * PANEL_BYTES)
}

/// The output of a warp, `[8 channels]`. It is zero.
#[cube]
pub(crate) fn outputs<NC: Size>(#[comptime] form: Form) -> Sequence<Array<Vector<f32, NC>>> {
    zeros::<NC>(comptime!(form.value_panels * PANEL / N))
}

/// Multiplies both rows of a unit's part of the output.
#[cube]
pub(crate) fn scale_rows<NC: Size>(
    out: &mut Sequence<Array<Vector<f32, NC>>>,
    factor_a: f32,
    factor_b: f32,
    #[comptime] form: Form,
) {
    #[unroll]
    for i in 0..comptime!(form.value_panels * PANEL / N) {
        scale(&mut out[i], 0usize, Vector::new(factor_a));
        scale(&mut out[i], 1usize, Vector::new(factor_b));
    }
}

#[cube]
fn scale<NC: Size>(sums: &mut Array<Vector<f32, NC>>, #[comptime] row: usize, factor: Vector<f32, NC>) {
    sums[row] *= factor;
}

const _: () = assert!(M == 16 && SCORES == KEYS / N * 4, "a unit has two rows of each product");
