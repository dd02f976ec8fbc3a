//! Asynchronous copies and the mbarriers that they arrive at: what works, and what a missing fence, wait or arrival is reported as.
mod common;

use common::shared::{INIT, LOAD, Run, SEEDS, TENSOR, WAIT, cell, matrix};
use ptx_sim::{Fault, TensorMap, TensorSwizzle};
use rstest::rstest;

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
