//! `tcgen05`: products with accumulators in tensor memory, and what must come between them and their neighbours.
mod common;
#[path = "tcgen05/kernel.rs"]
mod kernel;

use kernel::{COLUMNS, K, Lay, Operands, Product};
use ptx_sim::{Fault, SimError};
use rstest::rstest;

/// The product of whole numbers equals plain loops.
fn check(p: &Product) {
    let operands = Operands::new(p, 8);
    let (d, stats) = p.run(&p.text(), &operands).unwrap();
    assert_eq!(d, operands.product(p, 1.0, |d, _, _| d));
    assert_eq!(stats.matrix_flops, 2 * (p.m * p.n * K) as u64);
    // One store and one load of all lanes, by each CTA.
    assert_eq!(stats.tensor_memory_bytes, (p.group * 2 * 128 * COLUMNS * 4) as u64);
}

/// PTX ISA, Canonical Layouts: both major-nesses in all swizzling modes, of A and of B.
#[rstest]
fn operands_lie_in_any_layout(
    #[values(16, 32, 64, 128)] a: usize,
    #[values(16, 32, 64, 128)] b: usize,
    #[values((false, false), (true, false), (false, true), (true, true))] majors: (bool, bool),
) {
    let (a, b) = (Lay { width: a, mn_major: majors.0 }, Lay { width: b, mn_major: majors.1 });
    check(&Product { a, b, ..Product::new(64, 64) });
}

/// PTX ISA, Data Path Layout Organization: D, E, F, G, with A from shared and from tensor memory.
#[rstest]
fn data_paths_of_one_cta(
    #[values((128, 64, false), (64, 64, false), (64, 24, false), (128, 64, true), (64, 128, true), (32, 128, true))]
    shape: (usize, usize, bool),
    #[values(false, true)] a_in_tensor_memory: bool,
    #[values(1, 2, 3)] seed: u64,
) {
    let (m, n, weight_stationary) = shape;
    check(&Product { weight_stationary, a_in_tensor_memory, seed, ..Product::new(m, n) });
}

/// Layouts A and B: a pair of CTAs, each with half of A's rows and half of B's.
#[rstest]
fn data_paths_of_a_pair(
    #[values((256, 64), (128, 64), (128, 128), (256, 32))] shape: (usize, usize),
    #[values(false, true)] a_in_tensor_memory: bool,
    #[values(false, true)] mn_major: bool,
    #[values(1, 2, 3)] seed: u64,
) {
    let (m, n) = shape;
    // A from tensor memory is K-major, and D and A share its columns.
    if n > 64 && m == 256 {
        return;
    }
    let lay = Lay { width: if mn_major { 32 } else { 128 }, mn_major };
    let a = if a_in_tensor_memory { kernel::K_MAJOR } else { lay };
    check(&Product { group: 2, a, b: lay, a_in_tensor_memory, seed, ..Product::new(m, n) });
}

#[rstest]
fn f16_elements(#[values(false, true)] half_d: bool) {
    let p = Product { half: true, half_d, ..Product::new(128, 64) };
    // Sums of 64 products of up to 4 stay below 2048: exact in f16.
    let operands = Operands::new(&p, 4);
    let (d, _) = p.run(&p.text(), &operands).unwrap();
    assert_eq!(d, operands.product(&p, 1.0, |d, _, _| d));
}

/// PTX ISA, Instruction descriptor: bits 13 and 14 negate A and B.
#[rstest]
#[case(1 << 13, -1.0)]
#[case(1 << 14, -1.0)]
#[case(3 << 13, 1.0)]
fn elements_can_be_negated(#[case] bits: u32, #[case] sign: f32) {
    let p = Product { bits, ..Product::new(64, 64) };
    let operands = Operands::new(&p, 8);
    let (d, _) = p.run(&p.text(), &operands).unwrap();
    assert_eq!(d, operands.product(&p, sign, |d, _, _| d));
}

/// Without enable-input-d, D is not read: each step overwrites the one before, and the last remains.
#[test]
fn d_is_overwritten_where_it_is_no_input() {
    let p = Product { last: "!%p8", ..Product::new(64, 64) };
    let mut operands = Operands::new(&p, 8);
    let (d, _) = p.run(&p.text(), &operands).unwrap();
    for row in operands.a.chunks_mut(K) {
        row[..K - 16].fill(0);
    }
    assert_eq!(d, operands.product(&p, 1.0, |_, _, _| 0.0));
}

