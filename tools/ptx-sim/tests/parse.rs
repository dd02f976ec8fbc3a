//! Excerpts of the text that NVRTC writes.
use ptx_sim::{Loc, Operand, RegType, parse, unknown_instructions};
use rstest::rstest;

const HEAD: &str = ".version 9.0\n.target sm_90a\n.address_size 64\n";

fn name(text: &str) -> Operand {
    Operand::Name(text.to_string())
}

#[test]
fn a_module_keeps_its_declarations() {
    let text = format!(
        "// a comment\n{HEAD}.extern .shared .align 16 .b8 dynamic[];\n.global .align 4 .u32 table[3] = {{1, 2, 3}};\n\
         .global .align 8 .b8 names[16] = \"a;b\";\n\
         .visible .entry kernel(\n.param .u64 .ptr .align 1 a,\n.param .align 4 .b8 info[48]\n)\n.maxntid 128, 2\n\
         .minnctapersm 2\n.reqnctapercluster 2, 1, 1\n{{\n\t.reg .pred \t%p<3>;\n\t.reg .b64 %rd<2>, x;\n\
         .shared .align 1024 .b8 tile[4][8];\n/* nothing\n happens */ ret;\n}}\n\
         \t.file\t1 \"some/file.cu\", 17, 4\n\t.section\t.debug_str\n\t{{\n$L__info_string0:\n.b8 95,90,0\n\n\t}}\n"
    );
    let module = parse(&text).unwrap();
    assert_eq!((module.version.as_str(), module.target.as_str()), ("9.0", "sm_90a"));
    assert_eq!((module.shared[0].bytes, module.shared[0].align, module.shared[0].external), (0, 16, true));
    assert_eq!((module.globals[0].bytes, module.globals[1].bytes), (12, 16));
    assert_eq!(module.files[&1], "some/file.cu");
    let entry = &module.entries[0];
    let params: Vec<_> = entry.params.iter().map(|p| (p.name.as_str(), p.align, p.bytes)).collect();
    assert_eq!(params, [("a", 8, 8), ("info", 4, 48)]);
    assert_eq!((entry.max_threads, entry.cluster), (Some([128, 2, 1]), Some([2, 1, 1])));
    assert_eq!((entry.shared[0].bytes, entry.shared[0].align), (32, 1024));
    let registers = &entry.scopes[0].registers;
    assert_eq!(
        (registers["%p2"], registers["%rd1"], registers["x"]),
        (RegType::Pred, RegType::Bits(64), RegType::Bits(64))
    );
    assert_eq!((registers.len(), entry.instrs[0].line), (6, 20));
}

#[test]
fn an_instruction_keeps_its_operands_and_its_place() {
    let text = format!(
        "{HEAD}.entry k() {{ .reg .pred %p<3>;\n.loc 1 13 19, function_name $L__info_string0+7, inlined_at 2 77 1\n\
         @!%p1 shfl.sync.bfly.b32 %r1|%p2, %r3, -1, 0x1f, 0f3F800000;\n\
         cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\n [%r1], [%rd1, {{%r2, %r3, 0}}], [%r4+-8];\n\
         setp.and.b32 %p1, a, b, !%p2; }}"
    );
    let module = parse(&text).unwrap();
    let [shuffle, copy, set] = &module.entries[0].instrs[..] else { panic!("three instructions") };
    assert_eq!(shuffle.loc, Some(Loc { file: 1, line: 13, inlined_at: Some((2, 77)) }));
    assert!(shuffle.guard.as_ref().is_some_and(|g| g.negated && g.register == "%p1"));
    assert_eq!(shuffle.operands[0], Operand::Pair(Box::new(name("%r1")), Box::new(name("%p2"))));
    assert_eq!(shuffle.operands[2..], [Operand::Int(u64::MAX), Operand::Int(31), Operand::F32(0x3f80_0000)]);
    assert!(copy.opcode.ends_with("mbarrier::complete_tx::bytes"));
    let Operand::Address { coords, .. } = &copy.operands[1] else { panic!("an address") };
    assert_eq!(coords[..], [name("%r2"), name("%r3"), Operand::Int(0)]);
    assert!(matches!(copy.operands[2], Operand::Address { offset: -8, .. }));
    assert_eq!(set.operands[3], Operand::Not(Box::new(name("%p2"))));
    assert_eq!((shuffle.line, copy.line, set.line), (6, 7, 9));
}

#[rstest]
#[case(".entry k() { add.s32 %r1 %r2; }", 4, "',' or ';'")]
#[case(".entry k() {\n.sreg .b8 stack[8]; }", 5, "a directive that we know")]
#[case(".entry k() { ret;", 4, "a name")]
#[case("\n.func f() { ret; }", 5, "a module directive that we know")]
#[case(".entry k() { mov.u32 %r1, 0q7; }", 4, "an operand")]
fn what_is_no_ptx_is_an_error(#[case] text: &str, #[case] line: u32, #[case] expected: &str) {
    let error = parse(&format!("{HEAD}{text}")).unwrap_err();
    assert_eq!((error.line, error.expected.as_str()), (line, expected), "{error}");
}

/// Instructions of a known name with modifiers or operands that we do not know do not decode either.
#[test]
fn what_does_not_decode_is_counted() {
    let text = format!(
        "{HEAD}.entry k() {{ .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %d<9>;\n\
         add.f8 %d1, %d2, %d3; add.s32 %r1, %r2; add.s32 %r1, %r2, %r9; add.s32 %r1, %r2, %r3; ex2.f32 %f1, %f2;\n\
         mma.sync.x; mma.sync.x; cvt.s32.f32 %r1, %f1; cvt.rzi.s32.f32 %r1, %f1;\n\
         ld.global.v4.u32 {{%r1, %r2}}, [%d1]; ld.nowhere.u32 %r1, [%d1]; bra NOWHERE; }}"
    );
    let unknown = unknown_instructions(&parse(&text).unwrap());
    let expected = [
        ("add.f8", 1),
        ("add.s32", 2),
        ("bra", 1),
        ("cvt.s32.f32", 1),
        ("ex2.f32", 1),
        ("ld.global.v4.u32", 1),
        ("ld.nowhere.u32", 1),
        ("mma.sync.x", 2),
    ];
    assert_eq!(unknown, expected.map(|(name, count)| (name.to_string(), count)).into());
}
