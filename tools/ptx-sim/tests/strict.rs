//! What hardware leaves undefined is an error here, and what lanes and warps do together.
use ptx_sim::{Buffer, Fault, Launch, Memory, Param, SimError, parse};
use rstest::rstest;

/// Runs a body with `%out`, a buffer of one u32 per thread, in `%rd1`; its words.
fn run(body: &str, threads: u32, seed: u64) -> Result<Vec<u32>, SimError> {
    let (memory, buffer, result) = launch(body, threads, 4 * threads as usize, seed);
    result?;
    Ok(memory.read(buffer).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect())
}

fn launch(body: &str, threads: u32, bytes: usize, seed: u64) -> (Memory, Buffer, Result<(), SimError>) {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %rd<20>;\n\
         .shared .align 16 .b8 buf[1024]; .shared .align 8 .b8 bar[8];\n\
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;\n\
         {body}\nret;\n}}\n"
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let buffer = memory.alloc(&vec![0; bytes]);
    let params = vec![Param::Buffer(buffer)];
    let run = Launch { block: [threads, 1, 1], params, seed, max_instructions: 100_000, ..Launch::new(&module, "k") };
    let result = run.run(&memory).map(|_| ());
    (memory, buffer, result)
}

fn fault(body: &str, threads: u32) -> Fault {
    run(body, threads, 1).unwrap_err().kind
}

#[test]
fn reads_of_shared_memory_that_nothing_wrote_are_errors() {
    assert_eq!(
        fault("mov.b32 %r2, buf; st.shared.u16 [%r2], %rs1; ld.shared.u32 %r3, [%r2];", 1),
        Fault::Uninitialised { address: 2 }
    );
}

/// `atomicExch` whose result nobody uses is how compilers store atomically.
#[test]
fn an_exchange_is_a_store() {
    let exchange =
        "mov.b32 %r2, buf; atom.shared.exch.b32 %r3, [%r2], 7; ld.shared.u32 %r3, [%r2]; st.global.u32 [%rd1], %r3;";
    assert_eq!(run(exchange, 1, 1).unwrap(), [7]);
    let addition = "mov.b32 %r2, buf; atom.shared.add.u32 %r3, [%r2], 7;";
    assert_eq!(fault(addition, 1), Fault::Uninitialised { address: 0 });
}

#[test]
fn what_a_load_does_not_use_may_be_unwritten() {
    let load = |bytes: &str| {
        run(
            &format!(
                "mov.b32 %r2, buf; st.shared.u32 [%r2+4], 5;\n.pragma \"used_bytes_mask {bytes}\";\n\
                 ld.shared.v4.u32 {{%r3, %r4, %r5, %r6}}, [%r2]; st.global.u32 [%rd1], %r4;"
            ),
            1,
            1,
        )
    };
    assert_eq!(load("240").unwrap(), [5]);
    assert_eq!(load("0xf0").unwrap(), [5]);
    assert_eq!(load("0x1f0").unwrap_err().kind, Fault::Uninitialised { address: 8 });
    // It holds for one instruction.
    let next = "mov.b32 %r2, buf; st.shared.u32 [%r2+4], 5;\n.pragma \"used_bytes_mask 240\";\n\
                ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];\n\
                ld.shared.v2.u32 {%r3, %r4}, [%r2];";
    assert_eq!(fault(next, 1), Fault::Uninitialised { address: 0 });
}

#[test]
fn an_unknown_instruction_is_named_with_its_line() {
    let error = run("tcgen05.alloc.cta_group::3 %r1;", 1, 1).unwrap_err();
    assert_eq!(error.kind, Fault::UnknownInstruction("tcgen05.alloc.cta_group::3".into()));
    assert_eq!(error.place.line, 9);
}

#[test]
fn addresses_out_of_bounds_and_misaligned_ones_are_errors() {
    assert!(matches!(fault("st.global.v2.u32 [%rd1+4], {%r1, %r1};", 4), Fault::Misaligned { bytes: 8, .. }));
    assert!(matches!(fault("st.global.u32 [%rd1+-4], %r1;", 1), Fault::OutOfBounds { bytes: 4, .. }));
    assert!(matches!(fault("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+16];", 7), Fault::OutOfBounds { .. }));
}

