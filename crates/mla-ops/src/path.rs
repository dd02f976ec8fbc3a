//! Which implementation runs, and why.

use std::fmt;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::{DispatchDevice, cubecl::dtype_to_elem_type};
use burn::tensor::Device;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use mla_kernels::portable::mla_decode::{DecodeKernel, DecodeSizes};

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
    /// The kernel for NVIDIA's Hopper, with TMA and wgmma.
    Sm90,
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
            Path::Sm90 => "sm90",
        };
        write!(f, "{path}: {}", self.reason)
    }
}

/// Which implementation of [`mla_decode`](crate::mla_decode) runs for a problem on a device.
pub fn explain_path(problem: &MlaDecodeProblem, device: &Device) -> PathChoice {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let DispatchDevice::Cube(cube) = device.as_dispatch() {
        let &MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype } = problem;
        let elem = dtype_to_elem_type(dtype);
        // The sizes of cache and plan decide nothing here.
        let (pages, max_pages, cubes, capacity, causal) = (1, 1, 1, 1, true);
        let sizes = DecodeSizes {
            batch,
            query_len,
            heads,
            key_width,
            value_width,
            pages,
            page_size,
            max_pages,
            cubes,
            capacity,
            causal,
            elem,
        };
        let (path, what) = match sizes.kernel(&cube.client()) {
            DecodeKernel::Sm90 => (Path::Sm90, "TMA and wgmma"),
            DecodeKernel::Mma => (Path::PortableMma, "matrix instructions"),
            DecodeKernel::Plain => (Path::Portable, "no matrix instructions"),
        };
        let sizes = format!("{dtype:?}, widths of {key_width} and {value_width} and pages of {page_size}");
        return PathChoice { path, reason: format!("{what} for {sizes} on {device:?}") };
    }
    let _ = problem;
    PathChoice { path: Path::Reference, reason: format!("tensor operations, the implementation on {device:?}") }
}
