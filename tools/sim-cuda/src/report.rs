//! What a failed launch prints.
use crate::config::Config;
use crate::module::Call;
use crate::nvrtc;
use ptx_sim::{CudaLine, SimError};
use std::fmt::Write;

/// The launch, what went wrong, and the lines of PTX and CUDA where it did.
pub fn text(call: &Call, error: &SimError, config: &Config) -> String {
    let module = &call.function.module;
    let extent = |[x, y, z]: [u32; 3]| format!("{x},{y},{z}");
    let mut text = format!(
        "\nsim-cuda: kernel {} failed (grid {}, block {}, {} bytes of dynamic shared memory, seed {}{})\n  {error}\n",
        call.function.entry().name,
        extent(call.grid),
        extent(call.block),
        call.dynamic_shared,
        config.seed,
        config.adversary
    );
    let mut add = |label: String, line: Option<&str>| {
        if let Some(line) = line {
            let _ = writeln!(text, "  {label}: {}", line.trim());
        }
    };
    let line = |text: &'_ str, number: u32| -> Option<String> {
        text.lines().nth((number as usize).checked_sub(1)?).map(str::to_string)
    };
    add(format!("PTX  {:>5}", error.place.line), line(&module.ptx, error.place.line).as_deref());
    let source = nvrtc::source(&module.ptx);
    for CudaLine { file, line: number } in &error.place.cuda {
        let source = match &source {
            // NVRTC's name of a program that has none.
            Some(source) if file.ends_with("default_program") => Some(source.clone()),
            _ => std::fs::read_to_string(file).ok(),
        };
        add(format!("CUDA {number:>5}"), source.and_then(|source| line(&source, *number)).as_deref());
    }
    text
}