/// `scale-input-d` of 1, four times: D is divided by 16, and what the first steps add by 8, 4 and 2.
#[test]
fn d_can_be_scaled() {
    let p = Product { last: "%p8, 1", ..Product::new(64, 64) };
    let mut operands = Operands::new(&p, 8);
    let (d, _) = p.run(&p.text(), &operands).unwrap();
    for (i, x) in operands.a.iter_mut().enumerate() {
        *x *= 2 << (i % K / 16);
    }
    let want: Vec<f32> = operands.product(&p, 1.0, |d, _, _| d).iter().map(|x| x / 16.0).collect();
    assert_eq!(d, want);
}

/// `disable-output-lane`: bit 0 of the first word is lane 0.
#[test]
fn lanes_can_be_left_out() {
    let p = Product { last: "{%r20, %r21, %r22, %r21}, %p8", ..Product::new(128, 64) };
    let words = "mov.b32 %r20, 1; mov.b32 %r21, 0; mov.b32 %r22, 0x80000000;\nand.b32 %r12,";
    let text = p.text().replacen("and.b32 %r12,", words, 1);
    let operands = Operands::new(&p, 8);
    let (d, _) = p.run(&text, &operands).unwrap();
    let all = operands.product(&p, 1.0, |d, _, _| d);
    for (row, (d, all)) in d.chunks(64).zip(all.chunks(64)).enumerate() {
        let before: Vec<f32> = operands.d[row * 64..row * 64 + 64].iter().map(|d| *d as f32).collect();
        assert_eq!(d, if matches!(row, 0 | 95) { &before } else { all }, "row {row}");
    }
}

/// `.ws` with a mask of alternating columns: skip and use spans of one.
#[test]
fn columns_of_b_can_be_zeros() {
    let p = Product { weight_stationary: true, last: "%p8, 0x8000000000", ..Product::new(128, 64) };
    let operands = Operands::new(&p, 8);
    let (d, _) = p.run(&p.text(), &operands).unwrap();
    let all = operands.product(&p, 1.0, |d, _, _| d);
    for (i, (d, all)) in d.iter().zip(&all).enumerate() {
        // The mask starts with columns that are used.
        let want = if i % 64 % 2 == 1 { operands.d[i] as f32 } else { *all };
        assert_eq!(*d, want, "row {}, column {}", i / 64, i % 64);
    }
}

fn error(p: &Product, text: &str) -> SimError {
    p.run(text, &Operands::new(p, 8)).unwrap_err()
}

/// The kernel without a line.
fn without(p: &Product, line: &str) -> String {
    let text = p.text();
    assert!(text.contains(line), "{line}");
    text.replacen(line, "", 1)
}

/// Every fence, wait and barrier of the kernel is needed, with every seed.
#[rstest]
#[case("COPIED: fence.proxy.async.shared::cta;", "COPIED:", "no fence.proxy.async")]
#[case("tcgen05.wait::st.sync.aligned;", "", "not ordered after the write by the tcgen05.st")]
#[case("tcgen05.fence::before_thread_sync; // filled", "", "not ordered after the write by the tcgen05.st")]
#[case("tcgen05.fence::after_thread_sync; // filled", "", "not ordered after the write by the tcgen05.st")]
// Here it depends on the schedule who comes too early.
#[case("bar.sync 0; // filled", "", "tensor memory at lane")]
#[case("TRY: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r11], 0; @!%p5 bra TRY;", "", "is not ordered after the")]
#[case("tcgen05.fence::after_thread_sync; // done", "", "not ordered after the write by the tcgen05.mma")]
#[case("tcgen05.wait::ld.sync.aligned;", "", "before tcgen05.wait::ld")]
#[case("tcgen05.fence::before_thread_sync; // read", "", "tcgen05.dealloc is not ordered after the tcgen05.ld")]
#[case("bar.sync 0; // read", "", "tcgen05.dealloc is not ordered after the tcgen05.ld")]
fn what_orders_accesses_is_needed(
    #[case] line: &str,
    #[case] instead: &str,
    #[case] problem: &str,
    #[values(1, 2, 3, 4, 5)] seed: u64,
) {
    let p = Product { seed, a_in_tensor_memory: true, ..Product::new(64, 64) };
    let text = p.text();
    assert!(text.contains(line));
    let error = error(&p, &text.replacen(line, instead, 1)).to_string();
    assert!(error.contains(problem), "{error}");
}

