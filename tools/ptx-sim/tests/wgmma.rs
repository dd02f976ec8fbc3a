//! `wgmma`: memory layouts as the PTX ISA draws them, against plain loops, and what is an error.
mod common;

use common::{Data, Registers, vector};
use half::{bf16, f16};
use ptx_sim::{Fault, SimError};
use rstest::rstest;

/// How a matrix of `rows` (M or N) by 32 (two steps of k) lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Neighbours differ in k; bytes of the swizzle, 16 for none.
    K(usize),
    /// Neighbours differ in M or N.
    Mn(usize),
}

const K: usize = 32;

impl Layout {
    /// Where an element lies. Rows of the swizzle's bytes; in each, chunks of 16 bytes are exchanged.
    fn place(self, rows: usize, row: usize, k: usize) -> usize {
        let swizzled = |line: usize, byte: usize, width: usize| match width {
            128 => byte ^ (line % 8 * 16),
            64 => byte ^ (line / 2 % 4 * 16),
            32 => byte ^ (line / 4 % 2 * 16),
            _ => byte,
        };
        match self {
            // Core matrices of 8 by 16 bytes.
            Self::K(16) => k / 8 * rows * 16 + row * 16 + 2 * (k % 8),
            Self::Mn(16) => row / 8 * K * 16 + k / 8 * 128 + k % 8 * 16 + 2 * (row % 8),
            Self::K(w) => 2 * k / w * rows * w + row * w + swizzled(row, 2 * k % w, w),
            Self::Mn(w) => 2 * row / w * K * w + k * w + swizzled(k, 2 * row % w, w),
        }
    }

    /// Bytes from the first step's start to the second's.
    fn step(self, rows: usize) -> usize {
        match self {
            Self::K(w) if w >= 64 => 32,
            Self::K(_) => rows * 32,
            Self::Mn(w) => 16 * w,
        }
    }

    /// The descriptor for a start.
    fn descriptor(self, rows: usize, start: usize) -> u64 {
        let (leading, stride) = match self {
            Self::K(16) => (rows * 16, 128),
            Self::Mn(16) => (128, K * 16),
            Self::K(w) => (16, 8 * w),
            Self::Mn(w) => (K * w, 8 * w),
        };
        let swizzle: u64 = match self {
            Self::K(128) | Self::Mn(128) => 1,
            Self::K(64) | Self::Mn(64) => 2,
            Self::K(32) | Self::Mn(32) => 3,
            _ => 0,
        };
        swizzle << 62 | (stride as u64 >> 4) << 32 | (leading as u64 >> 4) << 16 | start as u64 >> 4
    }

    fn transposed(self) -> usize {
        usize::from(matches!(self, Self::Mn(_)))
    }
}

/// Copies the words behind the registers' in the buffer to shared memory, visible to `wgmma`.
fn fill(threads: u32, registers: usize, words: usize) -> String {
    format!(
        "mov.u32 %r2, %r1;\nFILL: setp.ge.u32 %p1, %r2, {words}; @%p1 bra FILLED;\n\
         mul.wide.u32 %rd5, %r2, 4; add.s64 %rd5, %rd5, %rd1; ld.global.b32 %r3, [%rd5+{}];\n\
         mad.lo.u32 %r4, %r2, 4, buf; st.shared.b32 [%r4], %r3; add.u32 %r2, %r2, {threads}; bra FILL;\n\
         FILLED: fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p2, 0, 0; setp.ne.u32 %p3, 0, 0;\n",
        4 * registers * threads as usize
    )
}

/// Row and column of D's element `e` of a thread.
fn sums(thread: usize, e: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + 8 * (e / 2 % 2), 8 * (e / 4) + 2 * (lane % 4) + e % 2)
}