#[test]
fn freed_memory_is_out_of_bounds() {
    let text = ".version 9.0\n.target sm_90a\n.visible .entry k(.param .u64 a)\n{ .reg .b64 %rd<3>; .reg .b32 %r<3>;\n\
                ld.param.u64 %rd1, [a];\nld.global.u32 %r1, [%rd1]; ret; }";
    let module = parse(text).unwrap();
    let mut memory = Memory::new();
    let buffer = memory.alloc(&[0; 4]);
    let run = Launch { params: vec![Param::Buffer(buffer)], ..Launch::new(&module, "k") };
    run.run(&memory).unwrap();
    memory.free(buffer);
    let error = run.run(&memory).unwrap_err();
    assert!(error.to_string().contains("nearest is the freed allocation of 4 bytes"), "{error}");
    assert_eq!((error.place.line, error.place.lanes), (6, 1));
}

#[test]
fn a_barrier_that_a_warp_never_reaches_is_a_deadlock() {
    let body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra ONE; bar.sync 1, 64; bra END; ONE: bar.sync 2, 64; END: ";
    let Fault::Deadlock { positions } = fault(body, 64) else { panic!("no deadlock") };
    assert_eq!(positions.len(), 2);
    assert!(positions[0].contains("warp 0") && positions[0].contains("barrier 2 (32 of 64 threads)"), "{positions:?}");
}

#[test]
fn a_phase_that_never_completes_is_a_deadlock() {
    let body = "mov.b32 %r2, bar; mbarrier.init.shared.b64 [%r2], 2; mbarrier.arrive.shared.b64 _, [%r2];\n\
                TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra TRY;";
    let Fault::Deadlock { positions } = fault(body, 1) else { panic!("no deadlock") };
    assert!(positions[0].contains("1 of 2 arrivals pending"), "{positions:?}");
}

/// Warp 0 fills the buffer and arrives, warp 1 waits and reads.
#[rstest]
fn an_mbarrier_hands_over_between_warps(#[values(1, 2, 3, 4, 5, 6, 7, 8)] seed: u64) {
    let body = "mov.b32 %r2, bar; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0;\n\
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 32; bar.sync 0; setp.ge.u32 %p2, %r1, 32; @%p2 bra READ;\n\
        shl.b32 %r4, %r1, 2; add.s32 %r4, %r4, %r3; st.shared.u32 [%r4], %r1;\n\
        mbarrier.arrive.release.cta.shared::cta.b64 %rd3, [%r2]; bra END;\n\
        READ: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @%p3 bra GO; bra READ;\n\
        GO: sub.s32 %r5, 63, %r1; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r3; ld.shared.u32 %r6, [%r5];\n\
        st.global.u32 [%rd2], %r6; END: ";
    let out = run(body, 64, seed).unwrap();
    assert_eq!(out[32..], (0..32).rev().collect::<Vec<u32>>());
}

/// Warp 0 fills the buffer, one lane arrives, warp 1 waits and reads (PTX ISA, `bar.warp.sync`: memory ordering among the
/// participating threads; other instructions of a warp give none).
#[rstest]
#[case::met("bar.warp.sync -1;", false)]
#[case::met_at_a_barrier("bar.sync 1, 32;", false)]
#[case::apart("", true)]
#[case::shuffled("shfl.sync.idx.b32 %r7, %r1, 0, 31, -1;", true)]
#[case::half_of_them("setp.lt.u32 %p5, %r1, 16; @%p5 bar.warp.sync 65535;", true)]
#[case::met_before("bar.warp.sync -1; ld.shared.u32 %r7, [%r4];", true)]
fn one_lane_arrives_for_those_that_it_has_met(#[case] meet: &str, #[case] fails: bool) {
    let body = format!(
        "mov.b32 %r2, bar; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0; shl.b32 %r4, %r1, 2; add.s32 %r4, %r4, %r3;\n\
         @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0; setp.ge.u32 %p2, %r1, 32; @%p2 bra READ;\n\
         st.shared.u32 [%r4], %r1; {meet}\n\
         @%p1 mbarrier.arrive.release.cta.shared::cta.b64 %rd3, [%r2]; bra END;\n\
         READ: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @%p3 bra GO; bra READ;\n\
         GO: st.shared.u32 [%r4+-128], %r1; END: "
    );
    for seed in 1..9 {
        let result = run(&body, 64, seed);
        assert_eq!(result.is_err(), fails, "{result:?}");
        assert!(result.err().is_none_or(|error| matches!(error.kind, Fault::Race { .. })));
    }
}

