//! What hardware may do but rarely does: each part of the adversary finds what goes unnoticed without it, and leaves alone what the
//! ISA promises.
mod common;

use common::shared::{INIT, Run, TENSOR, WAIT, cell};
use ptx_sim::{Adversary, Fault, SimError};
use rstest::rstest;

const SEEDS: std::ops::Range<u64> = 1..25;
const LANES: Adversary = Adversary { lanes: true, waits: false, arrivals: false };
const WAITS: Adversary = Adversary { lanes: false, waits: true, arrivals: false };
const ARRIVALS: Adversary = Adversary { lanes: false, waits: false, arrivals: true };

/// The results of all seeds.
fn all(run: &Run, body: &str) -> Vec<Result<Vec<u32>, SimError>> {
    SEEDS.map(|seed| Run { seed, map: run.map.clone(), ..*run }.run(body)).collect()
}

/// The lanes of a warp part at a branch and go on behind its join.
fn parted(then: &str) -> String {
    format!(
        "mov.u32 %r8, 0; @%p1 st.shared.v4.u32 [%r3], {{%r8, %r8, %r8, %r8}}; bar.sync 0; and.b32 %r8, %r1, 31; setp.lt.u32 %p4, %r8, 13; @%p4 bra FEW; add.s32 %r5, %r1, 1; bra JOIN;\n\
         FEW: add.s32 %r5, %r1, 2; JOIN: {then}"
    )
}

#[rstest]
#[case("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r3];")]
#[case("setmaxnreg.dec.sync.aligned.u32 24;")]
#[case("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")]
#[case("barrier.cluster.arrive; barrier.cluster.wait.aligned;")]
#[case("wgmma.fence.sync.aligned;")]
#[case("tcgen05.wait::ld.sync.aligned;")]
fn aligned_instructions_need_lanes_that_have_met(
    #[case] instruction: &str,
    #[values(
        "bar.warp.sync -1;",
        "shfl.sync.idx.b32 %r7, %r5, 0, 31, -1;",
        "vote.sync.any.pred %p5, %p4, -1;",
        "bar.sync 0;"
    )]
    meet: &str,
) {
    let run = |adversary, threads| Run { adversary, threads, ..Run::default() };
    for result in all(&run(LANES, 128), &parted(instruction)) {
        let error = result.unwrap_err();
        let Fault::LanesApart { missing } = error.kind else { panic!("{error}") };
        assert!([0x1fff, !0x1fff].contains(&missing), "{error}");
    }
    for (adversary, body) in [(LANES, format!("{meet} {instruction}")), (Adversary::default(), instruction.to_string())]
    {
        for result in all(&run(adversary, 128), &parted(&body)) {
            assert!(result.is_ok(), "{result:?}");
        }
    }
}

/// Who is there when the first lanes come is all that `activemask` knows.
#[rstest]
#[case("", true)]
#[case("bar.warp.sync -1;", false)]
fn active_lanes_are_not_all(#[case] meet: &str, #[case] fails: bool) {
    let body = parted(&format!("{meet} activemask.b32 %r6; shfl.sync.bfly.b32 %r7, %r5, 16, 31, %r6;"));
    for (adversary, fails) in [(LANES, fails), (Adversary::default(), false)] {
        for result in all(&Run { adversary, ..Run::default() }, &body) {
            assert_eq!(result.is_err(), fails, "{result:?}");
            assert!(result.err().is_none_or(|error| matches!(error.kind, Fault::InactiveLane { .. })));
        }
    }
}

/// The elected lane is the same each time, but need not be the first.
#[test]
fn any_lane_is_elected() {
    let body =
        "elect.sync %r4|%p3, -1; elect.sync %r5|%p3, -1; st.global.u32 [%rd1], %r4; st.global.u32 [%rd1+4], %r5;";
    let runs = all(&Run { adversary: LANES, ..Run::default() }, body);
    let leaders: Vec<_> = runs.into_iter().map(|out| out.unwrap()).map(|out| (out[0], out[1])).collect();
    assert!(leaders.iter().all(|(first, second)| first == second), "{leaders:?}");
    assert!(leaders.iter().any(|(first, _)| *first != 0), "{leaders:?}");
}

/// A wait that is not repeated is none.
#[test]
fn waits_give_up_early() {
    let copy = format!(
        "{INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512; mov.u64 %rd4, {TENSOR};\n\
         @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd4], 512, [%r2];\n"
    );
    let read = "ld.shared.u32 %r6, [%r3+4]; st.global.u32 [%rd1], %r6;";
    let once = WAIT.replace("@!%p2 bra TRY;", "");
    let failed = |adversary, wait: &str| {
        let results = all(&Run { adversary, ..Run::default() }, &format!("{copy} {wait} {read}"));
        let races = results.iter().filter(|r| r.as_ref().is_err_and(|e| matches!(e.kind, Fault::Race { .. }))).count();
        assert!(results.iter().flatten().all(|out| out[0] == cell(0, 1)));
        assert_eq!(races, results.iter().filter(|r| r.is_err()).count());
        races
    };
    assert_eq!(failed(WAITS, WAIT), 0);
    assert_eq!(failed(Adversary::default(), &once), 0);
    assert!((1..SEEDS.count()).contains(&failed(WAITS, &once)));
}

