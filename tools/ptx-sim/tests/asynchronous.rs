//! The order of accesses to shared memory, mbarriers, bulk copies, clusters: what works, and what a missing fence, wait,
//! arrival or barrier is reported as.
use ptx_sim::{Fault, Launch, Memory, Param, SimError, TensorElem, TensorMap, TensorSwizzle, parse};
use rstest::rstest;

/// A launch of a body. `%rd1` is the output of 4096 words, `%rd9` the address of the tensor map, `%r1` the thread, `buf`
/// 8 KB, `bar` 4 mbarriers, `%r2` the first of them and `%r3` the buffer.
struct Run {
    threads: u32,
    ctas: u32,
    seed: u64,
    map: TensorMap,
    registers: Option<u32>,
}

const TENSOR: u64 = 0x4_0000_0000;

/// A matrix of 24 rows of 64 words, `100 * row + column`, in boxes of 8 rows of 32 words.
fn matrix() -> TensorMap {
    TensorMap {
        elem: TensorElem::Int(4),
        address: TENSOR,
        dims: vec![64, 24],
        strides: vec![256],
        boxes: vec![32, 8],
        steps: vec![1, 1],
        swizzle: TensorSwizzle::None,
        fill_nan: false,
    }
}

fn cell(row: i64, column: i64) -> u32 {
    if (0..24).contains(&row) && (0..64).contains(&column) { (100 * row + column) as u32 } else { 0 }
}

impl Default for Run {
    fn default() -> Self {
        Self { threads: 32, ctas: 1, seed: 1, map: matrix(), registers: None }
    }
}

impl Run {
    /// The output and the matrix afterwards.
    fn both(&self, body: &str) -> Result<(Vec<u32>, Vec<u32>), SimError> {
        let registers = self.registers.map_or(String::new(), |count| format!(".maxnreg {count}\n"));
        let text = format!(
            ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out, .param .align 64 .b8 map[128])\n{registers}{{\n\
             .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<9>;\n\
             .shared .align 1024 .b8 buf[8192]; .shared .align 8 .b8 bar[32];\n\
             ld.param.u64 %rd1, [out]; mov.b64 %rd8, map; cvta.param.u64 %rd9, %rd8;\n\
             mov.u32 %r1, %tid.x; mov.b32 %r2, bar; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0;\n\
             mov.u32 %r39, %cluster_ctarank;\n{body}\nret;\n}}\n"
        );
        let module = parse(&text).unwrap();
        let mut memory = Memory::new();
        let words = |values: Vec<u32>| values.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
        let cells = (0..24 * 64).map(|i| cell(i / 64, i % 64)).collect();
        let tensor = memory.alloc_at(TENSOR, &words(cells)).unwrap();
        let out = memory.alloc(&vec![0; 4 * 4096]);
        let params = vec![Param::Buffer(out), Param::Bytes(self.map.encode().unwrap().to_vec())];
        let launch = Launch {
            grid: [self.ctas, 1, 1],
            block: [self.threads, 1, 1],
            cluster: [self.ctas, 1, 1],
            params,
            seed: self.seed,
            max_instructions: 100_000,
            ..Launch::new(&module, "k")
        };
        launch.run(&memory)?;
        let read =
            |buffer| memory.read(buffer).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
        Ok((read(out), read(tensor)))
    }

    fn run(&self, body: &str) -> Result<Vec<u32>, SimError> {
        self.both(body).map(|(out, _)| out)
    }

    fn fault(&self, body: &str) -> Fault {
        self.run(body).expect_err("a fault").kind
    }
}

const SEEDS: [u64; 6] = [1, 2, 3, 4, 5, 6];
const INIT: &str = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;";
const WAIT: &str = "TRY: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY;";
const LOAD: &str = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes";

/// Loads the box at column 16 and a row, and gives out the words that each thread finds, 8 of each.
fn load(row: i32, bytes: u32, wait: &str) -> String {
    format!(
        "{INIT} @!%p1 bra READ; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r2], {bytes};\n\
         {LOAD} [%r3], [%rd9, {{16, {row}}}], [%r2];\nREAD: {wait}\n\
         shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; cvt.u64.u32 %rd3, %r5; add.s64 %rd3, %rd1, %rd3;\n{}",
        (0..8)
            .map(|i| format!("ld.shared.u32 %r6, [%r4+{}]; st.global.u32 [%rd3+{}], %r6;\n", 128 * i, 128 * i))
            .collect::<String>()
    )
}

