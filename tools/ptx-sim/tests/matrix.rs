//! `mma.sync`, `wmma`, `ldmatrix` and `stmatrix`: layouts as the figures of the PTX ISA have them, against plain loops.
mod common;

use common::{Data, Registers, vector};
use half::{bf16, f16};
use ptx_sim::Fault;
use rstest::rstest;

/// The bits of a whole number.
fn bits(elem: &str, x: i32) -> u32 {
    match elem {
        "f16" => f16::from_f32(x as f32).to_bits().into(),
        "bf16" => bf16::from_f32(x as f32).to_bits().into(),
        // Sign, exponent with bias 7 (e4m3) or 15 (e5m2), three or two bits.
        "e4m3" => (0..256u32).find(|b| e4m3(*b) == f64::from(x)).unwrap(),
        "e5m2" => u32::from(f16::from_f32(x as f32).to_bits() >> 8),
        "s8" | "u8" => x as u8 as u32,
        "s32" => x as u32,
        _ => (x as f32).to_bits(),
    }
}

fn e4m3(bits: u32) -> f64 {
    let (sign, e, m) = (if bits >> 7 == 1 { -1.0 } else { 1.0 }, (bits >> 3 & 15) as i32, f64::from(bits & 7) / 8.0);
    sign * if e == 0 { m * 2f64.powi(-6) } else { (1.0 + m) * 2f64.powi(e - 7) }
}

fn width(elem: &str) -> usize {
    match elem {
        "f16" | "bf16" => 16,
        "s8" | "u8" | "e4m3" | "e5m2" => 8,
        _ => 32,
    }
}

/// Rows and columns of a lane's elements of A, B and C, as PTX ISA 9.7.14.5 lists them.
type Place = fn(usize, usize) -> (usize, usize);

fn a_16(lane: usize, i: usize) -> (usize, usize) {
    let row = lane / 4 + if i < 2 || (4..6).contains(&i) { 0 } else { 8 };
    (row, lane % 4 * 2 + (i & 1) + if i >= 4 { 8 } else { 0 })
}

fn b_16(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 2 + (i & 1) + if i >= 2 { 8 } else { 0 }, lane / 4)
}

fn a_8(lane: usize, i: usize) -> (usize, usize) {
    let row = lane / 4 + if i < 4 || (8..12).contains(&i) { 0 } else { 8 };
    (row, lane % 4 * 4 + (i & 3) + if i >= 8 { 16 } else { 0 })
}

fn b_8(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 * 4 + (i & 3) + if i >= 4 { 16 } else { 0 }, lane / 4)
}

fn a_32(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i.is_multiple_of(2) { 0 } else { 8 }, lane % 4 + if i >= 2 { 4 } else { 0 })
}

fn b_32(lane: usize, i: usize) -> (usize, usize) {
    (lane % 4 + 4 * i, lane / 4)
}

fn sums(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + (i & 1))
}

/// Packs a lane's elements, the first in the lowest bits.
fn pack(elem: &str, place: Place, count: usize, lane: usize, matrix: &dyn Fn(usize, usize) -> i32) -> Vec<u32> {
    let per = 32 / width(elem);
    let value = |i: usize| {
        let (row, column) = place(lane, i);
        bits(elem, matrix(row, column)) << (i % per * width(elem))
    };
    (0..count).step_by(per).map(|i| (i..i + per).fold(0, |word, j| word | value(j))).collect()
}

