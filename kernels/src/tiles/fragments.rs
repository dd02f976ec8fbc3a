//! Operands and sums of a warp's matrix instructions (`mma.m16n8k16`), as CubeCL takes them.

use cubecl::prelude::*;

/// Some of the words of a vector as an operand: matrices that [`load_x4`](crate::ptx::matrix::load_x4) has loaded, or packed pairs.
#[cube]
pub(crate) fn fragment<E: Float, NA: Size, W: Size>(
    words: Vector<u32, W>,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> Array<Vector<E, NA>> {
    let mut operand = Array::<Vector<E, NA>>::new(count);
    #[unroll]
    for i in 0..count {
        operand[i] = Vector::<E, NA>::reinterpret(words.extract(comptime!(first + i)));
    }
    operand
}

/// Sums of so many products, each two neighbouring columns of a row and of the eighth row behind it. They are zero.
#[cube]
pub(crate) fn zeros<NC: Size>(#[comptime] count: usize) -> Sequence<Array<Vector<f32, NC>>> {
    let mut sums = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..count {
        let mut zeros = Array::new(2usize);
        zeros[0] = Vector::new(0.0f32);
        zeros[1] = Vector::new(0.0f32);
        sums.push(zeros);
    }
    sums
}
