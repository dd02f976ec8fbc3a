//! The queries of a token in the registers of a plane, and the scores of 16 keys.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::keys::{Ring, key_pairs};
use super::{Form, N};
use crate::linear::mma::vectors::pair;
use crate::ptx::math;

/// This unit's part of a token's queries, and the weights of its heads.
#[derive(CubeType)]
pub(super) struct Queries<E: Float, V: Size> {
    /// `[head_steps, chunks]`.
    vectors: Sequence<Vector<E, V>>,
    /// Of the two heads of this unit's part of each product.
    weights: Sequence<f32>,
}

/// Of this unit's two keys, summed over the heads of its parts of the products.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Scores {
    pub(super) own: f32,
    pub(super) other: f32,
}

#[cube]
impl<E: Float, V: Size> Queries<E, V> {
    pub(super) fn load<W: Float>(
        q: &[Vector<E, V>],
        head_weights: &[W],
        token: usize,
        #[comptime] form: Form,
    ) -> Queries<E, V> {
        let vectors = comptime!(4 * form.chunks);
        let row = (UNIT_POS_X / 4) as usize;
        let quad = (UNIT_POS_X % 4) as usize;
        let mut queries = Sequence::<Vector<E, V>>::new();
        let mut weights = Sequence::<f32>::new();
        #[unroll]
        for step in 0..form.head_steps {
            let head = token * comptime!(form.head_steps * N) + comptime!(step * N);
            #[unroll]
            for chunk in 0..form.chunks {
                queries.push(q[(head + row) * vectors + own_vector(quad, chunk, form)]);
            }
            // The two heads of this unit's part of a product.
            weights.push(f32::cast_from(head_weights[head + 2 * quad]));
            weights.push(f32::cast_from(head_weights[head + 2 * quad + 1]));
        }
        Queries::<E, V> { vectors: queries, weights }
    }

    /// The scores of the keys of a turn, which have come.
    pub(super) fn weigh(
        &self,
        def: &MmaDefinition<E, E, f32>,
        ring: &Ring,
        turn: u32,
        #[comptime] form: Form,
    ) -> Scores {
        let size!(NA) = def.vector_size(MatrixIdent::A);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let keys = key_pairs::<E, NA>(ring, turn, form);
        let mut score = 0.0f32;
        let mut other_score = 0.0f32;
        #[unroll]
        for step in 0..form.head_steps {
            let mut acc = Array::<Vector<f32, NC>>::new(2usize);
            acc[0] = Vector::new(0.0f32);
            acc[1] = Vector::new(0.0f32);
            #[unroll]
            for i in 0..comptime!(2 * form.chunks) {
                let (chunk, first_pair) = comptime!((i / 2, i % 2 * 2));
                let (own, other) = comptime!((8 * chunk + first_pair, 8 * chunk + 4 + first_pair));
                let query = self.vectors[comptime!(step * form.chunks + chunk)];
                let mut key_pairs = Array::<Vector<E, NA>>::new(4usize);
                key_pairs[0] = keys[own];
                key_pairs[1] = keys[other];
                key_pairs[2] = keys[comptime!(own + 1)];
                key_pairs[3] = keys[comptime!(other + 1)];
                let mut query_pairs = Array::<Vector<E, NA>>::new(2usize);
                query_pairs[0] = pair::<E, V, NA>(query, first_pair);
                query_pairs[1] = pair::<E, V, NA>(query, comptime!(first_pair + 1));
                def.execute_inplace(&key_pairs, &query_pairs, &mut acc);
            }
            #[unroll]
            for i in 0..2usize {
                let weight = self.weights[comptime!(2 * step + i)];
                score += weight * math::relu(acc[0].extract(i));
                other_score += weight * math::relu(acc[1].extract(i));
            }
        }
        Scores { own: score, other: other_score }
    }
}

/// The vector of a head that multiplies this unit's channels of a group of 32: pieces of dense keys are 8 channels, those of codes 16.
#[cube]
fn own_vector(quad: usize, #[comptime] chunk: usize, #[comptime] form: Form) -> usize {
    if comptime!(form.has_scales()) {
        2 * quad + comptime!(chunk / 2 * 8 + chunk % 2)
    } else {
        quad + comptime!(4 * chunk)
    }
}
