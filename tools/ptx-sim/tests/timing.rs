//! The estimate of time, on kernels whose time can be worked out by hand. Start-up is taken off as the difference of two
//! lengths, but where a bound is all that there is to say.
use ptx_sim::timing::{H200, Rates};
use ptx_sim::{Launch, Memory, Param, Stats, parse};
use rstest::rstest;

/// Bytes of the input.
const INPUT: usize = 1 << 20;

/// Runs a body of a kernel with `%rd1` the input.
fn run(threads: u32, body: &str, rates: Option<&Rates>, seed: u64) -> Stats {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 in)\n{{\n\
         .reg .pred %p<9>; .reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %rd<40>; .reg .f32 %d<128>; .reg .f32 %e<128>;\n\
         .shared .align 1024 .b8 buf[65536]; .shared .align 8 .b64 bars[8];\n\
         ld.param.u64 %rd1, [in]; mov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let params = vec![Param::Buffer(memory.alloc(&vec![0; INPUT]))];
    let launch =
        Launch { block: [threads, 1, 1], params, seed, rates, initialised_shared: true, ..Launch::new(&module, "k") };
    launch.run(&memory).unwrap()
}

/// Cycles of `n` more iterations of a loop.
fn iterations(threads: u32, rates: &Rates, (start, body): (&str, &str), n: u64) -> f64 {
    let of = |count: u64| {
        let head =
            format!("{start} mov.u32 %r2, 0;\nLOOP: {body}\nadd.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, {count};\n");
        run(threads, &format!("{head} @%p1 bra LOOP;"), Some(rates), 1).cycles as f64
    };
    of(16 + n) - of(16)
}

fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 0.05 * expected, "{found} cycles, expected {expected}");
}

const MANY: u64 = 32;

#[test]
fn dependent_arithmetic_takes_its_latency() {
    let body = "fma.rn.f32 %f1, %f1, %f1, %f1;".repeat(100);
    assert_close(
        iterations(32, &H200, ("mov.f32 %f1, 0f3F800000;", &body), MANY),
        MANY as f64 * 100.0 * H200.latency.arithmetic,
    );
}

/// Four schedulers issue one instruction each in a cycle.
#[rstest]
#[case(128, 1.0)]
#[case(512, 4.0)]
fn independent_arithmetic_takes_its_issue(#[case] threads: u32, #[case] warps: f64) {
    let body: String = (0..400).map(|i| format!("fma.rn.f32 %f{}, %f2, %f2, %f2;", 3 + i % 30)).collect();
    assert_close(iterations(threads, &H200, ("mov.f32 %f2, 0f3F800000;", &body), MANY), MANY as f64 * 400.0 * warps);
}

#[test]
fn exponentials_take_their_unit() {
    let body: String = (0..100).map(|i| format!("ex2.approx.ftz.f32 %f{}, %f2;", 3 + i % 30)).collect();
    let expected = MANY as f64 * 100.0 * 128.0 / H200.lanes.special;
    assert_close(iterations(128, &H200, ("mov.f32 %f2, 0f3F800000;", &body), MANY), expected);
}

/// A lane every 128 bytes: all lanes meet in one bank.
#[rstest]
#[case(4, 1.0)]
#[case(128, 32.0)]
fn stores_take_shared_memory(#[case] stride: u32, #[case] cycles: f64) {
    let start = format!("mul.lo.u32 %r3, %r1, {stride}; and.b32 %r3, %r3, 4095; add.u32 %r3, %r3, buf;");
    let body = "st.shared.b32 [%r3], %r1;".repeat(400);
    let expected = MANY as f64 * 400.0 * cycles;
    assert_close(iterations(32, &H200, (&start, &body), MANY), expected);
}

/// Independent loads of new lines take the bandwidth, dependent ones the latency.
#[test]
fn loads_take_the_bandwidth_or_the_latency() {
    let rates = Rates { load_bytes: 8.0, ..H200 };
    let start = "mul.wide.u32 %rd2, %r1, 16; add.s64 %rd2, %rd2, %rd1;";
    let load = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2]; add.s64 %rd2, %rd2, 2048;";
    assert_close(iterations(128, &rates, (start, load), 200), 200.0 * 2048.0 / 8.0);
    let chase = "ld.global.u64 %rd3, [%rd2]; add.s64 %rd2, %rd2, %rd3; add.s64 %rd2, %rd2, 2048;";
    // An addition in 64 bits each.
    let each = H200.latency.memory + 2.0 * H200.latency.arithmetic;
    assert_close(iterations(32, &H200, ("mov.u64 %rd2, %rd1;", chase), 200), 200.0 * each);
}

