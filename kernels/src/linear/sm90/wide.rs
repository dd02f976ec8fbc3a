//! Weights in f32 (a router's) as three matrices in bf16, whose sum they are: 3 x 8 bits of a mantissa of 24. The products of rows in
//! bf16 with each are exact in f32, so their sum is the f32 product, from tensor cores.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::VECTOR;
use crate::common::launch::{address_type, share};
use crate::linear::WeightArg;

/// Matrices in bf16 for one in f32.
pub(super) const TERMS: usize = 3;
const UNITS: u32 = 128;

/// From f32 of a whole number of vectors to bf16 `[TERMS, len]`, the greatest terms first.
pub(super) fn launch(client: &Client, weight: WeightArg, len: usize) -> WeightArg {
    let weight = weight.into_dense();
    let bf16 = ElemType::Float(FloatKind::BF16);
    // SAFETY: the buffer is made for so many numbers.
    let terms = unsafe { BufferArg::from_raw_parts(client.empty(TERMS * len * bf16.size()), TERMS * len) };
    let (vectors, cube) = (len / VECTOR, CubeDim::new_1d(UNITS));
    let address = address_type(client, &[&weight, &terms]);
    let cubes = cubecl::calculate_cube_count_elemwise(client, vectors, cube);
    wide_kernel::launch(client, cubes, cube, address, VECTOR, weight, share(&terms), vectors, bf16);
    WeightArg::Dense(terms)
}

/// A unit has a vector of the weights.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn wide_kernel<E: Float, V: Size>(
    weight: &[Vector<f32, V>],
    terms: &mut [Vector<E, V>],
    vectors: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let mut rest = weight[at];
        #[unroll]
        for term in 0..TERMS {
            let rounded = Vector::<E, V>::cast_from(rest);
            terms[term * vectors + at] = rounded;
            rest -= Vector::<f32, V>::cast_from(rounded);
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::AddressType;

    use crate::offline::{Arch, Entry, form};
    let (cube, elem) = (CubeDim::new_1d(UNITS), ElemType::Float(FloatKind::BF16));
    let form = form!(wide_kernel, cube, [AddressType::U32, VECTOR, _, _, 1, elem]);
    vec![Entry::of(FloatKind::BF16, "linear.sm90.wide", form).on(|arch| arch == Arch::Sm90a)]
}
