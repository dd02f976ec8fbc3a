//! Compiles all kernels for NVIDIA GPUs, prints what became of them, and fails where that exceeds the limits. Needs no GPU,
//! but NVIDIA's compilers: of the toolkit that `CUDA_PATH` names, which `kernels/fetch-cuda.sh` fetches.
//!
//! Without a toolkit it says so and succeeds; with `MLA_REQUIRE=offline` it fails.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use clap::Parser;
use mla_kernels::offline::{Arch, Entry, Limits, Report, Toolchain, entries};

/// Compiles the kernels for NVIDIA GPUs and holds them against limits.
#[derive(Parser)]
struct Options {
    /// Only kernels whose names contain this.
    #[arg(long, default_value = "")]
    filter: String,
    /// Keep what the compilers make of each kernel here: CUDA C++, PTX, machine code and its text.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Of all kernels only every Nth, from the Kth on, counted from 0.
    #[arg(long, value_name = "K/N", default_value = "0/1", value_parser = part)]
    part: (usize, usize),
    /// The file of the limits.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/offline-limits.txt"))]
    limits: PathBuf,
    /// Set the limits of registers (rounded up to a multiple of 8) and shared memory to what the kernels use.
    #[arg(long, conflicts_with_all = ["filter", "part"])]
    write_limits: bool,
}

fn part(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    numbers.filter(|(k, n)| k < n).ok_or_else(|| "two numbers K/N, K below N".into())
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match check(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is well.
fn check(options: &Options) -> Result<bool, Failure> {
    let root = std::env::var_os("CUDA_PATH").map_or_else(|| "/usr/local/cuda".into(), PathBuf::from);
    let toolchain = match Toolchain::open(&root) {
        Ok(toolchain) => toolchain,
        Err(error) => {
            eprintln!("The kernels were not compiled: {error}. CUDA_PATH=$(kernels/fetch-cuda.sh) fetches one.");
            let required = std::env::var("MLA_REQUIRE").unwrap_or_default();
            return Ok(!required.split(',').any(|name| name.trim() == "offline"));
        }
    };
    let mut limits = Limits::read(&std::fs::read_to_string(&options.limits)?)?;
    let temporary = tempfile::tempdir()?;
    let folder = options.out.as_deref().unwrap_or(temporary.path());

    let started = Instant::now();
    let entries = entries();
    let chosen = entries.iter().filter(|entry| entry.name().contains(&options.filter));
    let all = chosen.flat_map(|entry| entry.archs().iter().map(move |&arch| (entry, arch))).enumerate();
    let (k, n) = options.part;
    let jobs: Vec<Job> = all.filter(|(i, _)| i % n == k).map(|(_, job)| job).collect();
    let results = compile_all(&jobs, &toolchain, folder);
    print_table(&jobs, &results);
    println!("{} kernels compiled in {:.0} s", jobs.len(), started.elapsed().as_secs_f64());

    if options.write_limits && results.iter().all(Result::is_ok) {
        let done = jobs.iter().zip(&results).filter_map(|((entry, arch), result)| {
            result.as_ref().ok().map(|report| (entry.name(), arch.name(), report))
        });
        limits.refresh(&done.collect::<Vec<_>>());
        std::fs::write(&options.limits, limits.write())?;
        println!("wrote {}", options.limits.display());
    }
    let violations = violations(&entries, &jobs, &results, &limits);
    if !violations.is_empty() {
        println!("\n{} violations of {}:", violations.len(), options.limits.display());
        violations.iter().for_each(|violation| println!("{violation}"));
    }
    Ok(violations.is_empty())
}

/// A kernel, and where it is to run.
type Job<'a> = (&'a Entry, Arch);
/// What became of it.
type Outcome = Result<Report, String>;

/// Compiles all kernels, on all cores.
fn compile_all(jobs: &[Job], toolchain: &Toolchain, folder: &Path) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(vec![Err(String::new()); jobs.len()]);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some((index, (entry, arch))) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(index).map(|job| (index, job))
                } {
                    let outcome = entry.compile(*arch, toolchain, folder).map_err(|error| error.to_string());
                    outcomes.lock().expect("no thread panics with it")[index] = outcome;
                }
            });
        }
    });
    outcomes.into_inner().expect("no thread panics with it")
}

fn print_table(jobs: &[Job], outcomes: &[Outcome]) {
    let width = jobs.iter().map(|(entry, _)| entry.name().len()).max().unwrap_or(0);
    println!("{:width$} arch     regs spills  stack  shared  instr  opcodes", "kernel");
    for ((entry, arch), outcome) in jobs.iter().zip(outcomes) {
        let row = match outcome {
            Ok(r) => format!(
                "{:5} {:6} {:6} {:7} {:6}  {}",
                r.registers,
                r.spill_bytes,
                r.stack_bytes,
                r.shared_bytes,
                r.instructions,
                r.opcodes()
            ),
            Err(_) => "not compiled".into(),
        };
        println!("{:width$} {:7} {row}", entry.name(), arch.name());
    }
}

/// All that fails, in the order of the table. Lines of the limits without a kernel count too.
fn violations(entries: &[Entry], jobs: &[Job], outcomes: &[Outcome], limits: &Limits) -> Vec<String> {
    let of_kernels = jobs.iter().zip(outcomes).flat_map(|((entry, arch), outcome)| {
        let violations = match outcome {
            Ok(report) => limits.violations(entry.name(), arch.name(), report),
            Err(error) => vec![error.clone()],
        };
        violations.into_iter().map(|text| format!("{} {}: {text}", entry.name(), arch.name()))
    });
    let known: Vec<(&str, &str)> =
        entries.iter().flat_map(|entry| entry.archs().iter().map(|arch| (entry.name(), arch.name()))).collect();
    of_kernels.chain(limits.unused(&known)).collect()
}