/// A thread that the mbarrier did not tell may not write what the product reads.
#[rstest]
fn operands_in_flight_cannot_be_overwritten(#[values(1, 2, 3, 4, 5)] seed: u64) {
    let p = Product { seed, ..Product::new(64, 64) };
    let text = p.text().replacen("WAIT: //", "st.shared.b32 [%r3], %r1; WAIT: //", 1);
    assert!(matches!(error(&p, &text).kind, Fault::Race { .. }));
    let fine = p.text().replacen(
        "tcgen05.fence::after_thread_sync; // done",
        "tcgen05.fence::after_thread_sync; @!%p3 st.shared.b32 [%r3], %r1;",
        1,
    );
    p.run(&fine, &Operands::new(&p, 8)).unwrap();
}

/// Tensor memory, too: between the commit and its mbarrier A belongs to the product.
#[test]
fn tensor_memory_in_flight_cannot_be_overwritten() {
    let p = Product { a_in_tensor_memory: true, ..Product::new(64, 64) };
    let line = "WAIT: //";
    let text = p.text().replacen(line, "WAIT: tcgen05.st.sync.aligned.32x32b.x1.b32 [row+64], {%r1}; //", 1);
    let error = error(&p, &text).to_string();
    // Whichever comes first.
    let orders = [
        "write is not ordered after the read by the tcgen05.mma",
        "read is not ordered after the write by the tcgen05.st",
    ];
    assert!(orders.iter().any(|order| error.contains(order)), "{error}");
}

/// PTX ISA, Pipelined tcgen05 Instructions: products with one accumulator and shape run in their order, others do not.
#[test]
fn products_with_other_shapes_are_no_pipeline() {
    let p = Product::new(64, 64);
    let text = p.text();
    let at = text.rfind("mov.b32 %r14,").unwrap();
    let other = format!("{}mov.b32 %r14, {}", &text[..at], 1u32 << 4 | 1 << 7 | 1 << 10 | 4 << 17 | 4 << 24);
    let rest = &text[at + text[at..].find(';').unwrap()..];
    let error = error(&p, &format!("{other}{rest}")).to_string();
    assert!(error.contains("write is not ordered after the write by the tcgen05.mma"), "{error}");
}

#[rstest]
#[case("tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 128;", "", "never deallocated")]
#[case("taddr, 128;\nEND", "taddr, 64;\nEND", "no allocation of 64 columns")]
#[case(".b32 [%r10], 128;", ".b32 [%r10], 96;", "power of two")]
#[case(".b32 [%r10], 128;", ".b32 [%r10], 64;", "the column is not allocated")]
#[case("shl.b32 row, %r2, 21;", "shl.b32 row, %r2, 20;", "reaches lanes")]
#[case("shl.b32 row, %r2, 21;", "mov.b32 row, %r1;", "different operands")]
#[case(
    "tcgen05.relinquish_alloc_permit.cta_group::1",
    "tcgen05.relinquish_alloc_permit.cta_group::2",
    "two values of .cta_group"
)]
#[case("kind::f16 [taddr]", "kind::f8f6f4 [taddr]", "unknown instruction: tcgen05.mma.cta_group::1.kind::f8f6f4")]
#[case("kind::f16 [taddr]", "kind::i8 [taddr]", "unknown instruction: tcgen05.mma.cta_group::1.kind::i8")]
fn wrong_uses_are_errors(#[case] line: &str, #[case] instead: &str, #[case] problem: &str) {
    let p = Product::new(64, 64);
    let text = p.text();
    assert!(text.contains(line), "{line}");
    let error = error(&p, &text.replacen(line, instead, 1)).to_string();
    assert!(error.contains(problem), "{error}");
}

/// What nothing wrote cannot be read, by loads and by products.
#[test]
fn tensor_memory_starts_uninitialised() {
    let p = Product::new(64, 64);
    let all = (0..COLUMNS).map(|i| format!("%v{i}")).collect::<Vec<_>>().join(", ");
    let text = without(&p, &format!("tcgen05.st.sync.aligned.32x32b.x128.b32 [row], {{{all}}};"));
    assert!(error(&p, &text).to_string().contains("read of a cell that nothing wrote"));
}