#[rstest]
fn boxes_come_whole_and_outside_is_zero(
    #[values(0, 20, -3)] row: i32,
    #[values(TensorSwizzle::None, TensorSwizzle::Bytes128)] swizzle: TensorSwizzle,
) {
    for seed in SEEDS {
        let out =
            Run { seed, map: TensorMap { swizzle, ..matrix() }, ..Run::default() }.run(&load(row, 1024, WAIT)).unwrap();
        for at in 0..256 {
            let (r, mut c) = (at / 32, at % 32);
            if swizzle == TensorSwizzle::Bytes128 {
                c ^= 4 * (r % 8);
            }
            assert_eq!(out[at as usize], cell(i64::from(row) + r, 16 + c), "{at}");
        }
    }
}

#[rstest]
#[case(TensorSwizzle::Bytes32, 8, 2)]
#[case(TensorSwizzle::Bytes64, 16, 4)]
fn narrow_swizzles(#[case] swizzle: TensorSwizzle, #[case] columns: u32, #[case] units: i64) {
    let map = TensorMap { swizzle, boxes: vec![columns, 8], ..matrix() };
    // Words beyond the box were never written.
    let fault = Run { map: map.clone(), ..Run::default() }.fault(&load(0, 32 * columns, WAIT));
    assert!(matches!(fault, Fault::Uninitialised { .. }), "{fault}");
    let rows = 8 * columns / 32;
    let body = load(0, 32 * columns, WAIT);
    let cut = body.match_indices("ld.shared.u32 %r6").nth(rows as usize).map_or(body.len(), |(at, _)| at);
    let out = Run { map, ..Run::default() }.run(&body[..cut]).unwrap();
    for at in 0..i64::from(8 * columns) {
        let (r, c) = (at / i64::from(columns), at % i64::from(columns));
        let line = at * 4 / 128;
        let c = c ^ (4 * ((line % 8) & (units - 1)));
        assert_eq!(out[at as usize], cell(r, 16 + c), "{at}");
    }
}

#[test]
fn a_missing_wait_is_a_race_on_every_seed() {
    for seed in SEEDS {
        let fault = Run { seed, ..Run::default() }.fault(&load(0, 1024, ""));
        assert!(
            matches!(&fault, Fault::Race { earlier, .. } if earlier.contains("a bulk copy that warp 0 issued")),
            "{fault}"
        );
    }
}

#[rstest]
#[case(1008, "-16 bytes")]
#[case(2048, "1024 bytes")]
fn wrong_transaction_bytes_are_a_deadlock(#[case] bytes: u32, #[case] left: &str) {
    let Fault::Deadlock { positions } = Run::default().fault(&load(0, bytes, WAIT)) else { panic!("no deadlock") };
    assert!(positions[0].contains("phase 0") && positions[0].contains(left), "{positions:?}");
}

#[test]
fn a_missing_arrival_is_a_deadlock() {
    let body = load(0, 1024, WAIT).replace(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _,",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
    );
    let Fault::Deadlock { positions } = Run::default().fault(&body) else { panic!("no deadlock") };
    assert!(positions[0].contains("1 of 1 arrivals pending, 0 bytes"), "{positions:?}");
}

/// Also where it happens to be over in time.
#[test]
fn a_copy_that_nobody_waits_for_is_an_error() {
    let load = load(0, 1024, "").split("shl.b32").next().unwrap().to_string();
    let store = "shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; st.shared.u32 [%r4], %r1; fence.proxy.async.shared::cta; \
                 bar.sync 0; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128; \
                 @%p1 cp.async.bulk.commit_group;";
    for seed in SEEDS {
        let run = Run { seed, ..Run::default() };
        for body in [&load, store] {
            assert_eq!(run.fault(body), Fault::UnfinishedCopy, "{body}");
        }
        run.run(&format!("{store} cp.async.bulk.wait_group.read 0;")).unwrap();
    }
}

#[test]
fn the_async_proxy_must_know_an_mbarrier() {
    let body = load(0, 1024, WAIT).replace("@%p1 fence.mbarrier_init.release.cluster;", "");
    let fault = Run::default().fault(&body);
    assert!(matches!(&fault, Fault::Mbarrier { problem, .. } if problem.contains("fence.mbarrier_init")), "{fault}");
    let fenced = body.replacen("bar.sync 0;", "@%p1 fence.proxy.async.shared::cta; bar.sync 0;", 1);
    Run::default().run(&fenced).unwrap();
    let unordered = body.replacen("bar.sync 0;", "", 1);
    let fault = Run { threads: 64, ..Run::default() }.fault(&unordered);
    assert!(matches!(fault, Fault::Mbarrier { .. }), "{fault}");
}