#[rstest]
fn products_of_tiles(
    #[values(Layout::K(128), Layout::K(64), Layout::K(32), Layout::K(16), Layout::Mn(128), Layout::Mn(16))]
    a_layout: Layout,
    #[values(
        Layout::K(128),
        Layout::K(64),
        Layout::K(32),
        Layout::K(16),
        Layout::Mn(128),
        Layout::Mn(64),
        Layout::Mn(32),
        Layout::Mn(16)
    )]
    b_layout: Layout,
    #[values(64, 24)] n: usize,
    #[values(false, true)] a_in_registers: bool,
    #[values(1, 2, 3)] seed: u64,
) {
    if a_in_registers && a_layout != Layout::K(128) {
        return;
    }
    let mut d = Data(seed);
    let mut matrix = |n: usize| (0..n).map(|_| d.whole()).collect::<Vec<_>>();
    let (a, b, c) = (matrix(64 * K), matrix(n * K), matrix(64 * n));
    let element = |x: i32| bf16::from_f32(x as f32).to_bits();
    // B behind A, both at multiples of 1024.
    let b_at = 8192;
    let mut image = vec![0u8; b_at + 8192];
    for (base, layout, rows, of) in [(0, a_layout, 64, &a), (b_at, b_layout, n, &b)] {
        for (row, k) in (0..rows).flat_map(|row| (0..K).map(move |k| (row, k))) {
            let at = base + layout.place(rows, row, k);
            image[at..at + 2].copy_from_slice(&element(of[row * K + k]).to_le_bytes());
        }
    }
    let count = n / 2;
    let mut inputs = Vec::new();
    for thread in 0..128 {
        inputs.extend((0..count).map(|e| (c[sums(thread, e).0 * n + sums(thread, e).1] as f32).to_bits()));
        for (step, i) in (0..8).map(|i| (i / 4, i % 4)) {
            // A register has two neighbours of a row, its quad eight; then rows 8 on, then the next eight.
            let row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 2);
            let k = 16 * step + 2 * (thread % 4) + 8 * (i / 2);
            inputs.push(u32::from(element(a[row * K + k])) | u32::from(element(a[row * K + k + 1])) << 16);
        }
    }
    let registers = count + 8;
    let words = image.len() / 4;
    inputs.extend(image.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())));
    let mut body = fill(128, registers, words) + "wgmma.fence.sync.aligned;\n";
    for step in 0..2 {
        let b = b_layout.descriptor(n, b_at + step * b_layout.step(n));
        let d = vector("i", 0, count);
        body += &format!("mov.b64 %rd7, {b};\n");
        let (from, flags) = if a_in_registers {
            (vector("i", count + 4 * step, 4), b_layout.transposed().to_string())
        } else {
            let a = a_layout.descriptor(64, step * a_layout.step(64));
            body += &format!("mov.b64 %rd6, {a};\n");
            ("%rd6".into(), format!("{}, {}", a_layout.transposed(), b_layout.transposed()))
        };
        body += &format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {d}, {from}, %rd7, %p2, 1, -1, {flags};\n\
             mov.b64 %rd7, 0;\nmov.b64 %rd6, 0;\nwgmma.commit_group.sync.aligned;\n"
        );
    }
    body += "wgmma.wait_group.sync.aligned 0;\n";
    (0..count).for_each(|e| body += &format!("mov.b32 %o{e}, %i{e};\n"));
    let runs = Registers { threads: 128, inputs: registers, outputs: count, seed };
    let (got, stats) = runs.run_with_stats(&body, &inputs).unwrap();
    for thread in 0..128 {
        for e in 0..count {
            let (row, column) = sums(thread, e);
            let product: i32 = (0..K).map(|k| a[row * K + k] * b[column * K + k]).sum();
            let got = f32::from_bits(got[thread * count + e]);
            assert_eq!(got, (c[row * n + column] - product) as f32, "{row} {column}");
        }
    }
    assert_eq!(stats.matrix_flops, (2 * 64 * n * K) as u64);
}

/// Sums in f16 are pairs; without scale-d they start at zero whatever D holds.
#[test]
fn sums_in_f16() {
    let row = |r: usize| f16::from_f32(r as f32).to_bits();
    // A[r, 0] = r, B[n, 0] = n + 1, all else zero, without swizzle.
    let mut image = vec![0u8; 4096];
    for r in 0..64 {
        image[Layout::K(16).place(64, r, 0)..][..2].copy_from_slice(&row(r).to_le_bytes());
    }
    for n in 0..8 {
        image[2048 + Layout::K(16).place(8, n, 0)..][..2].copy_from_slice(&row(n + 1).to_le_bytes());
    }
    let mut inputs = vec![u32::MAX; 256];
    inputs.extend(image.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())));
    let (a, b) = (Layout::K(16).descriptor(64, 0), Layout::K(16).descriptor(8, 2048));
    let body = fill(128, 2, 1024)
        + &format!(
            "wgmma.fence.sync.aligned; mov.b64 %rd6, {a}; mov.b64 %rd7, {b};\n\
             wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {{%i0, %i1}}, %rd6, %rd7, %p3, 1, 1, 0, 0;\n\
             wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.b32 %o0, %i0; mov.b32 %o1, %i1;"
        );
    let got = Registers { threads: 128, inputs: 2, outputs: 2, seed: 1 }.run(&body, &inputs).unwrap();
    for thread in 0..128 {
        for e in 0..4 {
            let (r, n) = sums(thread, e);
            assert_eq!(got[2 * thread + e / 2] >> (16 * (e % 2)) & 0xffff, u32::from(row(r * (n + 1))));
        }
    }
}

