//! Single instructions against what the PTX ISA says they do.
use proptest::prelude::*;
use ptx_sim::{Launch, Memory, Param, parse};
use rstest::rstest;

/// Runs one instruction from `%rd10`, `%rd11`, `%rd12` (or `%r10` .. and `%f10` .., `%rs10` ..) to `%rd1` and so on.
fn run(instruction: &str, inputs: [u64; 3]) -> u64 {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\
         .visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c)\n{{\n\
         .reg .pred %p<9>; .reg .b16 %rs<20>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .b64 %rd<20>;\n\
         ld.param.u64 %rd2, [out]; ld.param.u64 %rd10, [a]; ld.param.u64 %rd11, [b]; ld.param.u64 %rd12, [c];\n\
         ld.param.u32 %r10, [a]; ld.param.u32 %r11, [b]; ld.param.u32 %r12, [c];\n\
         ld.param.f32 %f10, [a]; ld.param.f32 %f11, [b]; ld.param.f32 %f12, [c];\n\
         ld.param.u16 %rs10, [a]; ld.param.u16 %rs11, [b]; {instruction}\n\
         st.global.u64 [%rd2], %rd1; ret;\n}}\n"
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let buffer = memory.alloc(&[0; 8]);
    let mut params = vec![Param::Buffer(buffer)];
    params.extend(inputs.map(|v| Param::Bytes(v.to_le_bytes().to_vec())));
    Launch { block: [1; 3], params, ..Launch::new(&module, "k") }.run(&memory).unwrap();
    u64::from_le_bytes(memory.read(buffer).try_into().unwrap())
}

/// A 32-bit instruction with the result in `%r1`.
fn run32(instruction: &str, inputs: [u64; 3]) -> u32 {
    run(&format!("{instruction} cvt.u64.u32 %rd1, %r1;"), inputs) as u32
}

/// An f32 instruction with the result in `%f1`.
fn run_float(instruction: &str, inputs: [f32; 3]) -> f32 {
    f32::from_bits(run32(&format!("{instruction} mov.b32 %r1, %f1;"), inputs.map(|x| u64::from(x.to_bits()))))
}

#[rstest]
#[case("bfi.b32 %r1, %r10, %r11, 8, 8;", [0xabcd, 0x1122_3344, 0], 0x1122_cd44)]
#[case("bfi.b32 %r1, %r10, %r11, 28, 31;", [0xff, 0, 0], 0xf000_0000)]
#[case("bfi.b32 %r1, %r10, %r11, 40, 3;", [0xff, 9, 0], 9)]
#[case("bfe.u32 %r1, %r10, 4, 8;", [0x1234_5678, 0, 0], 0x67)]
#[case("bfe.s32 %r1, %r10, 8, 8;", [0x0000_9000, 0, 0], 0xffff_ff90)]
#[case("bfe.s32 %r1, %r10, 28, 8;", [0x9000_0000, 0, 0], 0xffff_fff9)]
#[case("prmt.b32 %r1, %r10, %r11, 0x7410;", [0x1122_3344, 0x8899_aabb, 0], 0x88bb_3344)]
#[case("prmt.b32 %r1, %r10, %r11, 0xf804;", [0x1122_3384, 0x8899_aabb, 0], 0xffff_84bb)]
#[case("shl.b32 %r1, %r10, %r11;", [1, 32, 0], 0)]
#[case("shr.s32 %r1, %r10, %r11;", [0x8000_0000, 99, 0], 0xffff_ffff)]
#[case("shf.l.wrap.b32 %r1, %r10, %r11, 8;", [0x1122_3344, 0xaabb_ccdd, 0], 0xbbcc_dd11)]
#[case("shf.r.clamp.b32 %r1, %r10, %r11, 40;", [0x1122_3344, 0xaabb_ccdd, 0], 0xaabb_ccdd)]
#[case("div.u32 %r1, %r10, %r11;", [7, 0, 0], 0xffff_ffff)]
#[case("div.s32 %r1, %r10, %r11;", [(-7i32 as u32) as u64, 2, 0], -3i32 as u32)]
#[case("mul.hi.s32 %r1, %r10, %r11;", [0xffff_ffff, 5, 0], 0xffff_ffff)]
#[case("popc.b32 %r1, %r10;", [0xf0f0, 0, 0], 8)]
#[case("lop3.b32 %r1, %r10, %r11, %r12, 0xe8;", [0b0011, 0b0101, 0b1001], 0b0001)]
#[case("neg.s32 %r1, %r10;", [5, 0, 0], -5i32 as u32)]
#[case("mov.b32 %r1, {%rs10, %rs11};", [0x1111, 0x2222, 0], 0x2222_1111)]
#[case("cvt.rn.bf16x2.f32 %r1, %f10, %f11;", [0x3f80_0000, 0x4000_0000, 0], 0x3f80_4000)]
#[case("cvt.rn.f16x2.f32 %r1, %f10, %f11;", [0x3f80_0000, 0x4000_0000, 0], 0x3c00_4000)]
#[case("setp.ne.f32 %p1, %f10, %f10; selp.u32 %r1, 1, 0, %p1;", [0x7fc0_0000, 0, 0], 0)]
#[case("setp.neu.f32 %p1, %f10, %f10; selp.u32 %r1, 1, 0, %p1;", [0x7fc0_0000, 0, 0], 1)]
#[case("setp.lt.and.s32 %p1|%p2, %r10, 0, !%p3; selp.u32 %r1, 2, 0, %p2; @%p1 add.s32 %r1, %r1, 1;", [0xffff_ffff, 0, 0], 1)]
fn integers(#[case] instruction: &str, #[case] inputs: [u64; 3], #[case] expected: u32) {
    assert_eq!(run32(instruction, inputs), expected, "{:#x}", run32(instruction, inputs));
}