/// A generic write that a bulk copy overwrites, or reads, needs a proxy fence of its writer, or of the issuer.
#[rstest]
#[case("", "", false)]
#[case("fence.proxy.async.shared::cta;", "", true)]
#[case("", "fence.proxy.async;", true)]
fn generic_writes_before_the_async_proxy(
    #[case] writer: &str,
    #[case] issuer: &str,
    #[case] works: bool,
    #[values(true, false)] reads: bool,
) {
    let fill = (0..8).map(|i| format!("st.shared.u32 [%r4+{}], %r1;", 128 * i)).collect::<String>();
    let copy = if reads {
        "@%p3 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd9, {0, 0}], [%r3];\n\
         cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
            .to_string()
    } else {
        format!(
            "@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024; @%p3 {LOAD} [%r3], [%rd9, {{0, 0}}], [%r2]; {WAIT}"
        )
    };
    // Warp 1 writes, warp 0 issues.
    let body = format!(
        "{INIT} setp.ge.u32 %p4, %r1, 32; @!%p4 bra ISSUE; and.b32 %r5, %r1, 31; shl.b32 %r5, %r5, 2; add.s32 %r4, %r3, %r5;\n\
         {fill} {writer} bar.sync 1, 64; bra END; ISSUE: bar.sync 1, 64; {issuer} setp.eq.u32 %p3, %r1, 0; {copy} END:"
    );
    let result = Run { threads: 64, ..Run::default() }.both(&body);
    match (works, result) {
        (true, Ok((_, tensor))) => assert_eq!(tensor[64 + 5], if reads { 37 } else { 105 }),
        (false, Err(error)) => assert!(matches!(error.kind, Fault::ProxyFence { .. }), "{error}"),
        (_, result) => panic!("{result:?}"),
    }
}

#[test]
fn stores_write_what_lies_inside_and_own_their_source_until_the_wait() {
    let store = |column: i32, after: &str| {
        format!(
            "shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; {} fence.proxy.async.shared::cta; bar.warp.sync -1;\n\
             @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd9, {{{column}, 20}}], [%r3];\n\
             @%p1 cp.async.bulk.commit_group; {after}",
            (0..8).map(|i| format!("st.shared.u32 [%r4+{}], 7;", 128 * i)).collect::<String>()
        )
    };
    let (_, tensor) = Run::default().both(&store(48, "@%p1 cp.async.bulk.wait_group 0;")).unwrap();
    for (at, value) in tensor.iter().enumerate() {
        let (row, column) = (at as i64 / 64, at as i64 % 64);
        assert_eq!(*value, if row >= 20 && column >= 48 { 7 } else { cell(row, column) });
    }
    let again = "bar.warp.sync -1; st.shared.u32 [%r4], 9;";
    Run::default().run(&store(0, &format!("@%p1 cp.async.bulk.wait_group.read 0; {again}"))).unwrap();
    let fault = Run::default().fault(&store(0, again));
    assert!(matches!(&fault, Fault::Race { earlier, .. } if earlier.contains("the read by a bulk store")), "{fault}");
    assert!(matches!(Run::default().fault(&store(-4, "")), Fault::Bulk { .. }));
}

#[test]
fn plain_bulk_copies_there_and_back() {
    let body = format!(
        "{INIT} @!%p1 bra END; mov.b64 %rd4, {TENSOR}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd4], 512, [%r2]; {WAIT}\n\
         cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3+256], 256; cp.async.bulk.commit_group;\n\
         cp.async.bulk.wait_group 0; END:"
    );
    for seed in SEEDS {
        let out = Run { seed, ..Run::default() }.run(&body).unwrap();
        assert_eq!(out[..65], [(0..64).map(|c| cell(1, c)).collect::<Vec<_>>(), vec![0]].concat());
    }
    let odd = body.replacen("[%r3], [%rd4], 512", "[%r3], [%rd4], 24", 1);
    assert!(matches!(Run::default().fault(&odd), Fault::Bulk { .. }));
}

