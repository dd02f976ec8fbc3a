//! Reads recorded launches, alters their kernels, prints what the simulator noticed.
use clap::Parser;
use ptx_mutate::explain::{ExplainError, Explanation, read};
use ptx_mutate::{
    Case, Judged, MapEdit, Mutant, Outcome, Reference, Run, Verdict, Verdicts, fingerprint, judge, map_mutants,
    mutants, report, sample,
};
use ptx_sim::{Adversary, Launch, Memory, Module, Param, ParseError, SimError, TensorMap, parse};
use ptx_sim::{Trace, TraceError};
use rayon::prelude::*;
use regex::Regex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Alters kernels in one place at a time and runs them on the simulator.
#[derive(Parser)]
struct Args {
    /// Folders with traces, or with folders of traces.
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// Kernels to alter: a pattern of their names.
    #[arg(long, default_value = "")]
    kernel: Regex,
    /// Mutants to run: a pattern of their ids.
    #[arg(long, default_value = "")]
    only: Regex,
    /// Explanations of survivors (TOML).
    #[arg(long)]
    explain: Vec<PathBuf>,
    /// Schedules to try.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// What launches of every second schedule do that hardware may do but rarely does: all, or some of lanes, waits, arrivals.
    #[arg(long, default_value = "")]
    adversary: Adversary,
    /// Runs so many mutants only.
    #[arg(long)]
    sample: Option<usize>,
    /// Chooses the sample.
    #[arg(long, default_value_t = 0)]
    sample_seed: u64,
    /// Keeps verdicts in a file, and takes those that it has.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// CUDA source of the kernel, for the report.
    #[arg(long)]
    cuda: Option<PathBuf>,
    /// Only lists the mutants.
    #[arg(long)]
    list: bool,
    /// Also prints how each mutant was killed.
    #[arg(long)]
    verbose: bool,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error(transparent)]
    Explain(#[from] ExplainError),
    #[error("{}: {error}", path.display())]
    File { path: PathBuf, error: std::io::Error },
    #[error("{kernel}: {error}")]
    Parse { kernel: String, error: ParseError },
    #[error("{case}, without a change: {error}")]
    Reference { case: String, error: SimError },
    #[error("no trace of a kernel that matches {0}")]
    NoTraces(String),
}

/// A recorded launch.
struct Recorded {
    name: String,
    trace: Trace,
    adversary: Adversary,
}

impl Case for Recorded {
    fn name(&self) -> &str {
        &self.name
    }

    fn maps(&self) -> Vec<(usize, TensorMap)> {
        let params = self.trace.launch.params.iter().enumerate();
        let map =
            |(param, bytes): (usize, &Vec<u8>)| Some((param, TensorMap::decode(bytes.as_slice().try_into().ok()?)?));
        params.filter_map(map).collect()
    }

    fn run(&self, run: &Run) -> Result<Outcome, SimError> {
        let adversary = if run.seed.is_multiple_of(2) { self.adversary } else { Adversary::default() };
        let mut memory = Memory::new();
        let allocations = self.trace.launch.allocations.iter().zip(&self.trace.before);
        let buffers: Result<Vec<_>, _> =
            allocations.map(|(range, bytes)| memory.alloc_at(range.address, bytes)).collect();
        let buffers = buffers?;
        let mut launch = self.trace.launch.with(run.module);
        if let Some(MapEdit { param, field }) = run.map
            && let Some((_, map)) = self.maps().iter().find(|(number, _)| *number == param)
            && let Some(bytes) = field.change(map).and_then(|map| map.encode().ok())
        {
            launch.params[param] = Param::Bytes(bytes.to_vec());
        }
        let stats = Launch { seed: run.seed, adversary, max_instructions: run.limit, coverage: run.coverage, ..launch }
            .run(&memory)?;
        let memory = buffers.into_iter().map(|buffer| memory.read(buffer)).collect();
        Ok(Outcome { memory, instructions: stats.warp_instructions, longest: stats.longest_cta })
    }
}