#[rstest]
#[case("max.f32 %f1, %f10, %f11;", [f32::NAN, -3.0, 0.0], -3.0)]
#[case("min.f32 %f1, %f10, %f11;", [0.0, -0.0, 0.0], -0.0)]
#[case("copysign.f32 %f1, %f10, %f11;", [-1.0, 3.0, 0.0], -3.0)]
#[case("cvt.sat.f32.f32 %f1, %f10;", [f32::NAN, 0.0, 0.0], 0.0)]
#[case("cvt.sat.f32.f32 %f1, %f10;", [1.5, 0.0, 0.0], 1.0)]
#[case("ex2.approx.ftz.f32 %f1, %f10;", [-130.0, 0.0, 0.0], 0.0)]
#[case("ex2.approx.f32 %f1, %f10;", [3.0, 0.0, 0.0], 8.0)]
#[case("fma.rn.f32 %f1, %f10, %f11, %f12;", [1.0 + f32::EPSILON, 1.0 - f32::EPSILON, -1.0], -f32::EPSILON * f32::EPSILON)]
#[case("fma.rm.f32 %f1, %f10, %f11, %f12;", [f32::MAX, 2.0, 0.0], f32::MAX)]
#[case("fma.rm.f32 %f1, %f10, %f11, %f12;", [1.0, 1.0, -1.0], -0.0)]
#[case("cvt.rm.f32.s32 %f1, 16777219;", [0.0; 3], 16777218.0)]
#[case("cvt.rp.f32.s32 %f1, -16777219;", [0.0; 3], -16777218.0)]
fn floats(#[case] instruction: &str, #[case] inputs: [f32; 3], #[case] expected: f32) {
    assert_eq!(run_float(instruction, inputs).to_bits(), expected.to_bits(), "{}", run_float(instruction, inputs));
}

/// A float times 2^40, exactly: the floats here are multiples of that.
fn fixed(x: f32) -> i128 {
    (f64::from(x) * 2f64.powi(40)) as i128
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// The result is the greatest float that is not above the exact value, or the least that is not below.
    #[test]
    fn directed_rounding(a in -4000i32..4000, b in -4000i32..4000, c in any::<i32>(), shift in 0i32..20) {
        // Multiples of 2^-40 below 2^23, whose product with 2^-40 stays exact.
        let (x, y) = (a as f32 * 2f32.powi(-10), b as f32 * 2f32.powi(-10));
        let z = c as f32 * 2f32.powi(-8 - shift);
        let exact = fixed(x) * fixed(y) + (fixed(z) << 40);
        let down = run_float("fma.rm.f32 %f1, %f10, %f11, %f12;", [x, y, z]);
        let up = run_float("fma.rp.f32 %f1, %f10, %f11, %f12;", [x, y, z]);
        let zero = run_float("fma.rz.f32 %f1, %f10, %f11, %f12;", [x, y, z]);
        let at = |f: f32| (f64::from(f) * 2f64.powi(80)) as i128;
        prop_assert!(at(down) <= exact && at(down.next_up()) > exact);
        prop_assert!(at(up) >= exact && at(up.next_down()) < exact);
        prop_assert_eq!(zero, if exact < 0 { up } else { down });
    }

    /// An integer in bf16 is the nearest there is, without a rounding to f32 between.
    #[test]
    fn integers_round_once(value in any::<i32>()) {
        let bits = run("cvt.rn.bf16.s32 %rs1, %r10; cvt.u64.u16 %rd1, %rs1;", [u64::from(value as u32), 0, 0]);
        let got = f64::from(f32::from_bits((bits as u32) << 16));
        for other in [bits + 1, bits.saturating_sub(1)] {
            let other = f64::from(f32::from_bits((other as u32) << 16));
            prop_assert!((got - f64::from(value)).abs() <= (other - f64::from(value)).abs());
        }
    }

    #[test]
    fn wide_products(a in any::<u32>(), b in any::<u32>(), c in any::<u64>()) {
        let (x, y) = (u64::from(a), u64::from(b));
        prop_assert_eq!(run("mul.wide.u32 %rd1, %r10, %r11;", [x, y, 0]), x * y);
        prop_assert_eq!(run("mul.wide.s32 %rd1, %r10, %r11;", [x, y, 0]), (i64::from(a as i32) * i64::from(b as i32)) as u64);
        prop_assert_eq!(run("mad.wide.u32 %rd1, %r10, %r11, %rd12;", [x, y, c]), (x * y).wrapping_add(c));
        prop_assert_eq!(run("rem.u64 %rd1, %rd10, %rd11;", [c, x | 1, 0]), c % (x | 1));
    }
}