/// CTA 0 multicasts a box to both CTAs of the cluster; each waits for its own bytes.
#[test]
fn multicast_reaches_every_cta() {
    let body = format!(
        "{INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;\n\
         barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n\
         setp.eq.u32 %p4, %r39, 0; and.pred %p4, %p4, %p1; mov.u16 %rs1, 3;\n\
         @%p4 {LOAD}.multicast::cluster [%r3], [%rd9, {{0, 8}}], [%r2], %rs1;\n{WAIT}\n\
         shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; ld.shared.u32 %r6, [%r4+128];\n\
         mad.lo.s32 %r7, %r39, 128, %r5; cvt.u64.u32 %rd3, %r7; add.s64 %rd3, %rd1, %rd3; st.global.u32 [%rd3], %r6;\n\
         barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    );
    for seed in SEEDS {
        let out = Run { ctas: 2, seed, ..Run::default() }.run(&body).unwrap();
        assert_eq!(out[..64], (0..64).map(|i| cell(9, i % 32)).collect::<Vec<_>>());
    }
}

/// Each CTA writes into the next one's memory and arrives at its mbarrier.
#[rstest]
#[case("release", "acquire.cluster", true)]
#[case("relaxed", "acquire.cluster", false)]
fn distributed_shared_memory(#[case] arrive: &str, #[case] wait: &str, #[case] works: bool) {
    let body = format!(
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], 32; @%p1 fence.mbarrier_init.release.cluster;\n\
         barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\n\
         add.s32 %r8, %r39, 1; mov.u32 %r9, %cluster_nctarank; rem.u32 %r8, %r8, %r9;\n\
         shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; mapa.shared::cluster.u32 %r10, %r4, %r8;\n\
         mapa.shared::cluster.u32 %r11, %r2, %r8; mad.lo.s32 %r12, %r39, 100, %r1; st.shared::cluster.u32 [%r10], %r12;\n\
         mbarrier.arrive.{arrive}.cluster.shared::cluster.b64 _, [%r11];\n\
         TRY: mbarrier.try_wait.parity.{wait}.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY;\n\
         ld.shared.u32 %r6, [%r4]; mad.lo.s32 %r7, %r39, 128, %r5; cvt.u64.u32 %rd3, %r7; add.s64 %rd3, %rd1, %rd3;\n\
         st.global.u32 [%rd3], %r6; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    );
    for seed in SEEDS {
        let result = Run { ctas: 4, seed, ..Run::default() }.run(&body);
        if works {
            let out = result.unwrap();
            let expected = (0..128).map(|i| (i / 32 + 3) % 4 * 100 + i % 32);
            assert_eq!(out[..128], expected.collect::<Vec<u32>>());
        } else {
            let error = result.unwrap_err();
            assert!(matches!(error.kind, Fault::Race { .. }), "{error}");
        }
    }
}

#[test]
fn memory_of_other_ctas_needs_its_space_and_its_cta() {
    let other = "mapa.shared::cluster.u32 %r4, %r3, 1; st.shared.u32 [%r4], %r1;\n\
                 barrier.cluster.arrive; barrier.cluster.wait;";
    let fault = Run { ctas: 2, threads: 1, ..Run::default() }.fault(other);
    assert!(matches!(fault, Fault::OutOfBounds { .. }), "{fault}");
    let absent = "mapa.shared::cluster.u32 %r4, %r3, 2;";
    assert_eq!(Run { ctas: 2, ..Run::default() }.fault(absent), Fault::NoSuchCta { rank: 2, ctas: 2 });
    let twice = "barrier.cluster.arrive; barrier.cluster.arrive;";
    assert!(matches!(Run { ctas: 2, ..Run::default() }.fault(twice), Fault::ClusterBarrier { .. }));
    let gone = "setp.eq.u32 %p4, %r39, 1; @%p4 bra END; mapa.shared::cluster.u32 %r4, %r3, 1; mov.u32 %r5, 0;\n\
                SPIN: add.s32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 2000; @%p5 bra SPIN; st.shared::cluster.u32 [%r4], 1; END:";
    let fault = Run { ctas: 2, threads: 1, ..Run::default() }.fault(gone);
    assert!(matches!(&fault, Fault::OutOfBounds { nearest, .. } if nearest.contains("has ended")), "{fault}");
}

