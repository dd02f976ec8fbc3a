//! What NVRTC wrote for all of our kernels, where `PTX_CORPUS` names a folder of it: everything parses, and what does
//! not decode is counted.
use ptx_sim::{parse, unknown_instructions};
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn every_kernel_parses() {
    let Ok(folder) = std::env::var("PTX_CORPUS") else { return };
    let mut failures = Vec::new();
    let (mut unknown, mut all, mut files, mut whole) = (BTreeMap::<String, usize>::new(), BTreeSet::new(), 0, 0);
    for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_none_or(|e| e != "ptx") {
            continue;
        }
        files += 1;
        match parse(&std::fs::read_to_string(&path).unwrap()) {
            Ok(module) => {
                all.extend(module.entries.iter().flat_map(|e| e.instrs.iter().map(|i| i.opcode.clone())));
                let missing = unknown_instructions(&module);
                whole += usize::from(missing.is_empty());
                missing.into_iter().for_each(|(opcode, count)| *unknown.entry(opcode).or_default() += count);
            }
            Err(error) => failures.push(format!("{}: {error}", path.display())),
        }
    }
    println!("{files} files, {whole} of them decode whole; {} of {} opcodes", all.len() - unknown.len(), all.len());
    unknown.iter().for_each(|(opcode, count)| println!("{count:6} {opcode}"));
    assert!(files > 0, "no PTX in {folder}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