/// What a lane has done itself it may publish without the others, also after lanes have done other things apart.
#[test]
fn a_lane_arrives_for_itself() {
    let body = "mov.b32 %r2, bar; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0;\n\
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0; setp.ge.u32 %p2, %r1, 32; @%p2 bra READ;\n\
        @%p1 st.shared.u32 [%r3], 7; @%p1 mbarrier.arrive.release.cta.shared::cta.b64 %rd3, [%r2];\n\
        st.shared.u32 [%r3+4], 8; bra END;\n\
        READ: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @%p3 bra GO; bra READ;\n\
        GO: ld.shared.u32 %r6, [%r3]; st.global.u32 [%rd2], %r6; END: ";
    assert_eq!(run(body, 64, 1).unwrap()[32..], [7; 32]);
}

/// Without the barrier the read is an error whichever warp comes first.
#[test]
fn every_seed_shows_a_missing_barrier() {
    let body = "mov.b32 %r3, buf; setp.ge.u32 %p2, %r1, 32; shl.b32 %r4, %r1, 2; add.s32 %r4, %r4, %r3;\n\
        @%p2 bra READ; st.shared.u32 [%r4], %r1; bra END; READ: ld.shared.u32 %r6, [%r4+-128]; END: ";
    let faults: Vec<_> = (1..40).map(|seed| run(body, 64, seed).unwrap_err().kind).collect();
    let late = faults.iter().filter(|f| matches!(f, Fault::Race { .. })).count();
    let early = faults.iter().filter(|f| matches!(f, Fault::Uninitialised { address: 0 })).count();
    assert!(late > 0 && early > 0 && late + early == faults.len(), "{late} and {early} of {}", faults.len());
}

/// A copy without a wait cannot be read, even over bytes that were readable before.
#[rstest]
#[case("cp.async.wait_group 0;", false)]
#[case("cp.async.wait_group 1;", true)]
#[case("", true)]
fn copies_need_their_wait(#[case] wait: &str, #[case] fails: bool) {
    let body = format!(
        "mov.b32 %r3, buf; st.global.v4.u32 [%rd1], {{7, 8, 9, 10}}; mov.u32 %r9, 12;\n\
         st.shared.v4.u32 [%r3], {{1, 1, 1, 1}}; cp.async.cg.shared::cta.global [%r3], [%rd1], 16, %r9;\n\
         cp.async.commit_group; {wait} ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3];\n\
         st.global.v4.u32 [%rd1], {{%r7, %r6, %r5, %r4}};"
    );
    let (memory, buffer, result) = launch(&body, 1, 16, 1);
    if fails {
        let fault = result.unwrap_err().kind;
        assert!(matches!(&fault, Fault::Race { address: 0, earlier, .. } if earlier.contains("cp.async")), "{fault}");
    } else {
        result.unwrap();
        assert_eq!(memory.read(buffer).iter().step_by(4).copied().collect::<Vec<_>>(), [0, 9, 8, 7]);
    }
}

/// Lanes take a loop of their own length, then sum over the warp.
#[rstest]
fn lanes_diverge_and_reconverge(#[values(1, 9, 77)] seed: u64) {
    let body = "mov.u32 %r2, 0; mov.u32 %r3, 0;\n\
        LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE; add.s32 %r2, %r2, 1; add.s32 %r3, %r3, %r2; bra LOOP; DONE:\n\
        shfl.sync.bfly.b32 %r4|%p2, %r3, 16, 31, -1; add.s32 %r3, %r3, %r4;\n\
        shfl.sync.bfly.b32 %r4|%p2, %r3, 8, 31, -1; add.s32 %r3, %r3, %r4;\n\
        shfl.sync.bfly.b32 %r4|%p2, %r3, 4, 31, -1; add.s32 %r3, %r3, %r4;\n\
        shfl.sync.bfly.b32 %r4|%p2, %r3, 2, 31, -1; add.s32 %r3, %r3, %r4;\n\
        shfl.sync.bfly.b32 %r4|%p2, %r3, 1, 31, -1; add.s32 %r3, %r3, %r4; st.global.u32 [%rd2], %r3;";
    let sum: u32 = (0..32).map(|n| n * (n + 1) / 2).sum();
    assert_eq!(run(body, 32, seed).unwrap(), vec![sum; 32]);
}

