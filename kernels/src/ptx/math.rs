//! Arithmetic of single threads.

use cubecl::ir::dialect::vector::CompositeConstructOp;
use cubecl::prelude::*;

use super::read;
use super::wgmma::Elem;

/// 2 to the power of `x`, within 2 ulp of f32; what is subnormal is zero: `ex2.approx.ftz.f32` (PTX ISA, "Floating
/// Point Instructions: ex2").
///
/// `exp2(-inf)` is 0, of NaN it is NaN.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let power: f32;
    gpu_asm!(
        "ex2.approx.ftz.f32 {power}, {x};",
        power = out(_) power,
        x = in(_) read::<f32>(x),
        options(pure, nomem)
    );
    power
}

/// One over `x`, within 1 ulp; what is subnormal is zero: `rcp.approx.ftz.f32` (PTX ISA, "Floating Point Instructions: rcp").
#[cube]
pub(crate) fn reciprocal(x: f32) -> f32 {
    let inverse: f32;
    gpu_asm!(
        "rcp.approx.ftz.f32 {inverse}, {x};",
        inverse = out(_) inverse,
        x = in(_) read::<f32>(x),
        options(pure, nomem)
    );
    inverse
}

/// The hyperbolic tangent, within 1e-6: `1 - 2 / (1 + exp(2 x))`, by [`exp2()`] and [`reciprocal()`]. `tanh.approx` is off by up to 5e-4.
#[cube]
pub(crate) fn tanh(x: f32) -> f32 {
    let above_one = exp2(x * comptime!(2.0 * std::f32::consts::LOG2_E)) + 1.0f32;
    1.0f32 - 2.0f32 * reciprocal(above_one)
}

/// `x`, and 0 where it is less; of NaN NaN: `max.NaN.f32` (PTX ISA, "Floating Point Instructions: max"). sm_80.
#[cube]
pub(crate) fn relu(x: f32) -> f32 {
    let positive: f32;
    gpu_asm!(
        "max.NaN.f32 {positive}, {x}, 0f00000000;",
        positive = out(_) positive,
        x = in(_) read::<f32>(x),
        options(pure, nomem)
    );
    positive
}

/// Two numbers rounded to bf16 or f16, `low` in the lower half: `cvt.rn.bf16x2.f32`, `cvt.rn.f16x2.f32` (PTX ISA, "Data
/// Movement and Conversion Instructions: cvt").
///
/// To nearest, to even if there are two. In f16 what exceeds 65504 becomes infinite.
#[cube]
pub(crate) fn pack(low: f32, high: f32, #[comptime] elem: Elem) -> u32 {
    let name = comptime!(elem.name());
    let pair: u32;
    // The first operand of the instruction is the upper half.
    gpu_asm!(
        "cvt.rn.{name}x2.f32 {pair}, {high}, {low};",
        pair = out(_) pair,
        high = in(_) read::<f32>(high),
        low = in(_) read::<f32>(low),
        options(pure, nomem)
    );
    pair
}

/// Two E4M3 codes of a word as f16, those of its lower half or of its upper one, exact: `cvt.rn.f16x2.e4m3x2` (PTX ISA, "Data Movement and
/// Conversion Instructions: cvt"). sm_89.
#[cube]
pub(crate) fn e4m3_pair(word: u32, #[comptime] upper: bool) -> u32 {
    let half = comptime!(if upper { "upper" } else { "lower" });
    let pair: u32;
    gpu_asm!(
        "{{\n.reg .b16 lower, upper;\nmov.b32 {{lower, upper}}, {word};\ncvt.rn.f16x2.e4m3x2 {pair}, {half};\n}}",
        pair = out(_) pair,
        word = in(_) read::<u32>(word),
        options(pure, nomem)
    );
    pair
}

/// The bytes of a word in another order: byte `i` of the result is the one that digit `i` of `selector` names, 4 is a byte of zero.
#[cube]
pub(crate) fn permute(word: u32, #[comptime] selector: u32) -> u32 {
    permute_two(word, 0u32, selector)
}

/// Bytes of two words, in any order: byte `i` of the result is the one that digit `i` of `selector` names, those of the second from 4 on:
/// `prmt.b32` (PTX ISA, "Data Movement and Conversion Instructions: prmt").
#[cube]
pub(crate) fn permute_two(first: u32, second: u32, #[comptime] selector: u32) -> u32 {
    let permuted: u32;
    gpu_asm!(
        "prmt.b32 {permuted}, {first}, {second}, {selector};",
        permuted = out(_) permuted,
        first = in(_) read::<u32>(first),
        second = in(_) read::<u32>(second),
        options(pure, nomem)
    );
    permuted
}

/// A vector of the values of a sequence, made at once.
///
/// `Vector::insert` would copy the vector for every element, which takes the compiler very long for 128 of them.
#[cube]
pub(crate) fn vector<T: Scalar, N: Size>(values: &Sequence<T>) -> Vector<T, N> {
    intrinsic!(|scope| {
        let len: usize = values.__expand_len_method(scope);
        let values = (0..len).map(|i| (*values.__expand_index_method(scope, i.into())).read_value(scope)).collect();
        let vector = Vector::<T, N>::__expand_as_type(scope);
        let op = CompositeConstructOp::new(scope.ctx_mut(), vector, values);
        scope.register_with_result(&op).into()
    })
}
