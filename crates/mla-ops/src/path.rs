//! Which implementation runs, and why.

use std::fmt;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::{DispatchDevice, cubecl::dtype_to_elem_type};
use burn::tensor::Device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use mla_kernels::portable::mla_decode::{DecodeKernel, has_kernel};

use crate::ops::mla_decode::MlaDecodeProblem;

/// An implementation of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Ordinary tensor operations.
    Reference,
    /// CubeCL kernels that every GPU runs.
    Portable,
    /// The CubeCL kernel for GPUs with matrix instructions.
    PortableMma,
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
            Path::PortableMma => "portable-mma",
        };
        write!(f, "{path}: {}", self.reason)
    }
}

/// Which implementation of [`mla_decode`](crate::mla_decode) runs for a problem on a device.
pub fn explain_path(problem: &MlaDecodeProblem, device: &Device) -> PathChoice {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let DispatchDevice::Cube(cube) = device.as_dispatch() {
        let &MlaDecodeProblem { key_width, value_width, dtype, .. } = problem;
        let elem = dtype_to_elem_type(dtype);
        let what = format!("{dtype:?} and widths of {key_width} and {value_width} on {device:?}");
        return match has_kernel(&cube.client(), DecodeKernel::Mma, elem, (key_width, value_width)) {
            true => PathChoice { path: Path::PortableMma, reason: format!("matrix instructions for {what}") },
            false => PathChoice { path: Path::Portable, reason: format!("no matrix instructions for {what}") },
        };
    }
    let _ = problem;
    PathChoice { path: Path::Reference, reason: format!("tensor operations, the implementation on {device:?}") }
}
