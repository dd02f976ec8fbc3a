//! f16, bf16, FP8, tf32 and f64: arithmetic and conversions.
mod common;

use common::Registers;
use half::{bf16, f16};
use proptest::prelude::*;
use rstest::rstest;

/// Runs a body on `%i0` to `%i3` of one thread.
fn run(body: &str, inputs: [u32; 4]) -> u32 {
    Registers { threads: 1, inputs: 4, outputs: 2, seed: 1 }.run(body, &inputs).unwrap()[0]
}

/// The body of an operation on halves `%rs1` to `%rs3`.
fn half(op: &str, inputs: [u16; 3]) -> u16 {
    let sources = if op.starts_with("fma") {
        "%rs1, %rs2, %rs3"
    } else if ["neg", "abs", "ex2", "tan", "cvt"].contains(&&op[..3]) {
        "%rs1"
    } else {
        "%rs1, %rs2"
    };
    let body = format!(
        "cvt.u16.u32 %rs1, %i0; cvt.u16.u32 %rs2, %i1; cvt.u16.u32 %rs3, %i2; {op} %rs4, {sources}; cvt.u32.u16 %o0, %rs4;"
    );
    run(&body, [inputs[0].into(), inputs[1].into(), inputs[2].into(), 0]) as u16
}

const INF: u16 = 0x7c00;

#[rstest]
#[case("add.f16", [0x3c00, 0x3c00, 0], 0x4000)]
#[case("add.f16", [0x0001, 0x0001, 0], 0x0002)]
#[case("add.ftz.f16", [0x0001, 0x0001, 0], 0)]
#[case("add.ftz.f16", [0x8001, 0x8001, 0], 0x8000)]
#[case("add.f16", [0x7bff, 0x7bff, 0], INF)]
#[case("add.f16", [INF, 0xfc00, 0], 0x7fff)]
#[case("sub.f16", [0x3c00, 0x3c00, 0], 0)]
#[case("mul.f16", [0x8000, 0x3c00, 0], 0x8000)]
#[case("add.sat.f16", [0x3c00, 0x3c00, 0], 0x3c00)]
#[case("add.sat.f16", [0x7e00, 0x3c00, 0], 0)]
#[case("sub.sat.f16", [0x3c00, 0x4000, 0], 0)]
// (1 + 2^-10)^2 - (1 + 2^-9) is 2^-20, which a rounded product would lose.
#[case("fma.rn.f16", [0x3c01, 0x3c01, 0xbc02], 0x0010)]
#[case("fma.rn.relu.f16", [0x3c00, 0xbc00, 0], 0)]
#[case("fma.rn.relu.f16", [0x7e00, 0xbc00, 0], 0x7fff)]
#[case("fma.rn.sat.f16", [0x4000, 0x4000, 0], 0x3c00)]
#[case("min.f16", [0x7e00, 0x3c00, 0], 0x3c00)]
#[case("min.NaN.f16", [0x7e00, 0x3c00, 0], 0x7fff)]
#[case("max.f16", [0x7e00, 0x7e01, 0], 0x7fff)]
#[case("min.f16", [0x0000, 0x8000, 0], 0x8000)]
#[case("max.bf16", [0x8000, 0x0000, 0], 0x0000)]
#[case("neg.f16", [0x3c00, 0, 0], 0xbc00)]
#[case("abs.bf16", [0xbf80, 0, 0], 0x3f80)]
#[case("add.rn.bf16", [0x3f80, 0x3f80, 0], 0x4000)]
#[case("mul.bf16", [0x7f7f, 0x7f7f, 0], 0x7f80)]
#[case("sub.bf16", [0x7f80, 0x7f80, 0], 0x7fff)]
// 1 + 2^-8 + 2^-20 is above the middle of two bf16, 1 + 2^-8 is the middle.
#[case("fma.rn.bf16", [0x3b80, 0x3f80, 0x3f80], 0x3f80)]
#[case("fma.rn.bf16", [0x3580, 0x3f80, 0x3f81], 0x3f81)]
#[case("ex2.approx.f16", [0x4000, 0, 0], 0x4400)]
#[case("ex2.approx.ftz.bf16", [0x4000, 0, 0], 0x4080)]
#[case("ex2.approx.f16", [0xfc00, 0, 0], 0)]
#[case("tanh.approx.f16", [INF, 0, 0], 0x3c00)]
#[case("tanh.approx.bf16", [0x8000, 0, 0], 0x8000)]
#[case("cvt.rni.f16.f16", [0x3e00, 0, 0], 0x4000)]
#[case("cvt.rzi.f16.f16", [0xbe00, 0, 0], 0xbc00)]
#[case("cvt.rmi.bf16.bf16", [0xbf00, 0, 0], 0xbf80)]
#[case("cvt.rpi.bf16.bf16", [0xbf00, 0, 0], 0x8000)]
#[case("set.eq.f16.f16", [0x3c00, 0x3c00, 0], 0x3c00)]
#[case("set.nan.bf16.bf16", [0x7fc0, 0x3f80, 0], 0x3f80)]
#[case("set.lt.u16.f16", [0x3c00, 0x4000, 0], 0xffff)]
#[case("set.ltu.f16.f16", [0x7e00, 0x4000, 0], 0x3c00)]
fn halves(#[case] op: &str, #[case] inputs: [u16; 3], #[case] expected: u16) {
    assert_eq!(half(op, inputs), expected, "{op} {inputs:x?}");
}

