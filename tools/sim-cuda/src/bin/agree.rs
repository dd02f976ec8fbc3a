//! Runs recorded launches on the simulator and compares the memory with what the device left there.
//!
//!     agree [--seeds N] FOLDER...
//!
//! Prints a line per kernel. Memory has no types: an allocation counts as the float type in which the two results are
//! closest, or as integers where they are close in none.
use half::{bf16, f16};
use ptx_sim::Trace;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Differences above this part of the largest value are no rounding: such memory holds no floats of this type.
const CLOSE: f64 = 0.05;

/// A type of the elements of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    F32,
    F16,
    Bf16,
    Other,
}

/// How far two results are apart.
#[derive(Debug, Clone, Copy, Default)]
struct Distance {
    absolute: f64,
    relative: f64,
    /// The largest absolute difference as a part of the largest value.
    scaled: f64,
}

/// What a kernel's launches came to.
#[derive(Debug, Default)]
struct Line {
    launches: usize,
    written: usize,
    equal: usize,
    /// Launches whose result depends on the seed.
    unstable: usize,
    distances: BTreeMap<Kind, Distance>,
    errors: Vec<String>,
}

fn main() -> ExitCode {
    let mut seeds = 3;
    let mut folders = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument != "--seeds" {
            folders.extend(traces(Path::new(&argument)));
            continue;
        }
        match arguments.next().and_then(|number| number.parse().ok()) {
            Some(number) if number > 0 => seeds = number,
            _ => return usage(),
        }
    }
    if folders.is_empty() {
        return usage();
    }
    folders.sort();
    let mut table: BTreeMap<String, Line> = BTreeMap::new();
    let mut sound = true;
    for folder in folders {
        match Trace::load(&folder) {
            Ok(trace) => add(table.entry(trace.launch.entry.clone()).or_default(), &trace, seeds),
            Err(error) => {
                eprintln!("{error}");
                sound = false;
            }
        }
    }
    print(&table);
    let differs = |line: &Line| !line.errors.is_empty() || line.distances.contains_key(&Kind::Other);
    if sound && !table.values().any(differs) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage() -> ExitCode {
    eprintln!("usage: agree [--seeds N] FOLDER...\nFolders that SIM_CUDA_TRACE wrote, or parents of them.");
    ExitCode::FAILURE
}

/// The folders of traces in a folder.
fn traces(folder: &Path) -> Vec<PathBuf> {
    if folder.join("launch.json").exists() {
        return vec![folder.to_path_buf()];
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).flat_map(|path| traces(&path)).collect()
}

/// Runs a launch with every seed.
fn add(line: &mut Line, trace: &Trace, seeds: u64) {
    line.launches += 1;
    let mut first: Option<Vec<Vec<u8>>> = None;
    for seed in 1..=seeds {
        let outcome = match trace.run(seed) {
            Ok(outcome) => outcome,
            Err(error) => {
                line.errors.push(format!("seed {seed}: {error}"));
                return;
            }
        };
        if first.as_ref().is_some_and(|first| *first != outcome.memory) {
            line.unstable += 1;
        }
        for ((before, device), simulated) in trace.before.iter().zip(&trace.after).zip(&outcome.memory) {
            compare(line, before, device, simulated);
        }
        first.get_or_insert(outcome.memory);
    }
}

/// Compares an allocation.
fn compare(line: &mut Line, before: &[u8], device: &[u8], simulated: &[u8]) {
    let written = (0..before.len()).filter(|&i| before[i] != device[i] || before[i] != simulated[i]);
    let (mut count, mut equal) = (0, 0);
    for i in written {
        count += 1;
        equal += usize::from(device[i] == simulated[i]);
    }
    line.written += count;
    line.equal += equal;
    if count == equal {
        return;
    }
    let f32s =
        |bytes: &[u8]| bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
    let halves = |bytes: &[u8], value: fn(u16) -> f64| {
        bytes.chunks_exact(2).map(|b| value(u16::from_le_bytes([b[0], b[1]]))).collect()
    };
    let f16s = |bytes: &[u8]| halves(bytes, |bits| f16::from_bits(bits).to_f64());
    let bf16s = |bytes: &[u8]| halves(bytes, |bits| bf16::from_bits(bits).to_f64());
    let candidates: [(Kind, Vec<f64>, Vec<f64>); 3] = [
        (Kind::F32, f32s(device), f32s(simulated)),
        (Kind::F16, f16s(device), f16s(simulated)),
        (Kind::Bf16, bf16s(device), bf16s(simulated)),
    ];
    let distances = candidates.iter().map(|(kind, a, b)| (*kind, distance(a, b)));
    let best = distances.min_by(|(_, a), (_, b)| a.scaled.total_cmp(&b.scaled));
    let (kind, found) = match best {
        Some((kind, found)) if found.scaled <= CLOSE => (kind, found),
        _ => (Kind::Other, Distance::default()),
    };
    let most = line.distances.entry(kind).or_default();
    most.absolute = most.absolute.max(found.absolute);
    most.relative = most.relative.max(found.relative);
    most.scaled = most.scaled.max(found.scaled);
}

fn distance(a: &[f64], b: &[f64]) -> Distance {
    let mut found = Distance::default();
    let mut largest: f64 = 0.0;
    for (&a, &b) in a.iter().zip(b) {
        largest = if a.is_finite() { largest.max(a.abs()) } else { largest };
        if a == b || a.is_nan() && b.is_nan() {
            continue;
        }
        let absolute = if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() };
        found.absolute = found.absolute.max(absolute);
        found.relative = found.relative.max(absolute / a.abs().max(b.abs()));
    }
    found.scaled = if found.absolute > 0.0 { found.absolute / largest } else { 0.0 };
    found
}

fn print(table: &BTreeMap<String, Line>) {
    println!("{:<60} {:>8} {:>10} {:>8} {:>8}  largest difference", "kernel", "launches", "bytes", "equal", "unstable");
    for (name, line) in table {
        let equal = if line.written == 0 { 100.0 } else { 100.0 * line.equal as f64 / line.written as f64 };
        let mut notes: Vec<String> = line.distances.iter().map(|(kind, distance)| note(*kind, distance)).collect();
        notes.extend(line.errors.first().cloned());
        println!(
            "{name:<60} {:>8} {:>10} {:>7.3}% {:>8}  {}",
            line.launches,
            line.written,
            equal,
            line.unstable,
            notes.join("; ")
        );
    }
}

fn note(kind: Kind, distance: &Distance) -> String {
    let name = match kind {
        Kind::F32 => "f32",
        Kind::F16 => "f16",
        Kind::Bf16 => "bf16",
        Kind::Other => return "DIFFERENT INTEGERS".to_string(),
    };
    let Distance { absolute, relative, scaled } = distance;
    format!("{name} {absolute:.1e} (relative {relative:.1e}, of the largest value {scaled:.1e})")
}
