//! The matrix instructions of a plane.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::copies::swizzle;
use super::{CHANNELS, Form, K, LANES, M, N, ROW_BYTES, TOKEN_PLANES, VECTOR, WEIGHT_PLANES, WEIGHT_ROWS};
use crate::ptx::matrix;
use crate::tiles::fragments::{fragment, zeros};

/// The tokens and the rows of the weights of a plane: which they are, and where this lane's rows of them start in a stage that
/// `ldmatrix` loads.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Operands {
    pub token: u32,
    pub weight_row: u32,
    tokens_at: u32,
    weights_at: u32,
}

#[cube]
impl Operands {
    pub fn new(#[comptime] form: Form) -> Operands {
        let (plane, lane) = (UNIT_POS / LANES as u32, UNIT_POS as usize % LANES);
        let token = plane % comptime!(TOKEN_PLANES as u32) * comptime!((form.tokens / TOKEN_PLANES) as u32);
        let weight_row = plane / comptime!(TOKEN_PLANES as u32) * comptime!((WEIGHT_ROWS / WEIGHT_PLANES) as u32);
        // 16 tokens of 8 channels, then the same of the next 8.
        let tokens_at = token * ROW_BYTES + row_at(lane % M, lane / M);
        // 8 rows of 8 channels, the same of the next 8, then the next 8 rows.
        let weights_at = comptime!(form.tokens as u32 * ROW_BYTES)
            + weight_row * ROW_BYTES
            + row_at(lane / M * N + lane % N, lane / N % 2);
        Operands { token, weight_row, tokens_at, weights_at }
    }

    /// Adds the products of a block of channels.
    pub fn multiply<E: Float, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        stage_at: u32,
        sums: &mut Sequence<Array<Vector<f32, NC>>>,
        #[comptime] form: Form,
    ) {
        let size!(NA) = def.vector_size(MatrixIdent::A);
        #[unroll]
        for step in 0..comptime!(CHANNELS / K) {
            // Two vectors further: one bit, whatever the row is permuted by.
            let flip = comptime!((step * K / VECTOR * 16) as u32);
            let (tokens_at, weights_at) = ((stage_at + self.tokens_at) ^ flip, (stage_at + self.weights_at) ^ flip);
            let mut a = Sequence::<Array<Vector<E, NA>>>::new();
            #[unroll]
            for m in 0..form.token_steps() {
                let words = matrix::load_x4(tokens_at, comptime!((m * M) as u32 * ROW_BYTES), false);
                a.push(fragment::<E, NA, Const<4>>(words, 0usize, 4usize));
            }
            // Two columns of tiles at a time.
            #[unroll]
            for pair in 0..comptime!(form.weight_steps() / 2) {
                let words = matrix::load_x4(weights_at, comptime!((pair * 2 * N) as u32 * ROW_BYTES), false);
                #[unroll]
                for column in 0..2usize {
                    let b = fragment::<E, NA, Const<4>>(words, comptime!(2 * column), 2usize);
                    #[unroll]
                    for m in 0..form.token_steps() {
                        let at = comptime!(m * form.weight_steps() + 2 * pair + column);
                        def.execute_inplace(&a[m], &b, &mut sums[at]);
                    }
                }
            }
        }
    }
}

/// Bytes to a vector of a row of a stage.
#[cube]
fn row_at(row: usize, vector: usize) -> u32 {
    row as u32 * ROW_BYTES + ((vector ^ swizzle(row)) * 16) as u32
}

/// Sums of a plane, `[token_steps, weight_steps]`: each two neighbouring rows of the weights for a token, and for the eighth behind
/// it. They are zero.
#[cube]
pub(super) fn sums<NC: Size>(#[comptime] form: Form) -> Sequence<Array<Vector<f32, NC>>> {
    zeros::<NC>(comptime!(form.token_steps() * form.weight_steps()))
}
