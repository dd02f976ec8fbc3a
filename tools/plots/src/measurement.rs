//! A file of `docs/measurements`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What was measured where, of several programs.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// The GPU, as its driver names it.
    pub machine: String,
    pub driver: String,
    /// Of this repository.
    pub commit: String,
    pub date: String,
    /// The fastest copy or sweep of memory, GB/s.
    pub memory_gbps: f64,
    /// A product of two bf16 matrices of 8192 x 8192, TFLOP/s.
    pub matmul_tflops: f64,
    pub cases: Vec<Case>,
}

/// A case, with what each program reached.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    pub group: String,
    pub name: String,
    /// What the machine allows at most, in the unit of the values.
    pub bound: f64,
    /// FLOPs for each byte that has to be moved, where that is what sets the bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flop_per_byte: Option<f64>,
    /// By program: TFLOP/s, or tokens per second.
    pub values: BTreeMap<String, f64>,
}

impl Measurement {
    /// A line for each case.
    pub fn to_json(&self) -> Result<String, String> {
        let text = serde_json::to_string(self).map_err(|error| error.to_string())?;
        Ok(text.replace("{\"group\"", "\n{\"group\"") + "\n")
    }

    pub fn from_json(value: &Value) -> Result<Self, String> {
        Self::deserialize(value).map_err(|error| error.to_string())
    }

    /// The programs that have values, ours first.
    pub fn peers(&self) -> Vec<&str> {
        let mut peers: Vec<&str> = self.cases.iter().flat_map(|case| case.values.keys().map(String::as_str)).collect();
        peers.sort_by_key(|&peer| (peer != crate::pick::OURS, peer));
        peers.dedup();
        peers
    }

    /// Where and when.
    pub fn origin(&self) -> String {
        let Self { machine, driver, commit, date, .. } = self;
        format!("{machine}, driver {driver}, {date}, commit {commit}")
    }
}
