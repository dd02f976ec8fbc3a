//! State spaces: local memory, variables with initial values, atomics of all types; what lanes find out together.
mod common;

use common::Registers;
use ptx_sim::{Fault, Launch, Memory, Param, SimError, parse};
use rstest::rstest;

/// Runs a body with declarations of the module and of the function; one word from each of 32 lanes.
fn run(module: &str, body: &str) -> Result<Vec<u32>, SimError> {
    let text = format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n{module}\n.visible .entry k(.param .u64 out)\n{{\n\
         .local .align 8 .b8 __local_depot0[16];\n\
         .reg .b64 %SP; .reg .b64 %SPL; .reg .pred %p<3>; .reg .b16 %rs<5>; .reg.b32 %r<9>; .reg .b64 %rd<9>;\n\
         mov.u64 %SPL, __local_depot0; cvta.local.u64 %SP, %SPL;\n\
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 4, %rd1;\n\
         {body}\n st.global.u32 [%rd2], %r2; ret;\n}}\n"
    );
    let module = parse(&text).unwrap();
    let mut memory = Memory::new();
    let buffer = memory.alloc(&[0; 128]);
    Launch { params: vec![Param::Buffer(buffer)], ..Launch::new(&module, "k") }.run(&memory)?;
    Ok(memory.read(buffer).chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect())
}

#[test]
fn each_lane_has_its_local_memory() {
    let body = "st.local.u32 [%SPL+8], %r1; st.u32 [%SP+12], 100; ld.u32 %r3, [%SP+8]; ld.local.u32 %r4, [%SPL+12];\n\
                add.u32 %r2, %r3, %r4;";
    assert_eq!(run("", body).unwrap(), (100..132).collect::<Vec<_>>());
    assert!(matches!(run("", "ld.local.u32 %r2, [%SPL+16];").unwrap_err().kind, Fault::OutOfBounds { .. }));
}

#[rstest]
#[case(".const .align 4 .b8 t[8] = {1, 0, 0, 0, 7};", "ld.const.u32 %r2, [t+4];", 7)]
#[case(".global .align 4 .u32 t[3] = {1, 2, 3};", "mov.u64 %rd3, t; ld.global.u32 %r2, [%rd3+8];", 3)]
#[case(".global .f32 t = 0f3F800000;", "ld.global.u32 %r2, [t];", 0x3f80_0000)]
#[case(".global .align 2 .s16 t[2] = {5, -2};", "ld.global.s16 %r2, [t+2];", -2i32 as u32)]
#[case(".global .align 2 .s16 t[2] = {5, -2};", "ld.global.s16 %rs1, [t+2]; cvt.u32.u16 %r2, %rs1;", 0xfffe)]
#[case(
    ".global .align 1 .b8 t[2] = {128, -2};",
    "ld.global.s8 %rs1, [t]; setp.gt.u16 %p1, %rs1, 40000; selp.u32 %r2, 1, 0, %p1;",
    1
)]
#[case(".const .align 8 .u64 t = 5;", "mov.u64 %rd3, t; cvta.const.u64 %rd4, %rd3; ld.u32 %r2, [%rd4+4];", 0)]
fn variables_have_their_initial_values(#[case] module: &str, #[case] body: &str, #[case] expected: u32) {
    assert_eq!(run(module, body).unwrap(), vec![expected; 32]);
}

#[test]
fn variables_have_bounds() {
    let error = run(".global .align 4 .b8 t[6];", "ld.global.u32 %r2, [t+4];").unwrap_err();
    assert!(matches!(error.kind, Fault::OutOfBounds { .. }), "{error}");
}

/// 32 lanes on one address: the last state, from the first lane's view.
fn atomics(initial: &str, op: &str) -> u32 {
    let body = format!("{op}\nbar.warp.sync -1; ld.global.u32 %r2, [t];");
    run(&format!(".global .align 16 .u32 t[4] = {{{initial}}};"), &body).unwrap()[0]
}

#[rstest]
#[case("0", "atom.global.add.u32 %r3, [t], 2;", 64)]
#[case("0", "red.global.add.noftz.f16x2 [t], 0x3c004000;", 0x5000_5400)]
#[case("0", "mov.b16 %rs1, 0x3c00; atom.add.noftz.f16 %rs2, [t+2], %rs1; ", 0x5000_0000)]
#[case("0", "mov.b16 %rs1, 0x3f80; mov.u64 %rd5, t; atom.relaxed.add.noftz.bf16 %rs2, [%rd5], %rs1;", 0x4200)]
#[case("0, 0", "atom.global.add.v2.f32 {%r3, %r4}, [t], {0f3F800000, 0f40000000};", 0x4200_0000)]
#[case("5", "atom.global.inc.u32 %r3, [t], 6;", 2)]
#[case("5", "atom.global.dec.u32 %r3, [t], 6;", 1)]
#[case("9", "mov.b16 %rs1, 9; mov.b16 %rs2, 4; atom.global.cas.b16 %rs3, [t], %rs1, %rs2;", 4)]
#[case("9, 1", "atom.global.max.u64 %rd3, [t], 7;", 9)]
#[case(
    "0, 0",
    "atom.global.add.f64 %rd3, [t], 0d3FF0000000000000; ld.global.u32 %r5, [t+4]; st.global.u32 [t], %r5;",
    0x4040_0000
)]
fn atomics_of_all_types(#[case] initial: &str, #[case] op: &str, #[case] expected: u32) {
    assert_eq!(atomics(initial, op), expected, "{op}");
}

#[test]
fn lanes_find_out_together() {
    let each =
        |body: &str| Registers { threads: 32, inputs: 1, outputs: 1, seed: 1 }.run(body, &(0..32).collect::<Vec<_>>());
    let all = |body: &str| each(body).unwrap();
    assert_eq!(all("redux.sync.add.s32 %o0, %i0, -1;"), vec![496; 32]);
    assert_eq!(all("sub.s32 %r2, %i0, 5; redux.sync.min.s32 %o0, %r2, -1;"), vec![-5i32 as u32; 32]);
    assert_eq!(all("sub.s32 %r2, %i0, 5; redux.sync.max.u32 %o0, %r2, -1;"), vec![u32::MAX; 32]);
    assert_eq!(all("redux.sync.xor.b32 %o0, %i0, -1;"), vec![0; 32]);
    let matching = all("and.b32 %r2, %i0, 3; match.any.sync.b32 %o0, %r2, -1;");
    assert!((0..32).all(|l| matching[l] == 0x1111_1111 << (l % 4)));
    assert_eq!(all("match.all.sync.b32 %o0|%p1, %i0, -1; @%p1 mov.b32 %o0, 7;"), vec![0; 32]);
    assert_eq!(
        all("mov.b32 %r2, 3; match.all.sync.b32 %r3|%p1, %r2, -1; selp.u32 %o0, %r3, 0, %p1;"),
        vec![u32::MAX; 32]
    );
    assert_eq!(each("trap;").unwrap_err().kind, Fault::Trap);
}