/// A copy of 4096 bytes arrives for each iteration of a chain, two under way at a time: the slower of the two counts.
#[rstest]
#[case(4.0, 10)]
#[case(64.0, 400)]
fn a_ring_takes_the_slower_side(#[case] load_bytes: f64, #[case] chain: usize) {
    let latency = ptx_sim::timing::Latency { memory: 0.0, bulk: 0.0, ..H200.latency };
    let rates = Rates { load_bytes, latency, ..H200 };
    let of = |count: u32| {
        let body = format!(
            "setp.ne.u32 %p2, %r1, 0; @%p2 bra READY;\n\
             mbarrier.init.shared::cta.b64 [bars], 1; mbarrier.init.shared::cta.b64 [bars+8], 1;\n\
             mbarrier.init.shared::cta.b64 [bars+16], 32; mbarrier.init.shared::cta.b64 [bars+24], 32;\n\
             fence.mbarrier_init.release.cluster; READY: bar.sync 0;\n\
             shr.u32 %r9, %r1, 5; setp.ne.u32 %p3, %r9, 0; mov.u32 %r2, 0; @%p3 bra CONSUME;\n\
             setp.ne.u32 %p4, %r1, 0; @%p4 bra DONE;\n\
             PRODUCE: and.b32 %r3, %r2, 1; shl.b32 %r4, %r3, 3; add.u32 %r4, %r4, bars; shl.b32 %r5, %r3, 12;\n\
             add.u32 %r5, %r5, buf; shr.u32 %r6, %r2, 1; and.b32 %r6, %r6, 1; xor.b32 %r6, %r6, 1; add.u32 %r7, %r4, 16;\n\
             EMPTY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r7], %r6; @!%p5 bra EMPTY;\n\
             mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 4096;\n\
             cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1], 4096, [%r4];\n\
             add.u32 %r2, %r2, 1; setp.lt.u32 %p6, %r2, {count}; @%p6 bra PRODUCE; bra DONE;\n\
             CONSUME: and.b32 %r3, %r2, 1; shl.b32 %r4, %r3, 3; add.u32 %r4, %r4, bars; shr.u32 %r6, %r2, 1;\n\
             and.b32 %r6, %r6, 1; add.u32 %r7, %r4, 16;\n\
             FULL: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], %r6; @!%p5 bra FULL;\n{}\n\
             setp.gt.f32 %p7, %f1, 0f00000000; @!%p7 bra SKIP; add.u32 %r8, %r8, 1; SKIP:\n\
             mbarrier.arrive.shared::cta.b64 _, [%r7];\n\
             add.u32 %r2, %r2, 1; setp.lt.u32 %p6, %r2, {count}; @%p6 bra CONSUME;\nDONE:",
            "fma.rn.f32 %f1, %f1, %f1, %f1;".repeat(chain)
        );
        run(64, &body, Some(&rates), 1).cycles as f64
    };
    let (copy, work) = (4096.0 / load_bytes, chain as f64 * rates.latency.arithmetic);
    let found = (of(66) - of(16)) / 50.0;
    // Waits, arrivals and the iteration itself come on top of the work, not of the copies.
    assert!(
        found >= copy.max(work) * 0.99 && found <= copy.max(work + 120.0) * 1.02,
        "{found}: copy {copy}, work {work}"
    );
}

/// Products one after the other: their multiplications, or the bytes of shared memory. Two warpgroups share the tensor cores.
#[rstest]
#[case(128, 128, 128.0)]
#[case(256, 128, 256.0)]
#[case(128, 8, 20.0)]
fn products_take_the_tensor_cores(#[case] threads: u32, #[case] registers: usize, #[case] cycles: f64) {
    let names: Vec<String> = (0..registers.max(4)).map(|i| format!("%d{i}")).collect();
    let n = registers * 2;
    let product = format!(
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{}}}, %rd5, %rd5, %p2, 1, 1, 0, 0;",
        names[..registers].join(", ")
    );
    let body = format!(
        "wgmma.fence.sync.aligned; {} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        product.repeat(40)
    );
    // No swizzle; where rows lie is no matter.
    let start = format!(
        "mov.u64 %rd5, {}; setp.eq.u32 %p2, %r1, %r1; fence.proxy.async.shared::cta; bar.sync 0;",
        (128u64 >> 4) << 32 | (128u64 >> 4) << 16 | 64
    );
    let found = iterations(threads, &H200, (&start, &body), 4) / (4.0 * 40.0);
    assert!(found >= cycles && found <= cycles * 1.15, "{found} cycles, expected {cycles}");
}

/// What comes first by the estimate is done first, whatever the seed; without rates there is no estimate.
#[test]
fn the_seed_changes_nothing() {
    let body = "mul.wide.u32 %rd2, %r1, 64; add.s64 %rd2, %rd2, %rd1; ld.global.f32 %f1, [%rd2]; shl.b32 %r3, %r1, 2;\n\
                add.u32 %r3, %r3, buf; st.shared.f32 [%r3], %f1; bar.sync 0; ld.shared.f32 %f2, [buf];";
    let first = run(256, body, Some(&H200), 1);
    assert!(first.cycles as f64 > H200.latency.memory && first.loaded_bytes == 256 * 32);
    for seed in 2..8 {
        assert_eq!(run(256, body, Some(&H200), seed), first);
    }
    assert_eq!(run(256, body, None, 1).cycles, 0);
}