/// An allocation without room waits, here for ever.
#[test]
fn allocations_wait_for_room() {
    let p = Product::new(64, 64);
    let line = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 128;\n";
    let text = p.text();
    assert!(text.contains(line));
    let text = text.replacen(line, &line.repeat(5), 1);
    let Fault::Deadlock { positions } = error(&p, &text).kind else { panic!("no deadlock") };
    assert!(positions[0].contains("512 of 512 columns are allocated"), "{positions:?}");
}

/// With `.cta_group::2` both CTAs allocate and deallocate the same number of columns, and each waits for the other.
#[rstest]
#[case("shared::cta.b32 [%r10], 128;", "shared::cta.b32 [%r10], %r18;", "disagree")]
#[case("@%p2 bra END;", "setp.ne.u32 %p6, %r15, 0; @%p6 bra END; @%p2 bra END;", "never deallocated")]
#[case(".reqnctapercluster 2, 1, 1", "", "needs a cluster with a pair of CTAs")]
// The odd CTA comes to the barrier behind its deallocation: PTX ISA, Issue Granularity, Example of a hang.
#[case(
    "tcgen05.fence::before_thread_sync; // read",
    "@%p2 bra GO; setp.eq.u32 %p6, %r15, 0; @%p6 bra GO;\n\
     tcgen05.dealloc.cta_group::2.sync.aligned.b32 taddr, 128; GO: tcgen05.fence::before_thread_sync; //",
    "deadlock"
)]
fn pairs_allocate_together(#[case] line: &str, #[case] instead: &str, #[case] problem: &str) {
    let p = Product { group: 2, ..Product::new(256, 64) };
    let text = p.text();
    assert!(text.contains(line), "{line}");
    let text = text.replacen(line, instead, 1);
    let text =
        text.replacen("mov.u32 %r3, tiles;", "shl.b32 %r18, %r15, 6; sub.s32 %r18, 128, %r18; mov.u32 %r3, tiles;", 1);
    let error = error(&p, &text).to_string();
    assert!(error.contains(problem), "{error}");
}

/// An operand of the other CTA is in flight, too.
#[rstest]
#[case(
    "COPIED: fence.proxy.async.shared::cta;",
    "COPIED: setp.eq.u32 %p6, %r15, 0; @%p6 fence.proxy.async.shared::cta;",
    "no fence.proxy.async"
)]
#[case("WAIT: //", "st.shared.b32 [%r3], %r1; WAIT: //", "data race")]
#[case("TRY: mbarrier", "setp.eq.u32 %p6, %r15, 0; @!%p6 st.shared.b32 [%r3], %r1; TRY: mbarrier", "data race")]
#[case("multicast::cluster.b64 [%r11], %rs1", "b64 [%r11]", "deadlock")]
fn pairs_share_their_operands(
    #[case] line: &str,
    #[case] instead: &str,
    #[case] problem: &str,
    #[values(1, 2, 3)] seed: u64,
) {
    let p = Product { group: 2, seed, ..Product::new(256, 64) };
    let text = p.text();
    assert!(text.contains(line), "{line}");
    let error = error(&p, &text.replacen(line, instead, 1)).to_string();
    assert!(error.contains(problem), "{error}");
}

/// One thread of the leading CTA issues for the pair, while the other CTA is there.
#[rstest]
#[case(
    "add.s32 %r17, %r15, %r1; setp.ne.u32 %p4, %r17, 0;",
    "xor.b32 %r17, %r15, 1; or.b32 %r17, %r17, %r1; setp.ne.u32 %p4, %r17, 0;",
    "odd rank"
)]
#[case(
    "END: ret;",
    "END: setp.eq.u32 %p6, %r17, 0; @!%p6 bra OVER; mov.u32 %r18, 0;\nSPIN: add.s32 %r18, %r18, 1; setp.lt.u32 %p6, %r18, 3000;\n@%p6 bra SPIN; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%r11];\nOVER: ret;",
    "has exited"
)]
fn the_leading_cta_issues_for_its_pair(#[case] line: &str, #[case] instead: &str, #[case] problem: &str) {
    let p = Product { group: 2, ..Product::new(256, 64) };
    let text = p.text();
    assert!(text.contains(line), "{line}");
    let error = error(&p, &text.replacen(line, instead, 1)).to_string();
    assert!(error.contains(problem), "{error}");
}
