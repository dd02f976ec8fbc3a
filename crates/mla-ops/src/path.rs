//! Which implementation runs, and why.

use std::fmt;

use burn::tensor::Device;

use crate::independent::is_flex;
use crate::ops::mla_decode::MlaDecodeProblem;

/// An implementation of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Ordinary tensor operations.
    Reference,
    /// CubeCL kernels that every GPU runs.
    Portable,
}

/// A choice and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathChoice {
    /// What runs.
    pub path: Path,
    /// Why, in a sentence.
    pub reason: String,
}

impl fmt::Display for PathChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = match self.path {
            Path::Reference => "reference",
            Path::Portable => "portable",
        };
        write!(f, "{path}: {}", self.reason)
    }
}

/// Which implementation of [`mla_decode`](crate::mla_decode) runs for a problem on a device.
pub fn explain_path(_problem: &MlaDecodeProblem, device: &Device) -> PathChoice {
    if is_flex(device) {
        let reason = format!("tensor operations, the implementation on {device:?}");
        return PathChoice { path: Path::Reference, reason };
    }
    let reason = format!("kernels without matrix instructions, the implementation on {device:?}");
    PathChoice { path: Path::Portable, reason }
}
