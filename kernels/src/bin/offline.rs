//! Compiles all kernels for NVIDIA GPUs and prints what became of them. Needs no GPU.

use std::path::PathBuf;
use std::process::ExitCode;

use mla_kernels::offline::{Toolchain, entries};

fn main() -> ExitCode {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let root = PathBuf::from(std::env::var("CUDA_PATH").unwrap_or_else(|_| "/usr/local/cuda".into()));
    let toolchain = match Toolchain::open(&root) {
        Ok(toolchain) => toolchain,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let folder = PathBuf::from(std::env::var("OFFLINE_OUT").unwrap_or_else(|_| "/tmp/offline".into()));
    let mut failed = false;
    println!(
        "{:44} {:8} {:>5} {:>6} {:>6} {:>7} {:>6}  opcodes",
        "kernel", "arch", "regs", "spills", "stack", "shared", "instr"
    );
    for entry in entries().iter().filter(|entry| entry.name.contains(&filter)) {
        for &arch in entry.archs {
            match entry.check(arch, &toolchain, &folder) {
                Ok(r) => {
                    println!(
                        "{:44} {:8} {:5} {:6} {:6} {:7} {:6}  {:?} {}",
                        entry.name,
                        arch.name(),
                        r.registers,
                        r.spill_bytes,
                        r.stack_bytes,
                        r.shared_bytes,
                        r.instructions,
                        r.opcodes,
                        r.warnings.join(" ")
                    );
                    failed |= r.spill_bytes > 0 || !r.warnings.is_empty();
                }
                Err(error) => {
                    println!("{:44} {:8} {error}", entry.name, arch.name());
                    failed = true;
                }
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