#[rstest]
#[case("add.f16x2 %o0, %i0, %i1;", [0x3c00_4000, 0x3c00_bc00, 0, 0], 0x4000_3c00)]
#[case("fma.rn.bf16x2 %o0, %i0, %i1, %i2;", [0x3f80_4000, 0x4000_4000, 0x3f80_0000, 0], 0x4040_4080)]
#[case("neg.bf16x2 %o0, %i0;", [0x3f80_bf80, 0, 0, 0], 0xbf80_3f80)]
#[case("set.eq.f16x2.f16x2 %o0, %i0, %i1;", [0x3c00_4000, 0x3c00_3c00, 0, 0], 0x3c00_0000)]
#[case("set.eq.u32.f16x2 %o0, %i0, %i1;", [0x3c00_4000, 0x3c00_3c00, 0, 0], 0xffff_0000)]
#[case("set.lt.f32.f32 %o0, %i0, %i1;", [0x3f80_0000, 0x4000_0000, 0, 0], 0x3f80_0000)]
#[case("cvt.rz.bf16x2.f32 %o0, %i0, %i1;", [0x3f80_ffff, 0xbf80_ffff, 0, 0], 0x3f80_bf80)]
#[case("cvt.rn.relu.f16x2.f32 %o0, %i0, %i1;", [0xbf80_0000, 0x3f80_0000, 0, 0], 0x0000_3c00)]
// tf32: half of the last bit goes away from zero, or to even.
#[case("cvt.rna.tf32.f32 %o0, %i0;", [0x3f80_1000, 0, 0, 0], 0x3f80_2000)]
#[case("cvt.rn.tf32.f32 %o0, %i0;", [0x3f80_1000, 0, 0, 0], 0x3f80_0000)]
#[case("cvt.rna.tf32.f32 %o0, %i0;", [0xff80_0001, 0, 0, 0], 0x7fff_ffff)]
// FP8: the first operand is the upper; 448 and 57344 are the largest; 2^-10 is half of e4m3's least.
#[case("cvt.rn.satfinite.e4m3x2.f32 %rs1, %i0, %i1; cvt.u32.u16 %o0, %rs1;", [0x3f80_0000, 0xc000_0000, 0, 0], 0x38c0)]
#[case("cvt.rn.satfinite.e4m3x2.f32 %rs1, %i0, %i1; cvt.u32.u16 %o0, %rs1;", [0x7f80_0000, 0x7fc0_0000, 0, 0], 0x7e7f)]
#[case("cvt.rn.satfinite.e4m3x2.f32 %rs1, %i0, %i1; cvt.u32.u16 %o0, %rs1;", [0x3a80_0000, 0x3a80_0001, 0, 0], 0x0001)]
#[case("cvt.rn.satfinite.relu.e5m2x2.f32 %rs1, %i0, %i1; cvt.u32.u16 %o0, %rs1;", [0xbf80_0000, 0x4780_0000, 0, 0], 0x007b)]
#[case("cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %i0; cvt.u32.u16 %o0, %rs1;", [0x3c00_c000, 0, 0, 0], 0x38c0)]
#[case("cvt.u16.u32 %rs1, %i0; cvt.rn.f16x2.e4m3x2 %o0, %rs1;", [0x387f, 0, 0, 0], 0x3c00_7fff)]
#[case("cvt.u16.u32 %rs1, %i0; cvt.rn.f16x2.e5m2x2 %o0, %rs1;", [0x3cfc, 0, 0, 0], 0x3c00_fc00)]
// f32 to whole numbers in f32, directed rounding, flushed and clamped.
#[case("cvt.rmi.f32.f32 %o0, %i0;", [0xbf00_0000, 0, 0, 0], 0xbf80_0000)]
#[case("cvt.rpi.ftz.s32.f32 %o0, %i0;", [1, 0, 0, 0], 0)]
#[case("cvt.rpi.s32.f32 %o0, %i0;", [1, 0, 0, 0], 1)]
#[case("add.rz.f32 %o0, %i0, %i1;", [0x3f80_0000, 0xb000_0000, 0, 0], 0x3f7f_ffff)]
#[case("mul.rp.f32 %o0, %i0, %i1;", [0x3f80_0001, 0x3f80_0001, 0, 0], 0x3f80_0003)]
#[case("mul.rm.f32 %o0, %i0, %i1;", [0x8000_0000, 0x3f80_0000, 0, 0], 0x8000_0000)]
#[case("sub.rm.f32 %o0, %i0, %i1;", [0x3f80_0000, 0x3f80_0000, 0, 0], 0x8000_0000)]
#[case("add.sat.f32 %o0, %i0, %i1;", [0x3f80_0000, 0x3f80_0000, 0, 0], 0x3f80_0000)]
#[case("fma.rn.ftz.sat.f32 %o0, %i0, %i1, %i2;", [0x7fc0_0000, 0x3f80_0000, 0, 0], 0)]
#[case("min.NaN.f32 %o0, %i0, %i1;", [0x3f80_0000, 0xffc0_0000, 0, 0], 0x7fff_ffff)]
#[case("ex2.approx.ftz.f32 %o0, %i0;", [0xc2fd_0000, 0, 0, 0], 0)]
#[case("ex2.approx.f32 %o0, %i0;", [0xc2fe_0000, 0, 0, 0], 0x0040_0000)]
#[case("ex2.approx.ftz.f32 %o0, %i0;", [0x8000_0001, 0, 0, 0], 0x3f80_0000)]
#[case("tanh.approx.f32 %o0, %i0;", [0x7f80_0000, 0, 0, 0], 0x3f80_0000)]
#[case("sin.approx.f32 %o0, %i0;", [0x8000_0000, 0, 0, 0], 0x8000_0000)]
#[case("cos.approx.ftz.f32 %o0, %i0;", [0x0000_0001, 0, 0, 0], 0x3f80_0000)]
#[case("div.full.f32 %o0, %i0, %i1;", [0x3f80_0000, 0x4000_0000, 0, 0], 0x3f00_0000)]
#[case("testp.subnormal.f32 %p1, %i0; selp.u32 %o0, 1, 0, %p1;", [0x8000_0001, 0, 0, 0], 1)]
#[case("testp.finite.f32 %p1, %i0; selp.u32 %o0, 1, 0, %p1;", [0x7f80_0000, 0, 0, 0], 0)]
#[case("setp.lt.bf16 %p1, %rs1, %rs2; selp.u32 %o0, 1, 0, %p1;", [0, 0, 0, 0], 0)]
// Integers.
#[case("sad.s32 %o0, %i0, %i1, %i2;", [-5i32 as u32, 3, 10, 0], 18)]
#[case("dp4a.s32.u32 %o0, %i0, %i1, %i2;", [0xff01_02fe, 0x0102_03ff, 7, 0], 7u32.wrapping_add((-1i32 + 2 + 6 - 2 * 255) as u32))]
#[case("dp2a.hi.u32.s32 %o0, %i0, %i1, %i2;", [0x0002_ffff, 0xff01_0000, 1, 0], 1 + 0xffff - 2)]
#[case("mul24.lo.s32 %o0, %i0, %i1;", [0x00ff_ffff, 5, 0, 0], -5i32 as u32)]
#[case("mul24.hi.u32 %o0, %i0, %i1;", [0x00ff_ffff, 0x00ff_ffff, 0, 0], 0xffff_fe00)]
#[case("mad.hi.u32 %o0, %i0, %i1, %i2;", [0x8000_0000, 6, 9, 0], 12)]
#[case("bfind.u32 %o0, %i0;", [0x0000_0100, 0, 0, 0], 8)]
#[case("bfind.s32 %o0, %i0;", [-1i32 as u32, 0, 0, 0], 0xffff_ffff)]
#[case("bfind.shiftamt.u32 %o0, %i0;", [0x0000_0100, 0, 0, 0], 23)]
#[case("add.sat.s32 %o0, %i0, %i1;", [i32::MAX as u32, 5, 0, 0], i32::MAX as u32)]
#[case("slct.s32.f32 %o0, %i0, %i1, %i2;", [1, 2, 0x8000_0000, 0], 1)]
#[case("max.s16x2 %o0, %i0, %i1;", [0xffff_0001, 0x0002_fffe, 0, 0], 0x0002_0001)]
#[case("add.cc.u32 %r2, %i0, %i1; addc.u32 %o0, %i2, %i3;", [u32::MAX, 1, 5, 6], 12)]
#[case("sub.cc.u32 %r2, %i0, %i1; subc.u32 %o0, %i2, %i3;", [0, 1, 5, 3], 1)]
#[case("mad.lo.cc.u32 %r2, %i0, %i1, %i2; madc.hi.u32 %o0, %i0, %i1, %i3;", [u32::MAX, 2, 2, 7], 9)]
#[case("mov.u32 %r2, -8; mov.b64 %rd5, {%i0, %r2}; bfe.s64 %rd6, %rd5, 32, 8; cvt.u32.u64 %o0, %rd6;", [0, 0, 0, 0], -8i32 as u32)]
fn words(#[case] body: &str, #[case] inputs: [u32; 4], #[case] expected: u32) {
    assert_eq!(run(body, inputs), expected, "{body} {inputs:x?}");
}

