//! Recorded launches survive the way through a folder and run again at their addresses.
use ptx_sim::{Fault, Memory, Range, Recorded, SimError, Trace, TraceError, parse};
use std::path::{Path, PathBuf};

/// `out[i] = in[i] + 1` for 32 words.
const PTX: &str = ".version 9.0\n.target sm_90a\n.visible .entry add(.param .u64 a, .param .u64 b)\n{
    .reg .b64 %rd<5>; .reg .b32 %r<4>;
    ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd2], %r2; ret; }";

fn words(first: u32) -> Vec<u8> {
    (first..first + 32).flat_map(u32::to_le_bytes).collect()
}

fn trace() -> Trace {
    let addresses = [0x7f12_3400_0200, 0x3_0200_0000];
    Trace {
        launch: Recorded {
            module: PathBuf::from("../modules/add.ptx"),
            entry: "add".to_string(),
            grid: [1; 3],
            block: [32, 1, 1],
            cluster: [1; 3],
            params: addresses.iter().map(|a: &u64| a.to_le_bytes().to_vec()).collect(),
            allocations: addresses.map(|address| Range { address, bytes: 128 }).to_vec(),
            ..Recorded::default()
        },
        ptx: PTX.to_string(),
        before: vec![words(7), vec![0xff; 128]],
        after: vec![words(7), words(8)],
    }
}

#[test]
fn a_saved_trace_is_loaded_and_gives_the_recorded_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0001");
    trace().save(&path).unwrap();
    assert!(!path.join("0.after").exists(), "what did not change is not written twice");
    let loaded = Trace::load(&path).unwrap();
    assert_eq!(loaded, trace());
    assert_eq!(loaded.run(3).unwrap().memory, loaded.after);
}

#[test]
fn another_module_runs_on_the_same_memory() {
    let module = parse(&PTX.replace("%r2, 1;", "%r2, 2;")).unwrap();
    assert_eq!(trace().run_module(&module, 1).unwrap().memory[1], words(9));
    let module = parse(&PTX.replace("%r1, 4;", "%r1, 8;")).unwrap();
    let error = trace().run_module(&module, 1).unwrap_err();
    assert!(matches!(error, SimError { kind: Fault::OutOfBounds { .. }, .. }), "{error}");
}

#[test]
fn missing_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let named = |error: TraceError, name: &str| assert!(error.to_string().contains(name), "{error}");
    named(Trace::load(Path::new("no such folder")).unwrap_err(), "launch.json");
    let path = folder.path().join("0001");
    trace().save(&path).unwrap();
    std::fs::write(path.join("1.before"), [1, 2, 3]).unwrap();
    named(Trace::load(&path).unwrap_err(), "1.before: not the contents of an allocation of 128 bytes");
    std::fs::write(path.join("launch.json"), "{}").unwrap();
    named(Trace::load(&path).unwrap_err(), "launch.json");
}

#[test]
fn an_address_is_given_once() {
    let mut memory = Memory::new();
    let first = memory.alloc_at(0x1_0000, &[7; 64]).unwrap();
    for (address, bytes) in [(0x1_0000, 1), (0x1_0030, 64), (0xfff0, 17), (0x1_0001, 4), (0x1000_0000_0000, 16), (0, 0)]
    {
        let error = memory.alloc_at(address, &vec![0; bytes]).unwrap_err();
        assert!(matches!(error, Fault::BadAllocation { address: at, .. } if at == address), "{error}");
    }
    memory.alloc_at(0x1_0040, &[1; 16]).unwrap();
    assert_eq!(memory.around(0x1_003f), Some((first, 64)));
    assert_eq!(memory.ranges().collect::<Vec<_>>(), [0x1_0000..0x1_0040, 0x1_0040..0x1_0050]);
    memory.free(first);
    assert_eq!((memory.around(0x1_003f), memory.read(first)), (None, Vec::new()));
    let again = memory.alloc_at(0x1_0020, &[9; 16]).unwrap();
    assert_eq!(memory.read(again), [9; 16]);
}

#[test]
fn copies_from_and_to_any_byte() {
    let mut memory = Memory::new();
    let bytes: Vec<u8> = (0..23).collect();
    let buffer = memory.alloc(&bytes);
    let at = memory.address(buffer);
    for (from, to) in [(0, 23), (1, 2), (3, 9), (6, 6), (23, 23)] {
        assert_eq!(memory.copy_from(at + from as u64, (to - from) as u64).unwrap(), &bytes[from..to]);
    }
    memory.copy_to(at + 5, &[50, 51, 52, 53, 54, 55]).unwrap();
    let expected: Vec<u8> = (0..5).chain(50..56).chain(11..23).collect();
    assert_eq!(memory.read(buffer), expected);
    assert!(matches!(memory.copy_to(at + 20, &[0; 4]), Err(Fault::OutOfBounds { bytes: 4, .. })));
    assert!(matches!(memory.copy_from(at + 24, 0), Err(Fault::OutOfBounds { .. })));
}
