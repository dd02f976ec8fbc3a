//! `tcgen05.ld`, `.st`, `.cp`, `.shift`: what moves where in tensor memory.
mod common;

use ptx_sim::{Launch, Memory, Param, SimError, parse};
use rstest::rstest;

/// Words of a row of the buffers.
const WORDS: usize = 64;

/// Runs a body with 64 columns of tensor memory at `taddr`, a warp's lanes at `row`, and 16 KiB of shared memory at
/// `%r3` that are a copy of `input`. `%rd5` and `%rd9` are the thread's rows of 64 words in `given` and of the result.
fn run(body: &str, input: &[u32], given: &[u32], seed: u64) -> Result<Vec<u32>, SimError> {
    let text = format!(
        ".version 9.0\n.target sm_100a\n.address_size 64\n\
.visible .entry k(.param .u64 input, .param .u64 given, .param .u64 out)\n{{
.reg .pred %p<9>; .reg .b32 %r<40>; .reg .b32 %v<{WORDS}>; .reg .b64 %rd<20>; .reg .b32 taddr, row;
.shared .align 1024 .b8 tiles[16384]; .shared .align 8 .b8 bar[8]; .shared .align 4 .b8 slot[4];
ld.param.u64 %rd1, [input]; ld.param.u64 %rd2, [given]; ld.param.u64 %rd3, [out];
mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mul.wide.u32 %rd4, %r1, {row_bytes};
add.s64 %rd5, %rd2, %rd4; add.s64 %rd9, %rd3, %rd4;
mov.u32 %r3, tiles; mov.u32 %r10, slot; mov.u32 %r11, bar; shl.b32 %r4, %r1, 4;
COPY: setp.ge.u32 %p1, %r4, 16384; @%p1 bra COPIED;
cvt.u64.u32 %rd6, %r4; add.s64 %rd6, %rd1, %rd6; ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd6];
add.s32 %r9, %r3, %r4; st.shared.v4.b32 [%r9], {{%r5, %r6, %r7, %r8}}; add.s32 %r4, %r4, 2048; bra COPY;
COPIED: fence.proxy.async.shared::cta;
setp.ne.u32 %p2, %r2, 0; setp.ne.u32 %p3, %r1, 0; @%p2 bra SET;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64;
@%p3 bra SET; mbarrier.init.shared::cta.b64 [%r11], 1;
SET: tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
ld.shared.b32 taddr, [%r10]; shl.b32 row, %r2, 21; add.s32 row, row, taddr;
and.b32 %r12, %r3, 0x3ffff; shr.u32 %r12, %r12, 4; cvt.u64.u32 %rd8, %r12;
{body}
tcgen05.fence::before_thread_sync; bar.sync 0;
@%p2 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 64;
END: ret;
}}
",
        row_bytes = 4 * WORDS
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let mut alloc = |words: &[u32], count: usize| {
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.resize(4 * count, 0);
        memory.alloc(&bytes)
    };
    let buffers = [alloc(input, 4096), alloc(given, 128 * WORDS), alloc(&[], 128 * WORDS)];
    let params = buffers.map(Param::Buffer).to_vec();
    let launch = Launch { block: [128, 1, 1], params, seed, max_instructions: 1 << 20, ..Launch::new(&module, "k") };
    launch.run(&memory)?;
    Ok(memory.read(buffers[2]).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect())
}

/// `{%v0, %v1, ..}`
fn registers(count: usize) -> String {
    common::vector("v", 0, count)
}

fn global(op: &str, count: usize) -> String {
    let one = |i| match op {
        "ld" => format!("ld.global.b32 %v{i}, [%rd5+{}];\n", 4 * i),
        _ => format!("st.global.b32 [%rd9+{}], %v{i};\n", 4 * i),
    };
    (0..count).map(one).collect()
}

/// All cells from `given`, and the waits and fences behind.
fn fill() -> String {
    format!(
        "{} tcgen05.st.sync.aligned.32x32b.x64.b32 [row], {};\ntcgen05.wait::st.sync.aligned;\n",
        global("ld", 64),
        registers(64)
    )
}

/// All cells to the result.
fn dump() -> String {
    format!(
        "tcgen05.ld.sync.aligned.32x32b.x64.b32 {}, [row];\ntcgen05.wait::ld.sync.aligned;\n{}",
        registers(64),
        global("st", 64)
    )
}

/// Cells that tell where they are.
fn cells() -> Vec<u32> {
    (0..128 * WORDS).map(|i| (((i / WORDS) << 16) | (i % WORDS)) as u32).collect()
}