#[rstest]
#[case("m16n8k16", "f32", "bf16", 16, a_16 as Place, b_16 as Place)]
#[case("m16n8k8", "f32", "bf16", 8, a_16, b_16)]
#[case("m16n8k16", "f32", "f16", 16, a_16, b_16)]
#[case("m16n8k16", "f16", "f16", 16, a_16, b_16)]
#[case("m16n8k8", "f16", "f16", 8, a_16, b_16)]
#[case("m16n8k8", "f32", "tf32", 8, a_32, b_32)]
#[case("m16n8k4", "f32", "tf32", 4, a_32, b_32)]
#[case("m16n8k32", "s32", "s8", 32, a_8, b_8)]
#[case("m16n8k16", "s32", "s8", 16, a_8, b_8)]
#[case("m16n8k32", "f32", "e4m3", 32, a_8, b_8)]
#[case("m16n8k32", "f32", "e5m2", 32, a_8, b_8)]
fn products_of_fragments(
    #[case] shape: &str,
    #[case] sum: &str,
    #[case] elem: &str,
    #[case] k: usize,
    #[case] a_place: Place,
    #[case] b_place: Place,
) {
    let mut d = Data(7);
    // e5m2 has two bits behind the first.
    let mut number = || if elem == "e5m2" { d.below(9) as i32 - 4 } else { d.whole() };
    let a: Vec<i32> = (0..16 * k).map(|_| number()).collect();
    let b: Vec<i32> = (0..k * 8).map(|_| number()).collect();
    let c: Vec<i32> = (0..16 * 8).map(|_| number()).collect();
    let mut inputs = Vec::new();
    for lane in 0..32 {
        inputs.extend(pack(elem, a_place, 16 * k / 32, lane, &|r, column| a[r * k + column]));
        inputs.extend(pack(elem, b_place, 8 * k / 32, lane, &|r, column| b[r * 8 + column]));
        inputs.extend(pack(sum, sums, 4, lane, &|r, column| c[r * 8 + column]));
    }
    let (na, nb, nc) = (16 * k * width(elem) / 1024, 8 * k * width(elem) / 1024, width(sum) / 8);
    let body = format!(
        "mma.sync.aligned.{shape}.row.col.{sum}.{elem}.{elem}.{sum} {}, {}, {}, {};",
        vector("o", 0, nc),
        vector("i", 0, na),
        vector("i", na, nb),
        vector("i", na + nb, nc)
    );
    let runs = Registers { threads: 32, inputs: na + nb + nc, outputs: nc, seed: 1 };
    let (got, stats) = runs.run_with_stats(&body, &inputs).unwrap();
    let product =
        |r: usize, column: usize| c[r * 8 + column] + (0..k).map(|i| a[r * k + i] * b[i * 8 + column]).sum::<i32>();
    let expected: Vec<u32> = (0..32).flat_map(|lane| pack(sum, sums, 4, lane, &product)).collect();
    assert_eq!(got, expected);
    assert_eq!(stats.matrix_flops, 2 * 16 * 8 * k as u64);
}

/// What a lane's registers of C become when all of A and B are one value.
fn constant_product(opcode: &str, a: u32, b: u32, c: u32, counts: [usize; 3]) -> u32 {
    let vector = |x: u32, n: usize| format!("{{{}}}", vec![format!("{x}"); n].join(", "));
    let outputs = format!("{{{}}}", (0..counts[2]).map(|i| format!("%o{i}")).collect::<Vec<_>>().join(", "));
    let body =
        format!("{opcode} {outputs}, {}, {}, {};", vector(a, counts[0]), vector(b, counts[1]), vector(c, counts[2]));
    let runs = Registers { threads: 32, inputs: 0, outputs: counts[2], seed: 1 };
    runs.run(&body, &[0]).unwrap()[0]
}

/// Integer sums wrap, or stop at the limits; unsigned bytes are not signed ones; f16 rounds at the end; tf32 has ten
/// bits behind the first; a NaN is one, in the form that arithmetic gives.
#[test]
fn sums_at_the_limits() {
    let s8 = "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32";
    let clamped = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.u8.s32";
    let (ones, most) = (0x0101_0101, i32::MAX as u32);
    assert_eq!(constant_product(s8, ones, 0xffff_ffff, most - 1, [4, 2, 4]), (most - 1).wrapping_add(32 * 255));
    assert_eq!(constant_product(clamped, ones, 0xffff_ffff, most - 1, [4, 2, 4]), most);
    assert_eq!(constant_product(s8, 0xffff_ffff, ones, 0, [4, 2, 4]), -32i32 as u32);
    let half = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16";
    // 2048 + 8 * 0.0625 = 2048.5 rounds to 2048, once.
    assert_eq!(constant_product(half, 0x2c00_2c00, 0x3c00_3c00, 0x6800_6800, [2, 1, 2]), 0x6800_6800);
    let tf32 = "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32";
    assert_eq!(constant_product(tf32, 0x3f80_1fff, 0x3f80_0000, 0, [2, 1, 4]), 4f32.to_bits());
    assert_eq!(constant_product(tf32, 0x7fc0_0000, 0x3f80_0000, 0, [2, 1, 4]), 0x7fff_ffff);
}

