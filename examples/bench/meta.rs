//! What was measured where.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use burn::tensor::{DType, Device};
use serde_json::{Map, Value, json};

/// Versions are those of the build, so they are taken from the lock file of the build.
const LOCK: &str = include_str!("../../Cargo.lock");

/// Device, versions, commit, date, command line.
pub fn collect(name: &str, device: &Device, dtype: DType) -> Map<String, Value> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut meta = Map::new();
    meta.insert("device".into(), json!(name));
    meta.insert("backend".into(), json!(format!("{device:?}")));
    meta.insert("dtype".into(), json!(dtype_name(dtype)));
    meta.insert("date".into(), json!(utc(now)));
    meta.insert("argv".into(), json!(std::env::args().skip(1).collect::<Vec<_>>()));
    for package in ["burn-mla", "burn", "cubecl"] {
        meta.extend(version(package).map(|version| (package.to_string(), json!(version))));
    }
    meta.extend(output("git", &["rev-parse", "--short", "HEAD"]).map(|commit| ("commit".to_string(), json!(commit))));
    meta.extend(gpu_state("gpu_start"));
    meta
}

/// Clocks, power and temperature of an NVIDIA GPU, if there is one.
pub fn gpu_state(key: &str) -> Option<(String, Value)> {
    let query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu";
    output("nvidia-smi", &[query, "--format=csv,noheader"]).map(|line| (key.to_string(), json!(line)))
}

/// As the field writes it: `bf16`.
pub fn dtype_name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// The standard output of a program that is there and succeeds.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// The version of a package in the lock file.
fn version(package: &str) -> Option<&'static str> {
    let after = LOCK.split_once(&format!("name = \"{package}\"\nversion = \""))?.1;
    after.split('"').next()
}

/// Date and time of a Unix time.
fn utc(seconds: u64) -> String {
    // Days from 0000-03-01, so that the leap day is the last of its year; 400 years have 146097 days.
    let days = seconds / 86400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}
