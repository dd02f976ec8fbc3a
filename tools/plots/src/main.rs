//! Draws `docs/pictures/*.svg` from `docs/measurements/*.json`.
//!
//!     cargo run -p plots                                        # all that are there
//!     cargo run -p plots -- decode ours.json peers.json ...     # picks the cases of decode.json first
//!
//! The pictures are `decode`, `prefill` and `models`; the files are those that `bench --out` and `examples/bench/peers` write,
//! of one machine and one commit.

mod bars;
mod measurement;
mod pick;
mod roofline;
mod svg;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use measurement::Measurement;

/// What there is to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Picture {
    Decode,
    Prefill,
    Models,
}

impl Picture {
    fn named(name: &str) -> Result<Self, String> {
        match name {
            "decode" => Ok(Self::Decode),
            "prefill" => Ok(Self::Prefill),
            "models" => Ok(Self::Models),
            _ => Err(format!("there is no picture {name}, only decode, prefill and models")),
        }
    }

    fn draw(self, measurement: &Measurement) -> String {
        match self {
            Self::Decode => roofline::draw(measurement, "mla_decode: bf16, latents of 576 / 512 channels"),
            Self::Prefill => bars::draw(measurement, "Attention of prompts: bf16, causal", &bars::TFLOPS),
            Self::Models => bars::draw(measurement, "Whole models: bf16, random weights", &bars::TOKENS),
        }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args, &docs()) {
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

fn run(args: &[String], docs: &Path) -> Result<(), String> {
    if let Some((name, files)) = args.split_first() {
        let files = files.iter().map(|file| read(Path::new(file))).collect::<Result<Vec<_>, _>>()?;
        let picked = pick::measurement(Picture::named(name)?, &files)?;
        write(&docs.join("measurements").join(format!("{name}.json")), &picked.to_json()?)?;
    }
    for (name, svg) in drawn(docs)? {
        write(&docs.join("pictures").join(format!("{name}.svg")), &svg)?;
    }
    Ok(())
}

/// The pictures of all measurements, with their names.
fn drawn(docs: &Path) -> Result<Vec<(String, String)>, String> {
    let folder = docs.join("measurements");
    let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let draw = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let svg = Picture::named(&name)?.draw(&Measurement::from_json(&read(path)?)?);
        Ok((name, svg))
    };
    paths.iter().map(draw).collect()
}

fn read(path: &Path) -> Result<serde_json::Value, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, text))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{}: {} bytes", path.display(), text.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody has to draw them by hand, and the README shows them.
    #[test]
    fn the_pictures_are_those_of_the_measurements() {
        let pictures = drawn(&docs()).expect("measurements that can be drawn");
        assert!(!pictures.is_empty());
        let readme = fs::read_to_string(docs().join("../README.md")).expect("a README");
        for (name, svg) in &pictures {
            let path = format!("pictures/{name}.svg");
            let there = fs::read_to_string(docs().join(&path)).expect("a picture");
            assert!(there == *svg, "{path} is another picture: run `cargo run -p plots`");
            assert!(svg.len() < 8 << 10, "{path} has {} bytes", svg.len());
            assert!(readme.contains(&format!("docs/{path}")), "the README does not show {path}");
        }
        let there = fs::read_dir(docs().join("pictures")).expect("pictures").count();
        assert_eq!(there, pictures.len(), "a picture without a measurement");
    }
}
