//! The queries of a token in the registers of a plane, and the scores of 16 keys.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::{Form, LANES, N, first_piece};
use crate::linear::mma::products::pair;

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
                queries.push(q[(head + row) * vectors + quad + comptime!(4 * chunk)]);
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
        ring: &Shared<[Vector<E, V>]>,
        turn: u32,
        #[comptime] form: Form,
    ) -> Scores {
        let size!(NA) = def.vector_size(MatrixIdent::A);
        let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
        let from = first_piece(turn, form);
        let mut loaded = Sequence::<Vector<E, V>>::new();
        #[unroll]
        for i in 0..comptime!(form.pieces()) {
            loaded.push(ring[from + comptime!(i * LANES)]);
        }
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
                let a = loaded[comptime!(2 * chunk)];
                let b = loaded[comptime!(2 * chunk + 1)];
                let query = self.vectors[comptime!(step * form.chunks + chunk)];
                let mut key_pairs = Array::<Vector<E, NA>>::new(4usize);
                key_pairs[0] = pair::<E, V, NA>(a, first_pair);
                key_pairs[1] = pair::<E, V, NA>(b, first_pair);
                key_pairs[2] = pair::<E, V, NA>(a, comptime!(first_pair + 1));
                key_pairs[3] = pair::<E, V, NA>(b, comptime!(first_pair + 1));
                let mut query_pairs = Array::<Vector<E, NA>>::new(2usize);
                query_pairs[0] = pair::<E, V, NA>(query, first_pair);
                query_pairs[1] = pair::<E, V, NA>(query, comptime!(first_pair + 1));
                def.execute_inplace(&key_pairs, &query_pairs, &mut acc);
            }
            #[unroll]
            for i in 0..2usize {
                let weight = self.weights[comptime!(2 * step + i)];
                // Not the maximum with 0, which of NaN would be 0.
                let (product, other) = (acc[0].extract(i), acc[1].extract(i));
                score += weight * select(product < 0.0f32, 0.0f32, product);
                other_score += weight * select(other < 0.0f32, 0.0f32, other);
            }
        }
        Scores { own: score, other: other_score }
    }
}