/// A shape with its registers, and the lane and column of a thread's register (PTX ISA, Matrix fragments for shape ..).
type Shape = (&'static str, usize, fn(usize, usize) -> (usize, usize));

const LANES: Shape = ("32x32b.x8", 8, |t, r| (t, r));
const PAIRS: Shape = ("16x256b.x2", 8, |t, r| (t / 4 + [0, 0, 8, 8][r % 4], r / 4 * 8 + t % 4 * 2 + r % 2));
const SINGLES: Shape = ("16x128b.x4", 8, |t, r| (t / 4 + r % 2 * 8, r / 2 * 4 + t % 4));
const WORDS64: Shape = ("16x64b.x8", 8, |t, r| (t / 4 + t % 2 * 8, r * 2 + t % 4 / 2));

#[rstest]
fn loads_have_shapes(
    #[values(LANES, PAIRS, SINGLES, WORDS64)] shape: Shape,
    #[values((0, 0), (16, 0), (0, 17), (16, 5))] from: (usize, usize),
) {
    let (name, count, place) = shape;
    let (lane, column) = from;
    let sixteen = name.starts_with("16");
    let offset = lane << 16 | column;
    let body = format!(
        "{} tcgen05.ld.sync.aligned.{name}.b32 {}, [row+{offset}];\ntcgen05.wait::ld.sync.aligned;\n{}",
        fill(),
        registers(count),
        global("st", count)
    );
    let result = run(&body, &[], &cells(), 1);
    if lane == 16 && !sixteen {
        assert!(result.unwrap_err().to_string().contains("reaches lanes"));
        return;
    }
    let out = result.unwrap();
    for (thread, register) in (0..128).flat_map(|t| (0..count).map(move |r| (t, r))) {
        let (l, c) = place(thread % 32, register);
        let want = (thread / 32 * 32 + l + lane) << 16 | (c + column);
        assert_eq!(out[thread * WORDS + register], want as u32, "thread {thread}, register {register}");
    }
}

#[rstest]
fn stores_have_shapes(#[values(LANES, PAIRS, SINGLES, WORDS64)] shape: Shape) {
    let (name, count, place) = shape;
    let change: String =
        (0..count).map(|r| format!("shl.b32 %v{r}, %r1, 8; add.s32 %v{r}, %v{r}, {};\n", r + 1)).collect();
    let body = format!(
        "{}{change} tcgen05.st.sync.aligned.{name}.b32 [row+3], {};\ntcgen05.wait::st.sync.aligned;\n{}",
        fill(),
        registers(count),
        dump()
    );
    let out = run(&body, &[], &cells(), 1).unwrap();
    let mut want = cells();
    for (thread, register) in (0..128).flat_map(|t| (0..count).map(move |r| (t, r))) {
        let (l, c) = place(thread % 32, register);
        want[(thread / 32 * 32 + l) * WORDS + c + 3] = (thread << 8 | (register + 1)) as u32;
    }
    assert_eq!(out, want);
}

/// `.16x32bx2`: threads 16 to 31 have the second access, `immHalfSplitoff` columns on.
#[test]
fn halves_are_apart() {
    let body = format!(
        "{} tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {{%v0, %v1}}, [row], 24;\ntcgen05.wait::ld.sync.aligned;\n{}",
        fill(),
        global("st", 2)
    );
    let out = run(&body, &[], &cells(), 1).unwrap();
    for thread in 0..128 {
        let first = ((thread / 32 * 32 + thread % 16) << 16) | (thread % 32 / 16 * 24);
        assert_eq!(out[thread * WORDS..][..2], [first as u32, first as u32 + 1]);
    }
}

/// `.pack::16b` takes the lower halves of adjacent columns, `.unpack::16b` puts them back.
#[test]
fn halves_are_packed() {
    let body = format!(
        "{} tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {{%v0, %v1}}, [row+8];\ntcgen05.wait::ld.sync.aligned;\n\
         tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [row+16], {{%v0, %v1}};\ntcgen05.wait::st.sync.aligned;\n{}\
         tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%v2, %v3, %v4, %v5}}, [row+16];\ntcgen05.wait::ld.sync.aligned;\n{}",
        fill(),
        "",
        global("st", 6)
    );
    let out = run(&body, &[], &cells(), 1).unwrap();
    for row in out.chunks(WORDS) {
        assert_eq!(row[..2], [9 << 16 | 8, 11 << 16 | 10]);
        assert_eq!([row[2], row[3], row[4], row[5]].map(|w| w & 0xffff), [8, 9, 10, 11]);
    }
}

/// The canonical layout without swizzling: core matrices of 8 rows of 16 bytes, 128 bytes from 8 rows to the next 8,
/// and 4096 from 16 bytes to the next 16.
const PLAIN: u64 = 1 << 46 | (128 >> 4) << 32 | (4096 >> 4) << 16;

/// A copy by thread 0 to the first columns, over cells of ones.
fn copied(shape: &str, seed: u64) -> Vec<u32> {
    let body = format!(
        "{} tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; @%p3 bra WAIT;\n\
         add.s64 %rd7, %rd8, {PLAIN}; tcgen05.cp.cta_group::1.{shape} [taddr], %rd7;\n\
         tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd10];\n\
         WAIT: TRY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r11], 0; @!%p5 bra TRY;\n\
         tcgen05.fence::after_thread_sync;\n{}",
        fill(),
        dump()
    );
    let body = format!("cvta.shared.u64 %rd10, bar;\n{body}");
    let input: Vec<u32> = (0..4096).map(|i| 1000 + i).collect();
    run(&body, &input, &[1; 128 * WORDS], seed).unwrap()
}

/// PTX ISA, `tcgen05.cp`: rows of shared memory to lanes.
#[rstest]
#[case("128x256b", 2, |lane| Some(lane))]
#[case("128x128b", 1, |lane| Some(lane))]
#[case("4x256b", 2, |lane| (lane % 32 == 0).then_some(lane / 32))]
#[case("64x128b.warpx2::02_13", 1, |lane| Some(lane % 64))]
#[case("64x128b.warpx2::01_23", 1, |lane| Some(lane / 64 * 32 + lane % 32))]
#[case("32x128b.warpx4", 1, |lane| Some(lane % 32))]
fn copies_have_shapes(#[case] shape: &str, #[case] chunks: usize, #[case] row: fn(usize) -> Option<usize>) {
    let out = copied(shape, 3);
    for lane in 0..128 {
        let want: Vec<u32> = (0..WORDS)
            .map(|column| match row(lane) {
                Some(row) if column < 4 * chunks => (1000 + column / 4 * 1024 + row * 4 + column % 4) as u32,
                _ => 1,
            })
            .collect();
        assert_eq!(out[lane * WORDS..][..WORDS], want, "lane {lane}");
    }
}

/// `tcgen05.shift.down`: rows of 32 bytes move by one lane, the last of 32 lanes stays.
#[test]
fn rows_are_shifted() {
    let body = format!(
        "{} tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync; @%p3 bra WAIT;\n\
         add.s32 %r13, taddr, 0x200004; tcgen05.shift.cta_group::1.down [%r13];\n\
         tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];\n\
         WAIT: TRY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r11], 0; @!%p5 bra TRY;\n\
         tcgen05.fence::after_thread_sync;\n{}",
        fill(),
        dump()
    );
    let out = run(&body, &[], &cells(), 1).unwrap();
    for (i, word) in out.iter().enumerate() {
        let (lane, column) = (i / WORDS, i % WORDS);
        let moved = (32..63).contains(&lane) && (4..12).contains(&column);
        assert_eq!(*word, ((lane + usize::from(moved)) << 16 | column) as u32, "lane {lane}, column {column}");
    }
}

/// A load and a store of one warp are only ordered by `wait`.
#[rstest]
#[case(
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [row];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [row], {%r1};",
    "after the read by the tcgen05.ld"
)]
#[case(
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [row], {%r1};\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [row];",
    "after the write by the tcgen05.st"
)]
#[case(
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [row], {%r1};\ntcgen05.st.sync.aligned.32x32b.x1.b32 [row], {%r1};",
    "after the write by the tcgen05.st"
)]
#[case("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [row];\nadd.s32 %r20, %r1, 1;", "before tcgen05.wait::ld")]
#[case(
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [row];\ntcgen05.wait::st.sync.aligned;\nst.shared.b32 [%r3], %r20;",
    "before tcgen05.wait::ld"
)]
#[case(
    "@%p2 bra L;\ntcgen05.wait::ld.sync.aligned; L: tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [row+64];",
    "column"
)]
fn transfers_need_waits(#[case] text: &str, #[case] problem: &str) {
    let error = run(&format!("{}{text}\n{}", fill(), dump()), &[], &cells(), 1).unwrap_err().to_string();
    assert!(error.contains(problem), "{error}");
}
