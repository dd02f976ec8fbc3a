//! Orders between threads, warps and the CTAs of a cluster: what works, and what a missing release, barrier or arrival is
//! reported as.
mod common;

use common::shared::{INIT, LOAD, Run, SEEDS, WAIT, cell};
use ptx_sim::{Fault, SimError};
use rstest::rstest;

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

/// CTA 0 writes into CTA 1, or reads its own memory, and arrives there; CTA 1 reads what came, or has a copy overwrite what was
/// read (PTX ISA, "Scope": a release to the own CTA, and an acquire from it, order nothing for another one).
#[rstest]
#[case::cluster(".release.cluster", ".acquire.cluster", true, true)]
#[case::release_of_the_cta(".release.cta", ".acquire.cluster", false, true)]
#[case::acquire_of_the_cta(".release.cluster", ".acquire.cta", false, true)]
#[case::nothing_said("", "", false, true)]
#[case::relaxed(".relaxed.cluster", ".acquire.cluster", false, false)]
fn scopes_of_arrivals(#[case] arrive: &str, #[case] wait: &str, #[case] written: bool, #[case] read: bool) {
    let body = |first: &str, then: &str| {
        format!(
            "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; @%p1 st.shared.u32 [%r3], 5;\n\
             barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\n\
             mov.u32 %r4, 0; mapa.shared::cluster.u32 %r10, %r3, 1; mapa.shared::cluster.u32 %r11, %r2, 1;\n\
             setp.eq.u32 %p4, %r39, 1; @%p4 bra ONE; {first} mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r11]; bra END;\n\
             ONE: mapa.shared::cluster.u32 %r10, %r3, 0;\n\
             TRY: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY; {then}\n\
             END: barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
        )
    };
    let writes = body("st.shared::cluster.u32 [%r10], 7;", "ld.shared.u32 %r5, [%r3]; st.global.u32 [%rd1], %r5;");
    let reads = body("st.shared.u32 [%r3], 6; ld.shared.u32 %r5, [%r3];", "st.shared::cluster.u32 [%r10], 8;");
    for seed in SEEDS {
        let run = |body: &str| Run { ctas: 2, threads: 1, seed, ..Run::default() }.both(body);
        for (result, works) in [(run(&writes), written), (run(&reads), read)] {
            assert_eq!(result.is_ok(), works, "{result:?}");
            assert!(result.err().is_none_or(|error| matches!(error.kind, Fault::Race { .. })));
        }
    }
}

/// Nobody in CTA 1 waits for the arrival: with other timing the CTA would be gone.
#[rstest]
#[case::waited_for("TRY: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TRY;", "", true)]
#[case::a_barrier_at_the_end("", "END: barrier.cluster.arrive; barrier.cluster.wait;", true)]
#[case::neither("", "END:", false)]
fn a_cta_ends_after_the_arrivals_of_others(#[case] wait: &str, #[case] end: &str, #[case] works: bool) {
    let end = if end.is_empty() { "END:" } else { end };
    let body = format!(
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;\n\
         barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mapa.shared::cluster.u32 %r11, %r2, 1;\n\
         setp.eq.u32 %p4, %r39, 1; @%p4 bra ONE; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11]; bra END;\n\
         ONE: {wait} {end}"
    );
    for seed in SEEDS {
        let result = Run { ctas: 2, threads: 1, seed, ..Run::default() }.both(&body);
        assert_eq!(result.is_ok(), works, "{result:?}");
        let late = |error: &SimError| matches!(error.kind, Fault::UnfinishedCopy | Fault::OutOfBounds { .. });
        assert!(result.err().is_none_or(|error| late(&error)));
    }
}