/// A kernel as it was compiled for one form, with its launches.
struct Kernel {
    name: String,
    text: String,
    cases: Vec<Recorded>,
}

/// A kernel that is ready to be altered.
struct Prepared<'a> {
    kernel: &'a Kernel,
    module: Module,
    entry: usize,
    mutants: Vec<Mutant>,
    cases: Vec<Reference<'a>>,
    /// Of module, cases and seeds.
    fingerprint: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all mutants were noticed or have an explanation.
fn run(args: &Args) -> Result<bool, Error> {
    let kernels = kernels(args)?;
    let seeds: Vec<u64> = (1..=args.seeds.max(1)).collect();
    let prepared = kernels.iter().map(|kernel| prepare(kernel, &seeds, args)).collect::<Result<Vec<_>, _>>()?;
    let mut todo: Vec<(&Prepared, &Mutant)> =
        prepared.iter().flat_map(|p| p.mutants.iter().map(move |m| (p, m))).collect();
    let all = todo.len();
    if let Some(count) = args.sample {
        todo = sample(todo, count, args.sample_seed, |(p, m)| format!("{} {}", p.kernel.name, m.id));
    }
    if args.list {
        todo.iter().for_each(|(_, m)| println!("{} `{}`", m.id, m.ptx));
        return Ok(true);
    }
    println!("{} of {all} mutants, seeds {seeds:?}", todo.len());
    let start = Instant::now();
    let verdicts = verdicts(&todo, &seeds, args)?;
    println!("{:.0} s\n", start.elapsed().as_secs_f64());
    let whole = args.sample.is_none() && args.only.as_str().is_empty();
    let good = conclude(&todo, &verdicts, args, whole)?;
    Ok(good)
}

fn verdicts(todo: &[(&Prepared, &Mutant)], seeds: &[u64], args: &Args) -> Result<Vec<Verdict>, Error> {
    let file = |error| Error::File { path: args.resume.clone().unwrap_or_default(), error };
    let store = args.resume.as_ref().map_or(Ok(Verdicts::default()), |path| Verdicts::open(path)).map_err(file)?;
    // What a panic says is of no use among the reports of all threads.
    std::panic::set_hook(Box::new(|_| {}));
    let one = |(p, mutant): &(&Prepared, &Mutant)| {
        if let Some(verdict) = store.known(p.fingerprint, &mutant.id) {
            return Ok(verdict);
        }
        let verdict = judge(mutant, &p.module, p.entry, &p.cases, seeds);
        store.keep(p.fingerprint, &mutant.id, &verdict).map_err(file)?;
        Ok(verdict)
    };
    let verdicts = todo.par_iter().with_max_len(1).map(one).collect();
    drop(std::panic::take_hook());
    verdicts
}

fn conclude(todo: &[(&Prepared, &Mutant)], verdicts: &[Verdict], args: &Args, whole: bool) -> Result<bool, Error> {
    let mut explanations: Vec<Explanation> = Vec::new();
    for path in &args.explain {
        explanations.extend(read(path)?);
    }
    let source = args.cuda.as_ref().map(|path| text(path)).transpose()?.unwrap_or_default();
    let cuda: Vec<&str> = source.lines().collect();
    let mut good = true;
    let (mut used, mut about) = (vec![0; explanations.len()], vec![false; explanations.len()]);
    let mut at = 0;
    while let Some((p, _)) = todo.get(at) {
        let of_kernel = todo[at..].iter().take_while(|(other, _)| std::ptr::eq(*other, *p)).count();
        let lines: Vec<&str> = p.kernel.text.lines().collect();
        let pairs = todo[at..at + of_kernel].iter().zip(&verdicts[at..at + of_kernel]);
        let judged: Vec<Judged> = pairs
            .map(|((p, mutant), verdict)| {
                let reached = p.cases.iter().any(|case| case.reaches(mutant));
                Judged { kernel: &p.kernel.name, mutant, verdict, reached, text: &lines, cuda: &cuda }
            })
            .collect();
        println!("## {}\n", p.kernel.name);
        if args.verbose {
            judged.iter().for_each(|j| println!("{}: {:?}", j.mutant.id, j.verdict));
        }
        let found = report(&judged, &explanations);
        println!("{}", found.text);
        good &= found.open == 0 && found.stale == 0;
        used.iter_mut().zip(&found.used).for_each(|(all, used)| *all += used);
        about.iter_mut().zip(&explanations).for_each(|(about, e)| *about |= e.is_about(&p.kernel.name));
        at += of_kernel;
    }
    // What holds for one form of a kernel need not be needed for another.
    for ((explanation, _), _) in
        explanations.iter().zip(&about).zip(&used).filter(|((_, about), used)| whole && **about && **used == 0)
    {
        println!("Explanation is stale (no survivor): {explanation}");
        good = false;
    }
    Ok(good)
}