/// Lane 31 waits in a loop for what lane 0 writes later: lanes of a warp make progress on their own.
#[test]
fn lanes_of_a_warp_can_wait_for_each_other() {
    let body = "mov.b32 %r3, buf; st.shared.u32 [%r3], 0; bar.warp.sync -1; setp.ne.u32 %p1, %r1, 31; @%p1 bra SET;\n\
        SPIN: ld.shared.u32 %r4, [%r3]; setp.eq.u32 %p2, %r4, 0; @%p2 bra SPIN; bra END;\n\
        SET: st.shared.u32 [%r3], 5; END: bar.warp.sync -1; ld.shared.u32 %r5, [%r3]; st.global.u32 [%rd2], %r5;";
    assert_eq!(run(body, 32, 3).unwrap(), vec![5; 32]);
}

#[test]
fn a_shuffle_from_an_idle_lane_is_an_error() {
    let body = "setp.lt.u32 %p1, %r1, 16; @%p1 bra END; shfl.sync.bfly.b32 %r4|%p2, %r1, 16, 31, 0xffff0000; END: ";
    assert_eq!(fault(body, 32), Fault::InactiveLane { source_lane: 0 });
}

#[rstest]
#[case("up", 0, 3, |l: u32| if l < 3 { l } else { l - 3 })]
#[case("down", 31, 3, |l: u32| if l > 28 { l } else { l + 3 })]
#[case("idx", 31, 5, |_| 5)]
#[case("bfly", 0x1807 | 31, 4, |l: u32| l ^ 4)]
#[case("idx", 0x181f, 2, |l: u32| (l & 24) + 2)]
fn shuffles(#[case] mode: &str, #[case] clamp: u32, #[case] amount: u32, #[case] source: fn(u32) -> u32) {
    let body = format!("shfl.sync.{mode}.b32 %r4, %r1, {amount}, {clamp}, -1; st.global.u32 [%rd2], %r4;");
    assert_eq!(run(&body, 32, 1).unwrap(), (0..32).map(source).collect::<Vec<_>>());
}

#[test]
fn atomics_count_every_lane() {
    let body = "atom.global.add.u32 %r2, [%rd1], 3; mov.b32 %r3, buf; setp.eq.u32 %p1, %r1, 0;\n\
        @%p1 st.shared.u32 [%r3], 0; bar.sync 0; atom.shared.max.u32 %r4, [%r3], %r1; bar.sync 0;\n\
        ld.shared.u32 %r5, [%r3]; @%p1 st.global.u32 [%rd1+4], %r5;";
    assert_eq!(run(body, 96, 1).unwrap()[..2], [288, 95]);
}

/// The matrix holds `16 * row + column`; each lane gets two neighbours of it.
#[rstest]
#[case("x1", "{%r6}", "", |l: u32| (16 * (l / 4) + 2 * (l % 4), 1))]
#[case("x2", "{%r5, %r6}", "", |l: u32| (128 + 16 * (l / 4) + 2 * (l % 4), 1))]
#[case("x4", "{%r5, %r6, %r7, %r8}", "", |l: u32| (128 + 16 * (l / 4) + 2 * (l % 4), 1))]
#[case("x4", "{%r5, %r7, %r8, %r6}", ".trans", |l: u32| (384 + l / 4 + 32 * (l % 4), 16))]
fn ldmatrix(#[case] count: &str, #[case] dsts: &str, #[case] trans: &str, #[case] expected: fn(u32) -> (u32, u32)) {
    // Lane l fills row l with 8 values, 16 bytes apart; matrix m are the rows from 8 m on.
    let fill: String = (0..8)
        .map(|c| format!("add.s32 %r4, %r3, {c}; cvt.u16.u32 %rs1, %r4; st.shared.u16 [%r2+{}], %rs1;", 2 * c))
        .collect();
    let body = format!(
        "mov.b32 %r2, buf; shl.b32 %r3, %r1, 4; add.s32 %r2, %r2, %r3; {fill} bar.warp.sync -1;\n\
         ldmatrix.sync.aligned.m8n8.{count}{trans}.shared::cta.b16 {dsts}, [%r2]; st.global.u32 [%rd2], %r6;"
    );
    let want: Vec<u32> = (0..32).map(expected).map(|(first, step)| first | (first + step) << 16).collect();
    assert_eq!(run(&body, 32, 1).unwrap(), want);
}