/// Without the release a warp overwrites what the others may still read.
#[rstest]
#[case("bar.sync 0;", true)]
#[case("", false)]
fn writes_after_reads_need_an_order(#[case] barrier: &str, #[case] works: bool) {
    let body = format!(
        "setp.lt.u32 %p4, %r1, 32; @%p4 st.shared.u32 [%r3], 5; bar.sync 0; ld.shared.u32 %r5, [%r3]; {barrier}\n\
         @%p4 st.shared.u32 [%r3], %r5;"
    );
    for seed in SEEDS {
        let result = Run { threads: 96, seed, ..Run::default() }.run(&body);
        assert_eq!(result.is_ok(), works, "{result:?}");
        if let Err(error) = result {
            assert!(matches!(error.kind, Fault::Race { .. }), "{error}");
        }
    }
}

#[test]
fn bytes_of_a_word_belong_to_different_warps() {
    let body = "shr.u32 %r5, %r1, 5; add.s32 %r4, %r3, %r5; cvt.u16.u32 %rs1, %r5; st.shared.u8 [%r4], %rs1; bar.sync 0;\n\
                ld.shared.u32 %r6, [%r3]; st.global.u32 [%rd1], %r6;";
    assert_eq!(Run { threads: 128, ..Run::default() }.run(body).unwrap()[0], 0x0302_0100);
    let overlap = "shr.u32 %r5, %r1, 6; add.s32 %r4, %r3, %r5; cvt.u16.u32 %rs1, %r5; st.shared.u8 [%r4], %rs1;";
    assert!(matches!(Run { threads: 128, ..Run::default() }.fault(overlap), Fault::Race { .. }));
}

#[test]
fn atomics_do_not_race_with_each_other() {
    let body = |barrier: &str| {
        format!(
            "@%p1 st.shared.u32 [%r3], 0; bar.sync 0; atom.shared.add.u32 %r5, [%r3], 1; {barrier}\n\
             ld.shared.u32 %r6, [%r3]; @%p1 st.global.u32 [%rd1], %r6;"
        )
    };
    assert_eq!(Run { threads: 128, ..Run::default() }.run(&body("bar.sync 0;")).unwrap()[0], 128);
    assert!(matches!(Run { threads: 128, ..Run::default() }.fault(&body("")), Fault::Race { .. }));
}

/// Copies that arrive at an mbarrier when they have come.
#[rstest]
#[case(".noinc", 32, WAIT, true)]
#[case("", 1, WAIT, false)]
#[case(".noinc", 32, "", false)]
fn copies_arrive_at_an_mbarrier(#[case] noinc: &str, #[case] count: u32, #[case] wait: &str, #[case] works: bool) {
    let body = format!(
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], {count}; bar.sync 0; setp.ge.u32 %p4, %r1, 32; @%p4 bra READ;\n\
         shl.b32 %r5, %r1, 4; add.s32 %r4, %r3, %r5; mov.b64 %rd4, {TENSOR}; cvt.u64.u32 %rd5, %r5; add.s64 %rd4, %rd4, %rd5;\n\
         cp.async.cg.shared::cta.global [%r4], [%rd4], 16; cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r2]; bra END;\n\
         READ: {wait} and.b32 %r5, %r1, 31; shl.b32 %r5, %r5, 2; add.s32 %r4, %r3, %r5; ld.shared.u32 %r6, [%r4+256];\n\
         cvt.u64.u32 %rd5, %r5; add.s64 %rd5, %rd1, %rd5; st.global.u32 [%rd5], %r6; END:"
    );
    for seed in SEEDS {
        match (Run { threads: 64, seed, ..Run::default() }).run(&body) {
            Ok(out) => assert!(works && out[..32] == (0..32).map(|c| cell(1, c)).collect::<Vec<_>>()),
            Err(error) => assert!(!works, "{error}"),
        }
    }
}

#[test]
fn mbarriers_live_and_die() {
    let fault = |body: &str| Run { threads: 1, ..Run::default() }.fault(body);
    let init = "mbarrier.init.shared::cta.b64 [%r2], 1;";
    assert!(matches!(fault(&format!("{init} {init}")), Fault::Mbarrier { .. }));
    assert!(matches!(fault(&format!("{init} ld.shared.u32 %r4, [%r2];")), Fault::Mbarrier { .. }));
    assert!(matches!(fault(&format!("{init} st.shared.u32 [%r2+4], 0;")), Fault::Mbarrier { .. }));
    let again = format!("{init} mbarrier.inval.shared::cta.b64 [%r2]; st.shared.u32 [%r2], 1; {init}");
    Run { threads: 1, ..Run::default() }.run(&again).unwrap();
    assert!(matches!(
        fault(&format!("{init} mbarrier.inval.shared::cta.b64 [%r2]; mbarrier.arrive.shared::cta.b64 _, [%r2];")),
        Fault::Mbarrier { .. }
    ));
    assert!(matches!(
        fault(&format!("{init} mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1048576;")),
        Fault::Mbarrier { .. }
    ));
}