fn text(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|error| Error::File { path: path.to_path_buf(), error })
}

/// All traces of the kernels, by the kernel's text: another form is another kernel.
fn kernels(args: &Args) -> Result<Vec<Kernel>, Error> {
    let mut folders = Vec::new();
    for path in &args.traces {
        find(path, &mut folders)?;
    }
    folders.sort();
    let mut found: BTreeMap<(String, String), Vec<Recorded>> = BTreeMap::new();
    for folder in folders {
        let trace = Trace::load(&folder)?;
        if args.kernel.is_match(&trace.launch.entry) {
            let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
            let key = (trace.launch.entry.clone(), trace.ptx.clone());
            found.entry(key).or_default().push(Recorded { name, trace, adversary: args.adversary });
        }
    }
    if found.is_empty() {
        return Err(Error::NoTraces(args.kernel.to_string()));
    }
    Ok(found.into_iter().map(|((name, text), cases)| Kernel { name, text, cases }).collect())
}

/// The folders with a `launch.json` under a path.
fn find(path: &Path, found: &mut Vec<PathBuf>) -> Result<(), Error> {
    if path.join("launch.json").exists() {
        found.push(path.to_path_buf());
        return Ok(());
    }
    let file = |error| Error::File { path: path.to_path_buf(), error };
    for entry in std::fs::read_dir(path).map_err(file)? {
        let path = entry.map_err(file)?.path();
        if path.is_dir() {
            find(&path, found)?;
        }
    }
    Ok(())
}

fn prepare<'a>(kernel: &'a Kernel, seeds: &[u64], args: &Args) -> Result<Prepared<'a>, Error> {
    let parsed = parse(&kernel.text).map_err(|error| Error::Parse { kernel: kernel.name.clone(), error });
    let module = parsed?;
    let Some(entry) = module.entries.iter().position(|e| e.name == kernel.name) else {
        return Err(Error::NoTraces(kernel.name.clone()));
    };
    let reference = |case: &'a Recorded| {
        let reference = Reference::new(case, &module, module.entries[entry].instrs.len(), seeds);
        reference.map_err(|error| Error::Reference { case: case.name.clone(), error })
    };
    let mut cases = kernel.cases.iter().map(reference).collect::<Result<Vec<_>, _>>()?;
    cases.sort_by_key(Reference::instructions);
    println!("## {}\n", kernel.name);
    for case in &cases {
        let loose =
            if case.loose() > 0 { format!(", {} bytes depend on the seed", case.loose()) } else { String::new() };
        println!("- {}: {} warp instructions{loose}", case.name(), case.instructions());
    }
    println!();
    let mut mutants = mutants(&module, entry, &kernel.text);
    mutants.extend(map_mutants(&kernel.cases.first().map(Case::maps).unwrap_or_default()));
    mutants.retain(|m| args.only.is_match(&m.id));
    let names = cases.iter().map(|case| case.name().as_bytes());
    let (count, adversary) = (seeds.len().to_le_bytes(), args.adversary.to_string());
    let fingerprint = fingerprint(names.chain([kernel.text.as_bytes(), &count, adversary.as_bytes()]));
    Ok(Prepared { kernel, module, entry, mutants, cases, fingerprint })
}