/// Terms that cancel: the error stays within `k * 2^-23` of the sum of magnitudes.
#[test]
fn sums_are_as_exact_as_f32() {
    let mut d = Data(3);
    let inputs: Vec<u32> = (0..32 * 6)
        .map(|_| {
            let mut one = || u32::from(bf16::from_f32((d.below(4001) as f32 - 2000.0) / 7.0).to_bits());
            one() | one() << 16
        })
        .collect();
    let body = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%o0, %o1, %o2, %o3}, {%i0, %i1, %i2, %i3}, \
                {%i4, %i5}, {0, 0, 0, 0};";
    let got = Registers { threads: 32, inputs: 6, outputs: 4, seed: 1 }.run(body, &inputs).unwrap();
    let value = |lane: usize, i: usize| {
        f64::from(f32::from_bits(inputs[lane * 6 + i / 2] << (if i.is_multiple_of(2) { 16 } else { 0 }) & 0xffff_0000))
    };
    let (mut a, mut b) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
    for lane in 0..32 {
        (0..8).for_each(|i| a[a_16(lane, i).0][a_16(lane, i).1] = value(lane, i));
        (0..4).for_each(|i| b[b_16(lane, i).0][b_16(lane, i).1] = value(lane, 8 + i));
    }
    for lane in 0..32 {
        for i in 0..4 {
            let (r, c) = sums(lane, i);
            let exact: f64 = (0..16).map(|k| a[r][k] * b[k][c]).sum();
            let magnitude: f64 = (0..16).map(|k| (a[r][k] * b[k][c]).abs()).sum();
            let error = (f64::from(f32::from_bits(got[4 * lane + i])) - exact).abs();
            assert!(error <= 16.0 * 2f64.powi(-23) * magnitude, "{error} of {magnitude}");
        }
    }
}