/// The second wait of a thread for the same phase does not give up.
#[test]
fn waits_know_what_the_thread_knows() {
    let body = format!(
        "{INIT} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r2]; {WAIT}\n\
         mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; selp.u32 %r5, 1, 2, %p3; st.global.u32 [%rd1], %r5;"
    );
    assert!(all(&Run { adversary: WAITS, ..Run::default() }, &body).into_iter().all(|out| out.unwrap()[0] == 1));
}

/// A commit to both CTAs of a pair. CTA 0 knows of its own arrival, and CTA 1 takes that for the other.
#[rstest]
#[case::default(Adversary::default(), false)]
#[case::apart(ARRIVALS, true)]
fn commits_come_to_each_cta_by_itself(#[case] adversary: Adversary, #[case] apart: bool) {
    let body = |end: &str| {
        format!(
            "{INIT} barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p4, %r39, 0; mov.b16 %rs1, 3; @!%p4 bra MEET;\n\
             tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %rs1; {WAIT}\n\
             MEET: barrier.cluster.arrive; barrier.cluster.wait; @%p4 bra END;\n\
             mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 0; selp.u32 %r5, 1, 2, %p3; st.global.u32 [%rd1], %r5; {end}\n\
             END: bar.warp.sync 1;"
        )
    };
    let run = Run { ctas: 2, threads: 1, adversary, ..Run::default() };
    let late = WAIT.replace("TRY", "LATE");
    let found = all(&run, &body(&late)).into_iter().map(|out| out.unwrap()[0]).filter(|done| *done == 2).count();
    assert_eq!(found > 0, apart);
    // With the last wait gone CTA 1 may be, too, when the arrival comes.
    let gone = |result: &Result<_, SimError>| {
        result.as_ref().is_err_and(|error| {
            assert!(matches!(error.kind, Fault::UnfinishedCopy), "{error}");
            true
        })
    };
    assert_eq!(all(&run, &body("")).iter().filter(|r| gone(r)).count() > 0, apart);
}

/// One arrival less than there are copies: the last copy may come after the phase.
#[rstest]
#[case::default(Adversary::default(), 31, false)]
#[case::apart(ARRIVALS, 31, true)]
#[case::all_are_counted(ARRIVALS, 32, false)]
fn copies_of_lanes_arrive_apart(#[case] adversary: Adversary, #[case] count: u32, #[case] wrong: bool) {
    let body = format!(
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], {count}; mov.u32 %r6, 0; setp.ge.u32 %p4, %r1, 32; shl.b32 %r5, %r1, 2;\n\
         and.b32 %r5, %r5, 127; add.s32 %r4, %r3, %r5; @!%p4 st.shared.u32 [%r4], %r6; bar.sync 0; @%p4 bra READ;\n\
         cvt.u64.u32 %rd4, %r5; add.u64 %rd4, %rd4, {TENSOR}; cp.async.ca.shared.global [%r4], [%rd4], 4;\n\
         cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2]; bra END;\n\
         READ: {WAIT} ld.shared.u32 %r6, [%r4]; cvt.u64.u32 %rd3, %r5; add.s64 %rd3, %rd1, %rd3; st.global.u32 [%rd3], %r6; END:"
    );
    let run = Run { threads: 64, adversary, ..Run::default() };
    let expected: Vec<u32> = (0..32).map(|i| cell(0, i)).collect();
    assert_eq!(all(&run, &body).into_iter().any(|out| out.unwrap()[..32] != expected), wrong);
}

/// Some lanes write, all arrive, each for itself: those that wrote after those that did not.
#[rstest]
fn parted_lanes_arrive_one_after_the_other(#[values(LANES, Adversary::default())] adversary: Adversary) {
    let body = format!(
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], 32; shl.b32 %r5, %r1, 2; add.s32 %r4, %r3, %r5; setp.ge.u32 %p4, %r1, 32;\n\
         @!%p4 st.shared.u32 [%r4+1024], %r5; bar.sync 0; @%p4 bra READ; ld.shared.u32 %r6, [%r4+1024]; and.b32 %r7, %r1, 3;\n\
         setp.ne.u32 %p5, %r7, 0; @%p5 bra COME; st.shared.u32 [%r4], %r6;\n\
         COME: mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2]; bra END;\n\
         READ: {WAIT} @%p5 bra END; sub.s32 %r4, %r4, 128; and.b32 %r7, %r1, 3; setp.ne.u32 %p5, %r7, 0; @%p5 bra END;\n\
         ld.shared.u32 %r6, [%r4]; st.global.u32 [%rd1], %r6; END:"
    );
    for result in all(&Run { threads: 64, adversary, ..Run::default() }, &body) {
        assert!(result.is_ok(), "{result:?}");
    }
}