/// A pattern that starts at 256 bytes behind a multiple of 1024 says so in its base offset.
#[test]
fn patterns_start_at_the_base_offset() {
    let mut image = vec![0u8; 16384];
    let one = bf16::from_f32(1.0).to_bits().to_le_bytes();
    for r in 0..64 {
        image[256 + Layout::K(128).place(64, r, 5)..][..2].copy_from_slice(&one);
        if r < 8 {
            let value = bf16::from_f32(r as f32).to_bits().to_le_bytes();
            image[12288 + Layout::K(128).place(8, r, 5)..][..2].copy_from_slice(&value);
        }
    }
    let mut inputs = vec![0; 4 * 128];
    inputs.extend(image.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())));
    let (a, b) = (Layout::K(128).descriptor(64, 256) | 2 << 49, Layout::K(128).descriptor(8, 12288));
    let got = run(&product(a, b), 128, &inputs, 4096).unwrap();
    (0..128).for_each(|t| (0..4).for_each(|e| assert_eq!(f32::from_bits(got[4 * t + e]), sums(t, e).1 as f32)));
}

const D: &str = "{%i0, %i1, %i2, %i3}";
const FENCE: &str = "wgmma.fence.sync.aligned;\n";
const COMMIT: &str = "wgmma.commit_group.sync.aligned;\n";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;\n";
const MMA: &str =
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%i0, %i1, %i2, %i3}, %rd6, %rd7, %p2, 1, 1, 0, 0;\n";
const MMA_A: &str = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%i0, %i1, %i2, %i3}, {%r20, %r21, %r22, %r23}, \
                     %rd7, %p2, 1, 1, 0;\n";
const GIVE: &str = "mov.b32 %o0, %i0; mov.b32 %o1, %i1; mov.b32 %o2, %i2; mov.b32 %o3, %i3;\n";

fn product(a: u64, b: u64) -> String {
    format!("mov.b64 %rd6, {a}; mov.b64 %rd7, {b};\n{FENCE}{MMA}{COMMIT}{WAIT}{GIVE}")
}

/// Four accumulators in `%i0` to `%i3`, `words` words of shared memory.
fn run(body: &str, threads: u32, inputs: &[u32], words: usize) -> Result<Vec<u32>, SimError> {
    let body = fill(threads, 4, words) + body;
    Registers { threads, inputs: 4, outputs: 4, seed: 1 }.run(&body, inputs)
}

/// A and B of zeros.
fn zeros(body: &str, threads: u32) -> Result<Vec<u32>, SimError> {
    let setup = format!(
        "mov.b64 %rd6, {}; mov.b64 %rd7, {};\n",
        Layout::K(16).descriptor(64, 0),
        Layout::K(16).descriptor(8, 2048)
    );
    run(&(setup + body), threads, &vec![0; 4 * threads as usize + 1024], 1024)
}

fn problem(body: &str) -> String {
    match zeros(body, 128).unwrap_err().kind {
        Fault::Wgmma { problem } => problem,
        other => panic!("{other}"),
    }
}

#[test]
fn registers_are_not_touched_under_way() {
    for body in [
        format!("{FENCE}{MMA}{COMMIT}{GIVE}{WAIT}"),
        // Not committed: not waited for.
        format!("{FENCE}{MMA}{WAIT}{GIVE}"),
        // One group too few.
        format!("{FENCE}{MMA}{COMMIT}wgmma.wait_group.sync.aligned 1;\n{GIVE}"),
        format!("{FENCE}{MMA}{COMMIT}mov.b32 %i3, 0;\n{WAIT}"),
        format!("{FENCE}{MMA_A}{COMMIT}mov.b32 %r23, 0;\n{WAIT}"),
    ] {
        assert!(problem(&body).contains("before a wait_group"), "{body}");
    }
    // Descriptors and predicates are read at once.
    let body = format!("{FENCE}{MMA}mov.b64 %rd6, 0; mov.b64 %rd7, 0; setp.ne.b32 %p2, 0, 0;\n{COMMIT}{WAIT}{GIVE}");
    zeros(&body, 128).unwrap();
}

#[test]
fn a_fence_comes_between_accesses_and_products() {
    for body in [
        format!("{MMA}{COMMIT}{WAIT}{GIVE}"),
        format!("{FENCE}mov.b32 %i2, 0;\n{MMA}"),
        format!("{FENCE}{MMA}{COMMIT}{WAIT}{GIVE}{MMA}"),
        format!("{FENCE}mov.b32 %r22, 0;\n{MMA_A}"),
        // Another shape has another order.
        format!(
            "{FENCE}{MMA}{COMMIT}{WAIT}\
             wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{%i0, %i1, %i2, %i3, %r20, %r21, %r22, %r23}}, \
             %rd6, %rd7, %p2, 1, 1, 0, 0;"
        ),
    ] {
        assert!(problem(&body).contains("no wgmma.fence since the last access"), "{body}");
    }
    zeros(&format!("{FENCE}{MMA}{MMA}{COMMIT}{MMA}{COMMIT}{FENCE}{MMA_A}{COMMIT}{WAIT}{MMA}{COMMIT}{WAIT}{GIVE}"), 128)
        .unwrap();
}