#[test]
fn votes_see_the_lanes_that_execute() {
    let body = "setp.gt.u32 %p1, %r1, 20; vote.sync.any.pred %p2, %p1, -1; vote.sync.all.pred %p3, %p1, -1;\n\
        vote.sync.ballot.b32 %r3, %p1, -1; selp.u32 %r4, 1, 0, %p2; selp.u32 %r5, 2, 0, %p3; add.s32 %r4, %r4, %r5;\n\
        @%p1 activemask.b32 %r6; @!%p1 mov.u32 %r6, 0; add.s32 %r6, %r6, %r4; xor.b32 %r6, %r6, %r3;\n\
        st.global.u32 [%rd2], %r6;";
    let high = !0u32 << 21;
    let expected = |lane: u32| high ^ if lane > 20 { high + 1 } else { 1 };
    assert_eq!(run(body, 32, 1).unwrap(), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn barriers_and_masks_with_contradictions_are_errors() {
    let counts = "setp.lt.u32 %p1, %r1, 32; @%p1 bra ONE; bar.sync 1, 96; bra END; ONE: bar.sync 1, 64; END: ";
    assert!(matches!(fault(counts, 96), Fault::Barrier { id: 1, .. }));
    let mask = "shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xffff;";
    assert_eq!(fault(mask, 32), Fault::NotMember { executing: u32::MAX, members: 0xffff });
    let arrivals = "mov.b32 %r2, bar; mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.shared.b64 _, [%r2], 2;";
    assert!(matches!(fault(arrivals, 1), Fault::Mbarrier { .. }));
    assert!(matches!(fault("LOOP: bra LOOP;", 1), Fault::TooLong { .. }));
}

/// A block's registers and labels hide those around it, and end with it.
#[test]
fn blocks_have_names_of_their_own() {
    let body = "mov.u32 %r2, 5; { .reg .b32 %r2; mov.u32 %r2, 9; bra DONE; mov.u32 %r1, 3; DONE: }\n\
        { .reg .b32 t; mov.u32 t, 1; bra DONE; mov.u32 %r1, 3; DONE: add.s32 %r2, %r2, t; }\n\
        add.s32 %r2, %r2, %r1; st.global.u32 [%rd2], %r2;";
    assert_eq!(run(body, 2, 1).unwrap(), [6, 7]);
}

/// Two CTAs: what one writes, the other writes, too, or reads.
#[rstest]
#[case("st.global.u32 [%rd1], %r1;", "global store")]
#[case("st.global.u32 [%rd1], 7;", "global store")]
#[case("ld.global.u32 %r2, [%rd1]; @%p1 st.global.u32 [%rd1], %r1;", "which another CTA")]
fn ctas_have_no_order_in_global_memory(#[case] body: &str, #[case] expected: &str) {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n.reg .pred %p<2>;\n\
         .reg .b32 %r<3>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %ctaid.x;\n\
         setp.eq.u32 %p1, %r1, 1;\n{body}\nret;\n}}\n"
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let params = vec![Param::Buffer(memory.alloc(&[0; 4]))];
    let launch = Launch { grid: [2, 1, 1], block: [1, 1, 1], params, ..Launch::new(&module, "k") };
    let error = launch.run(&memory).unwrap_err();
    assert!(matches!(error.kind, Fault::GlobalRace { .. }) && error.to_string().contains(expected), "{error}");
    Launch { grid: [1, 1, 1], ..launch }.run(&memory).unwrap();
}

/// 33 lanes are expected, 64 arrive: the second warp's first lane ends the phase, its others begin the next.
#[test]
fn arrivals_of_one_instruction_belong_to_one_phase() {
    let body = |count: u32| {
        format!(
            "mov.u32 %r2, bar; setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $on;\nmbarrier.init.shared.b64 [%r2], {count};\n\
             $on:\nbar.sync 0;\nmbarrier.arrive.shared.b64 %rd3, [%r2];"
        )
    };
    run(&body(64), 64, 1).unwrap();
    run(&body(32), 64, 1).unwrap();
    assert!(matches!(fault(&body(33), 64), Fault::Mbarrier { problem, .. } if problem.contains("two phases")));
}