/// Warp 1 waits for phase 0 while warp 0 completes that and the next one.
#[test]
fn a_phase_that_is_passed_twice_is_an_error() {
    let body = "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0; setp.eq.u32 %p4, %r1, 32; @%p4 bra WAIT;\n\
        @!%p1 bra END; mov.u32 %r5, 0; SPIN: add.s32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 200; @%p5 bra SPIN;\n\
        mbarrier.arrive.shared::cta.b64 _, [%r2]; mbarrier.arrive.shared::cta.b64 _, [%r2]; bra END;\n\
        WAIT: TRY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY; END:";
    let missed = |seed: &&u64| {
        let error = Run { threads: 64, seed: **seed, ..Run::default() }.run(body).err();
        error.is_some_and(|e| matches!(&e.kind, Fault::Mbarrier { problem, .. } if problem.contains("two phases")))
    };
    assert!(SEEDS.iter().filter(missed).count() > 0);
}

/// 168 registers each. Two warpgroups cannot both have more than the half of what a third gives.
#[rstest]
#[case(384, "setmaxnreg.dec.sync.aligned.u32 24;", 240, None)]
#[case(384, "setmaxnreg.dec.sync.aligned.u32 40;", 240, Some("more registers"))]
#[case(384, "", 240, Some("more registers"))]
fn registers_are_given_back_before_they_are_taken(
    #[case] threads: u32,
    #[case] gives: &str,
    #[case] takes: u32,
    #[case] stuck: Option<&str>,
) {
    let body = format!(
        "setp.ge.u32 %p4, %r1, 128; @%p4 bra MORE; {gives} bra END; MORE: setmaxnreg.inc.sync.aligned.u32 {takes}; END:"
    );
    let result = Run { threads, registers: Some(168), ..Run::default() }.run(&body);
    match (stuck, result) {
        (None, result) => assert!(result.is_ok(), "{result:?}"),
        (Some(text), Err(error)) => assert!(error.to_string().contains(text), "{error}"),
        (Some(_), Ok(_)) => panic!("no deadlock"),
    }
    assert!(matches!(Run::default().fault("setmaxnreg.dec.sync.aligned.u32 30;"), Fault::Registers { .. }));
    // What a thread is launched with is not known then.
    assert!(Run { threads, ..Run::default() }.run("setmaxnreg.inc.sync.aligned.u32 240;").is_ok());
}

#[test]
fn one_lane_is_elected() {
    let body = "elect.sync %r4|%p3, -1; selp.u32 %r5, 1, 0, %p3; shl.b32 %r6, %r1, 2; cvt.u64.u32 %rd3, %r6;\n\
                add.s64 %rd3, %rd1, %rd3; mad.lo.s32 %r5, %r4, 8, %r5; st.global.u32 [%rd3], %r5;";
    let out = Run::default().run(body).unwrap();
    assert_eq!(out[..32].iter().filter(|v| **v & 1 == 1).count(), 1);
    let leader = out[..32].iter().position(|v| v & 1 == 1).unwrap() as u32;
    assert!(out[..32].iter().all(|v| v >> 3 == leader));
}

#[rstest]
#[case(|m: &mut TensorMap| m.strides = vec![24])]
#[case(|m: &mut TensorMap| m.boxes = vec![32, 257])]
#[case(|m: &mut TensorMap| m.boxes = vec![3, 8])]
#[case(|m: &mut TensorMap| m.address += 8)]
#[case(|m: &mut TensorMap| m.dims = vec![])]
#[case(|m: &mut TensorMap| m.fill_nan = true)]
#[case(|m: &mut TensorMap| { m.swizzle = TensorSwizzle::Bytes64; })]
#[case(|m: &mut TensorMap| m.steps = vec![1, 9])]
fn tensor_maps_that_the_driver_refuses(#[case] change: fn(&mut TensorMap)) {
    let mut map = matrix();
    assert_eq!(TensorMap::decode(&map.encode().unwrap()), Some(map.clone()));
    change(&mut map);
    assert!(map.encode().is_err());
}
