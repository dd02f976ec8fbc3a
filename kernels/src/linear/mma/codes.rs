//! Products with weights in blocks, 16 codes of a row at a time, or 32: a load of 16 bytes of FP8, or of 8 or 16 of FP4, needs one address
//! and one scale, and decoding is what limits the kernel.
//!
//! FP8 codes are multiplied as they are, exact in bf16 and f16, and the sum over a chunk takes the scale: four products in the place of
//! sixteen, and more exact than rounded weights. FP4's blocks are narrower than a chunk; a product with a power of two is exact.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use super::select::Form;
use super::vectors::{pair, tokens_at};
use super::{K, M, N, VECTOR};
use crate::linear::WeightFormat;
use crate::linear::packed::{e2m1_pair, e2m1_pair_of_word, e4m3_pair, e4m3_pair_bf16, e8m0, e8m0_pair_bf16, is_bf16};
use crate::linear::weight::{Fetched, WeightRows, WeightRowsExpand};
use crate::ptx::math;

/// Pairs of the channels that four units have in a vector of a token each, and products with them.
const PAIRS: usize = VECTOR / 2;
const PRODUCTS: usize = 4 * VECTOR / K;

/// Multiplies chunk number `at`, of which `first` and `second` are a unit's codes of its two rows.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn multiply_codes<E: Float, V: Size, NC: Size>(
    x: &[Vector<E, V>],
    weight: &WeightRows<E, V>,
    first: &Fetched<E, V>,
    second: &Fetched<E, V>,
    inputs: &Sequence<usize>,
    at: usize,
    chunks: usize,
    acc: &mut Array<Vector<f32, NC>>,
    #[comptime] form: Form,
) {
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);
    let size!(NA) = def.vector_size(MatrixIdent::A);
    let is_scaled_after = scaled_after(weight);
    let own = decoded(weight, first, form.codes);
    let other = decoded(weight, second, form.codes);
    #[unroll]
    for step in 0..form.steps {
        let mut part = Array::<Vector<f32, NC>>::new(2usize);
        if comptime!(is_scaled_after) {
            part[0] = Vector::new(0.0f32);
            part[1] = Vector::new(0.0f32);
        } else {
            part[0] = acc[comptime!(2 * step)];
            part[1] = acc[comptime!(2 * step + 1)];
        }
        #[unroll]
        for vector in 0..comptime!(form.codes / VECTOR) {
            let tokens = tokens_at(x, inputs[step], at * comptime!(form.chunk() / VECTOR) + vector, at < chunks, form);
            #[unroll]
            for within in 0..PRODUCTS {
                let pairs = comptime!(vector * PAIRS + 2 * within);
                let mut rows = Array::<Vector<E, NA>>::new(4usize);
                rows[0] = Vector::<E, NA>::reinterpret(own[pairs]);
                rows[1] = Vector::<E, NA>::reinterpret(other[pairs]);
                rows[2] = Vector::<E, NA>::reinterpret(own[comptime!(pairs + 1)]);
                rows[3] = Vector::<E, NA>::reinterpret(other[comptime!(pairs + 1)]);
                let mut columns = Array::<Vector<E, NA>>::new(2usize);
                columns[0] = of_pair::<E, V, NA>(weight, tokens, comptime!(2 * within));
                columns[1] = of_pair::<E, V, NA>(weight, tokens, comptime!(2 * within + 1));
                def.execute_inplace(&rows, &columns, &mut part);
            }
        }
        if comptime!(is_scaled_after) {
            acc[comptime!(2 * step)] += part[0] * Vector::new(first.scale);
            acc[comptime!(2 * step + 1)] += part[1] * Vector::new(second.scale);
        } else {
            acc[comptime!(2 * step)] = part[0];
            acc[comptime!(2 * step + 1)] = part[1];
        }
    }
}

/// The numbers of a vector of a token that meet pair `i` of the codes.
#[cube]
fn of_pair<E: Float, V: Size, NA: Size>(
    weight: &WeightRows<E, V>,
    tokens: Vector<E, V>,
    #[comptime] i: usize,
) -> Vector<E, NA> {
    let (format, in_bf16) = (weight.format(), is_bf16::<E>());
    if comptime!(format == WeightFormat::Fp4 && in_bf16) {
        let words = Vector::<u32, Const<4>>::reinterpret(tokens);
        let (low, high) = (words.extract(comptime!(i / 2)), words.extract(comptime!(i / 2 + 2)));
        let halves = math::permute_two(low, high, comptime!(if i.is_multiple_of(2) { 0x5410u32 } else { 0x7632u32 }));
        Vector::<E, NA>::reinterpret(halves)
    } else {
        pair::<E, V, NA>(tokens, i)
    }
}

/// Whether the sum over a chunk takes the scale.
#[cube]
fn scaled_after<E: Float, V: Size>(weight: &WeightRows<E, V>) -> comptime_type!(bool) {
    #[comptime]
    match weight {
        WeightRows::Dense(_) => comptime!(false),
        WeightRows::Fp8(_) => comptime!(true),
        WeightRows::Fp4(_) => comptime!(false),
    }
}

/// The numbers of so many codes, in pairs: neighbours, but of FP4 in bf16 each with the one four further ([`of_pair`]).
#[cube]
fn decoded<E: Float, V: Size>(
    weight: &WeightRows<E, V>,
    fetched: &Fetched<E, V>,
    #[comptime] count: usize,
) -> Sequence<u32> {
    let in_bf16 = is_bf16::<E>();
    let mut pairs = Sequence::<u32>::new();
    #[comptime]
    match weight {
        WeightRows::Dense(_) => {}
        WeightRows::Fp8(_) => {
            #[unroll]
            for i in 0..comptime!(count / 2) {
                // Two codes, each in the upper byte of a half.
                let selector = comptime!(if i % 2 == 0 { 0x1404u32 } else { 0x3424u32 });
                let codes = math::permute(fetched.codes.extract(comptime!(i / 2)), selector);
                if comptime!(in_bf16) {
                    pairs.push(u32::reinterpret(e4m3_pair_bf16(codes)));
                } else {
                    pairs.push(u32::reinterpret(e4m3_pair(codes)));
                }
            }
        }
        WeightRows::Fp4(_) => {
            let (scale, scale_pair) = (e8m0(fetched.scale_code), e8m0_pair_bf16(fetched.scale_code));
            #[unroll]
            for i in 0..comptime!(count / 2) {
                let word = fetched.codes.extract(comptime!(i / 4));
                if comptime!(in_bf16) {
                    pairs.push(u32::reinterpret(e2m1_pair_of_word(word, comptime!(i % 4)) * scale_pair));
                } else {
                    // The codes of a byte, each in a half of the word.
                    let byte = math::permute(word, comptime!(0x4440u32 + i as u32 % 4));
                    let numbers = e2m1_pair(byte | (byte << 12));
                    let (low, high) =
                        (f32::cast_from(numbers.extract(0usize)), f32::cast_from(numbers.extract(1usize)));
                    pairs.push(math::pack(low * scale, high * scale, crate::ptx::wgmma::Elem::F16));
                }
            }
        }
    }
    pairs
}