/// Bytes from memory through fragments and back: `D = A B + C` for each shape and order that CUDA's `wmma` has.
#[rstest]
#[case((16, 16, 16), "f16", "f32", [8, 8, 8])]
#[case((16, 16, 16), "f16", "f16", [8, 8, 4])]
#[case((32, 8, 16), "f16", "f32", [8, 8, 8])]
#[case((8, 32, 16), "f16", "f32", [8, 8, 8])]
#[case((16, 16, 16), "bf16", "f32", [4, 4, 8])]
#[case((32, 8, 16), "bf16", "f32", [8, 2, 8])]
#[case((8, 32, 16), "bf16", "f32", [2, 8, 8])]
#[case((16, 16, 8), "tf32", "f32", [4, 4, 8])]
#[case((16, 16, 16), "s8", "s32", [2, 2, 8])]
#[case((8, 32, 16), "s8", "s32", [1, 4, 8])]
fn wmma_products(
    #[case] (m, n, k): (usize, usize, usize),
    #[case] elem: &str,
    #[case] sum: &str,
    #[case] counts: [usize; 3],
    #[values("row", "col")] a_order: &str,
    #[values("row", "col")] b_order: &str,
    #[values("row", "col")] d_order: &str,
) {
    let mut d = Data(11);
    let mut matrix = |n: usize| (0..n).map(|_| d.whole()).collect::<Vec<_>>();
    let (a, b, c) = (matrix(m * k), matrix(k * n), matrix(m * n));
    let stride = 40;
    // Each matrix has 40 elements from one row or column to the next.
    let store = |elem: &str, rows: usize, columns: usize, order: &str, of: &[i32]| {
        let bytes = width(elem) / 8;
        let mut memory = vec![0u8; stride * 32 * bytes];
        for r in 0..rows {
            for c in 0..columns {
                let at = bytes * if order == "row" { r * stride + c } else { c * stride + r };
                memory[at..at + bytes].copy_from_slice(&bits(elem, of[r * columns + c]).to_le_bytes()[..bytes]);
            }
        }
        memory
    };
    let mut bytes = store(elem, m, k, a_order, &a);
    let b_at = bytes.len();
    bytes.extend(store(elem, k, n, b_order, &b));
    let c_at = bytes.len();
    bytes.extend(store(sum, m, n, "row", &c));
    let words: Vec<u32> = bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
    let types = if elem == "f16" { format!("{sum}.{sum}") } else { format!("{sum}.{elem}.{elem}.{sum}") };
    let s = format!("m{m}n{n}k{k}");
    let (va, vb, vc) = (vector("o", 0, counts[0]), vector("o", 8, counts[1]), vector("o", 16, counts[2]));
    // What follows the matrices in the buffer takes D.
    let body = format!(
        "wmma.load.a.sync.aligned.{a_order}.{s}.global.{elem} {va}, [%rd1], {stride};\n\
         wmma.load.b.sync.aligned.{b_order}.{s}.{elem} {vb}, [%rd1+{b_at}], {stride};\n\
         wmma.load.c.sync.aligned.row.{s}.global.{sum} {vc}, [%rd1+{c_at}], {stride};\n\
         wmma.mma.sync.aligned.{a_order}.{b_order}.{s}.{types} {vc}, {va}, {vb}, {vc};\n\
         mov.u32 %r2, buf;\n\
         wmma.store.d.sync.aligned.{d_order}.{s}.shared.{sum} [%r2], {vc}, {stride};\n\
         bar.warp.sync -1; mov.u32 %r5, 0;\n"
    );
    // Then each lane takes its share of the words of D from shared memory.
    let d_words = stride * if d_order == "row" { m } else { n } * width(sum) / 32;
    let share = d_words.div_ceil(32);
    let mut tail = format!("mad.lo.u32 %r3, %r1, {}, %r2;\n", 4 * share);
    (0..share).for_each(|i| tail += &format!("ld.shared.b32 %o{i}, [%r3+{}];\n", 4 * i));
    let zero = "mad.lo.u32 %r3, %r1, 256, buf;\n".to_string()
        + &(0..64).map(|i| format!("st.shared.b32 [%r3+{}], 0;\n", 4 * i)).collect::<String>();
    let runs = Registers { threads: 32, inputs: 0, outputs: share.max(24), seed: 1 };
    let got = runs.run(&format!("{zero}bar.warp.sync -1;\n{body}{tail}"), &words).unwrap();
    let got: Vec<u8> = got.chunks(share.max(24)).flat_map(|w| &w[..share]).flat_map(|w| w.to_le_bytes()).collect();
    for r in 0..m {
        for column in 0..n {
            let exact = c[r * n + column] + (0..k).map(|i| a[r * k + i] * b[i * n + column]).sum::<i32>();
            let at = width(sum) / 8 * if d_order == "row" { r * stride + column } else { column * stride + r };
            assert_eq!(got[at..at + width(sum) / 8], bits(sum, exact).to_le_bytes()[..width(sum) / 8], "{r} {column}");
        }
    }
}