/// Runs an f64 operation; the second output word holds the upper half.
fn double(op: &str, [x, y, z]: [f64; 3]) -> f64 {
    let words = [x, y, z].map(f64::to_bits).into_iter().flat_map(|b| [b as u32, (b >> 32) as u32]);
    let inputs: Vec<u32> = words.collect();
    let body = format!(
        "mov.b64 %fd1, {{%i0, %i1}}; mov.b64 %fd2, {{%i2, %i3}}; mov.b64 %fd3, {{%i4, %i5}}; {op}\n\
         mov.b64 {{%o0, %o1}}, %fd4;"
    );
    let out = Registers { threads: 1, inputs: 6, outputs: 2, seed: 1 }.run(&body, &inputs).unwrap();
    f64::from_bits(u64::from(out[0]) | u64::from(out[1]) << 32)
}

#[rstest]
#[case("add.f64 %fd4, %fd1, %fd2;", [1.5, 2.25, 0.0], 3.75)]
#[case("add.rz.f64 %fd4, %fd1, %fd2;", [1.0, -1e-30, 0.0], 1f64.next_down())]
#[case("mul.rp.f64 %fd4, %fd1, %fd2;", [1.0 + f64::EPSILON, 1.0 + f64::EPSILON, 0.0], 1.0 + 3.0 * f64::EPSILON)]
#[case("fma.rn.f64 %fd4, %fd1, %fd2, %fd3;", [1.0 + f64::EPSILON, 1.0 - f64::EPSILON, -1.0], -f64::EPSILON * f64::EPSILON)]
#[case("div.rn.f64 %fd4, %fd1, %fd2;", [1.0, 3.0, 0.0], 1.0 / 3.0)]
#[case("sqrt.rn.f64 %fd4, %fd1;", [2.0, 0.0, 0.0], std::f64::consts::SQRT_2)]
#[case("min.f64 %fd4, %fd1, %fd2;", [f64::NAN, 3.0, 0.0], 3.0)]
#[case("neg.f64 %fd4, %fd1;", [2.0, 0.0, 0.0], -2.0)]
#[case("copysign.f64 %fd4, %fd1, %fd2;", [-1.0, 3.0, 0.0], -3.0)]
#[case("setp.ltu.f64 %p1, %fd1, %fd2; selp.f64 %fd4, 0d3FF0000000000000, %fd1, %p1;", [f64::NAN, 3.0, 0.0], 1.0)]
#[case("cvt.rn.f32.f64 %f1, %fd1; cvt.f64.f32 %fd4, %f1;", [1.0 + 1e-9, 0.0, 0.0], 1.0)]
#[case("cvt.rp.f32.f64 %f1, %fd1; cvt.f64.f32 %fd4, %f1;", [1.0 + 1e-9, 0.0, 0.0], 1.0 + f32::EPSILON as f64)]
#[case("cvt.rzi.s32.f64 %r2, %fd1; cvt.rn.f64.s32 %fd4, %r2;", [-7.9, 0.0, 0.0], -7.0)]
#[case("cvt.rzi.s32.f64 %r2, %fd1; cvt.rn.f64.s32 %fd4, %r2;", [f64::NAN, 0.0, 0.0], i32::MIN as f64)]
#[case("cvt.rmi.f64.f64 %fd4, %fd1;", [-0.5, 0.0, 0.0], -1.0)]
// 2049 + 2^-40 is beyond the middle of two f16; through f32 it would be the middle.
#[case("cvt.rn.f16.f64 %rs1, %fd1; cvt.f32.f16 %f1, %rs1; cvt.f64.f32 %fd4, %f1;", [2049.0 + 1e-12, 0.0, 0.0], 2050.0)]
fn doubles(#[case] op: &str, #[case] inputs: [f64; 3], #[case] expected: f64) {
    assert_eq!(double(op, inputs), expected, "{op}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Sums and products are the nearest to the exact ones, which f64 has.
    #[test]
    fn halves_round_once(a in any::<u16>(), b in any::<u16>()) {
        let (x, y) = (f16::from_bits(a).to_f64(), f16::from_bits(b).to_f64());
        prop_assume!(x.is_finite() && y.is_finite());
        for (op, exact) in [("add.f16", x + y), ("sub.f16", x - y), ("mul.f16", x * y)] {
            let got = half(op, [a, b, 0]);
            let value = f16::from_bits(got).to_f64();
            if value.is_finite() {
                for near in [got + 1, got.saturating_sub(1)] {
                    let near = f16::from_bits(near).to_f64();
                    prop_assert!(near.is_nan() || (value - exact).abs() <= (near - exact).abs(), "{} {:x} {:x}", op, a, b);
                }
            } else {
                prop_assert!(exact.abs() >= 65520.0);
            }
        }
    }

    /// The directed roundings of an f32 enclose it, to nearest is one of them.
    #[test]
    fn narrow_floats_enclose(bits in any::<u32>()) {
        let x = f32::from_bits(bits);
        prop_assume!(x.is_finite() && x.abs() < 6e4);
        for (ty, to_f32) in [
            ("f16", (|b| f16::from_bits(b).to_f32()) as fn(u16) -> f32),
            ("bf16", |b| bf16::from_bits(b).to_f32()),
        ] {
            let to = |mode: &str| {
                to_f32(run(&format!("cvt.{mode}.{ty}.f32 %rs1, %i0; cvt.u32.u16 %o0, %rs1;"), [bits, 0, 0, 0]) as u16)
            };
            let (near, zero) = (to("rn"), to("rz"));
            prop_assert!(zero.abs() <= x.abs() && zero * x >= 0.0);
            prop_assert!((near - x).abs() <= (zero - x).abs());
        }
    }
}