/// After its wait a warp may write to its own rows of A and to B. To the rows of another warp it may when that one has
/// waited, too.
#[rstest]
#[case(Layout::K(16), 3)]
#[case(Layout::Mn(16), 5)]
fn a_wait_tells_of_the_warps_own_rows(#[case] layout: Layout, #[case] shift: u32) {
    let write = |to: &str, order: &str| {
        let mma = MMA.replace("1, 1, 0, 0;", &format!("1, 1, {}, 0;", layout.transposed()));
        let (a, b) = (layout.descriptor(64, 0), Layout::K(16).descriptor(8, 4096));
        let body = format!(
            "mov.b64 %rd6, {a}; mov.b64 %rd7, {b}; mov.b32 %r10, buf; setp.eq.u32 %p4, %r1, 0;\n\
             {FENCE}{mma}{COMMIT}{WAIT}{order}{to} st.shared.b32 [%r10], 0;\n{GIVE}"
        );
        run(&body, 128, &vec![0; 4 * 128 + 2048], 2048)
    };
    let of = |threads: &str| format!("{threads} shl.b32 %r9, %r9, {shift}; add.s32 %r10, %r10, %r9;");
    let (own, other) = (of("mov.b32 %r9, %r1;"), of("xor.b32 %r9, %r1, 32;"));
    write(&own, "").unwrap();
    write("add.s32 %r10, %r10, 4096; @%p4", "").unwrap();
    write(&other, "bar.sync 0;\n").unwrap();
    let error = write(&other, "").unwrap_err();
    assert!(matches!(&error.kind, Fault::Race { earlier, .. } if earlier.contains("the read by wgmma")), "{error}");
}

#[test]
fn the_four_warps_agree() {
    let differ = format!("setp.lt.u32 %p4, %r1, 96; @%p4 mov.b64 %rd6, 1;\n{FENCE}{MMA}{COMMIT}{WAIT}");
    assert!(problem(&differ).contains("the warps of the warpgroup differ"));
    let lanes = format!("and.b32 %r9, %r1, 1; setp.eq.u32 %p2, %r9, 0;\n{FENCE}{MMA}");
    assert!(problem(&lanes).contains("scale-d differs"));
    let lanes = format!("cvt.u64.u32 %rd7, %r1;\n{FENCE}{MMA}");
    assert!(problem(&lanes).contains("the descriptor of B differs"));
    // The last warp stays away: the others wait for it.
    let error = zeros(&format!("setp.ge.u32 %p4, %r1, 96; @%p4 bra END;\n{FENCE}{MMA}{COMMIT}{WAIT}END:\n"), 128);
    let Fault::Deadlock { positions } = error.unwrap_err().kind else { panic!() };
    assert!(positions.len() == 3 && positions[0].contains("waits for the other warps of warpgroup 0"), "{positions:?}");
    let error = zeros(&format!("{FENCE}{MMA}"), 96).unwrap_err();
    assert!(error.to_string().contains("fewer than four warps"), "{error}");
    let error = zeros(&format!("setp.lt.u32 %p4, %r1, 9; @%p4 {FENCE}"), 128).unwrap_err();
    assert_eq!(error.kind, Fault::NotAligned { executing: 0x1ff });
}

#[rstest]
#[case(1 << 14, "reserved bits 0x4000")]
#[case(1 << 46, "reserved bits 0x400000000000")]
#[case(1 << 49, "a base offset of 1 without a swizzle")]
fn descriptors_have_a_meaning(#[case] bits: u64, #[case] says: &str) {
    let error = zeros(&product(Layout::K(16).descriptor(64, 0) | bits, 0), 128).unwrap_err();
    assert!(matches!(&error.kind, Fault::Descriptor { problem, .. } if problem.contains(says)), "{error}");
}

#[rstest]
#[case("m64n8k32.f32.bf16.bf16")]
#[case("m64n12k16.f32.bf16.bf16")]
#[case("m64n264k16.f32.bf16.bf16")]
#[case("m64n8k16.f16.bf16.bf16")]
#[case("m64n40k32.s32.s8.s8")]
fn other_products_are_unknown(#[case] types: &str) {
    let opcode = format!("wgmma.mma_async.sync.aligned.{types}");
    let error = zeros(&format!("{opcode} {D}, %rd6, %rd7, %p2, 1, 1, 0, 0;"), 128).unwrap_err();
    assert_eq!(error.kind, Fault::UnknownInstruction(opcode));
}