/// A fragment of f32 sums cast element by element is the fragment of f16 sums.
#[test]
fn sums_have_one_order_in_f16_and_f32() {
    let body = "wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {%o0,%o1,%o2,%o3,%o4,%o5,%o6,%o7}, [%rd1];\n\
                cvt.rn.f16x2.f32 %o0, %o1, %o0; cvt.rn.f16x2.f32 %o1, %o3, %o2; cvt.rn.f16x2.f32 %o2, %o5, %o4;\n\
                cvt.rn.f16x2.f32 %o3, %o7, %o6; mov.u32 %r2, buf;\n\
                wmma.store.d.sync.aligned.row.m16n16k16.shared.f16 [%r2], {%o0,%o1,%o2,%o3};\n\
                bar.warp.sync -1; mad.lo.u32 %r3, %r1, 16, %r2; ld.shared.v4.b32 {%o0,%o1,%o2,%o3}, [%r3];";
    let inputs: Vec<u32> = (0..256).map(|i| (i as f32).to_bits()).collect();
    let got = Registers { threads: 32, inputs: 0, outputs: 8, seed: 1 }.run(body, &inputs).unwrap();
    let got: Vec<u32> = got.chunks(8).flat_map(|w| &w[..4]).flat_map(|w| [w & 0xffff, w >> 16]).collect();
    assert_eq!(got, (0..256).map(|i| bits("f16", i)).collect::<Vec<_>>());
}

/// Matrix `m` is stored by the addresses of lanes `8 m` to `8 m + 7`; a lane has two elements of row `lane / 4`.
#[rstest]
#[case(1, false)]
#[case(2, false)]
#[case(4, false)]
#[case(1, true)]
#[case(2, true)]
#[case(4, true)]
fn stmatrix_stores_what_ldmatrix_loads(#[case] count: usize, #[case] transposed: bool) {
    let trans = if transposed { ".trans" } else { "" };
    let body = format!(
        "mad.lo.u32 %r2, %r1, 16, buf; st.shared.v4.b32 [%r2], {{0, 0, 0, 0}}; bar.warp.sync -1;\n\
         stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {};\n\
         bar.warp.sync -1; ld.shared.v4.b32 {{%o0, %o1, %o2, %o3}}, [%r2];\n\
         ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 {}, [%r2];",
        vector("i", 0, count),
        vector("o", 4, count)
    );
    // Element e of lane l in matrix m.
    let number = |m: usize, l: usize, e: usize| (256 * m + 2 * l + e) as u32;
    let inputs: Vec<u32> =
        (0..32 * count).map(|i| number(i % count, i / count, 0) | number(i % count, i / count, 1) << 16).collect();
    let outputs = 4 + count;
    let got = Registers { threads: 32, inputs: count, outputs, seed: 1 }.run(&body, &inputs).unwrap();
    for m in 0..count {
        for r in 0..8 {
            for c in 0..8 {
                let word = got[(8 * m + r) * outputs + c / 2];
                let (row, column) = if transposed { (c, r) } else { (r, c) };
                assert_eq!(word >> (16 * (c % 2)) & 0xffff, number(m, 4 * row + column / 2, column % 2));
            }
        }
    }
    for (lane, registers) in got.chunks(outputs).enumerate() {
        assert_eq!(registers[4..], inputs[lane * count..][..count]);
    }
}

#[test]
fn part_of_a_warp_is_not_enough() {
    let body = "setp.lt.u32 %p1, %r1, 16; @%p1 mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 \
                {%o0, %o1, %o2, %o3}, {0, 0}, {0}, {0, 0, 0, 0};";
    let error = Registers { threads: 32, inputs: 0, outputs: 4, seed: 1 }.run(body, &[0]).unwrap_err();
    assert_eq!(error.kind, Fault::NotAligned { executing: 0xffff });
}

#[rstest]
#[case("mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32")]
#[case("mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16")]
#[case("mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32")]
#[case("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32")]
fn other_products_are_unknown(#[case] opcode: &str) {
    let error = Registers { threads: 32, inputs: 0, outputs: 1, seed: 1 }.run(&format!("{opcode} {{%o0}};"), &[0]);
    assert_eq!(error.unwrap_err().kind, Fault::UnknownInstruction(opcode.into()));
}

#[test]
fn fragments_have_their_number_of_registers() {
    let body =
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%o0, %o1, %o2, %o3}, {0, 0, 0, 0}, {0}, {0, 0, 0, 0};";
    let error = Registers { threads: 32, inputs: 0, outputs: 4, seed: 1 }.run(body, &[0]).unwrap_err();
    assert!(matches!(error.kind, Fault::BadOperand { .. }), "{error}");
}
