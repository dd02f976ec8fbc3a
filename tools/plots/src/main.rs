//! Draws `docs/pictures/*.svg` from `docs/measurements/*.json`.
//!
//!     cargo run -p plots                                        # all that are there
//!     cargo run -p plots -- decode ours.json peers.json ...     # picks the cases of decode.json first
//!
//! The pictures are `decode`, `prefill` and `models`; the files are those that `bench --out` and `examples/bench/peers` write, of one
//! machine and one commit.

mod draw;
mod pick;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A file of `docs/measurements`.
#[derive(Debug, Serialize, Deserialize)]
struct Measurement {
    /// GPU, driver, date and commit.
    origin: String,
    /// The fastest copy or sweep of memory.
    memory_gbps: f64,
    /// Of two bf16 matrices of 8192 x 8192.
    matmul_tflops: f64,
    cases: Vec<Case>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Case {
    group: String,
    name: String,
    /// Of models: tokens per second that the machine allows at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bound: Option<f64>,
    /// Of decode: FLOPs for each byte that has to be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    intensity: Option<f64>,
    /// By program: TFLOP/s, of models tokens per second.
    values: BTreeMap<String, f64>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("")).join("docs")
}

fn run(args: &[String]) -> Result<(), String> {
    if let Some((name, files)) = args.split_first() {
        let files = files.iter().map(|file| read(Path::new(file))).collect::<Result<Vec<Value>, _>>()?;
        let text = serde_json::to_string(&pick::measurement(name, &files)?).map_err(|error| error.to_string())?;
        // A line for each case.
        write(&docs().join(format!("measurements/{name}.json")), &(text.replace("{\"group\"", "\n{\"group\"") + "\n"))?;
    }
    drawn()?.iter().try_for_each(|(name, svg)| write(&docs().join(format!("pictures/{name}.svg")), svg))
}

/// The pictures of all measurements, with their names.
fn drawn() -> Result<Vec<(String, String)>, String> {
    let there = ["decode", "prefill", "models"].map(|name| (name, docs().join(format!("measurements/{name}.json"))));
    let there = there.into_iter().filter(|(_, path)| path.exists());
    there.map(|(name, path)| Ok((name.to_string(), draw::picture(name, &read(&path)?)))).collect()
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    println!("{}: {} bytes", path.display(), text.len());
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Nobody has to draw them by hand, and the README shows them.
#[test]
fn the_pictures_are_those_of_the_measurements() {
    let pictures = drawn().expect("measurements that can be drawn");
    let readme = fs::read_to_string(docs().join("../README.md")).expect("a README");
    for (name, svg) in &pictures {
        let path = format!("pictures/{name}.svg");
        let there = fs::read_to_string(docs().join(&path)).expect("a picture");
        assert!(there == *svg, "{path} is another picture: run `cargo run -p plots`");
        assert!(
            svg.len() < 8 << 10 && readme.contains(&format!("docs/{path}")),
            "{path} is too large, or not in the README"
        );
    }
    let [measurements, there] =
        ["measurements", "pictures"].map(|folder| fs::read_dir(docs().join(folder)).expect("a folder").count());
    assert!(there > 0 && there == pictures.len() && there == measurements);
}
