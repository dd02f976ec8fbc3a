//! Which implementation runs, and why.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "_gpu")]
use burn::backend::{DispatchDevice, cubecl::dtype_to_elem_type};
use burn::tensor::Device;
#[cfg(feature = "_gpu")]
use mla_kernels::mla_decode::{DecodeKernel, DecodeSizes, has_kernel};
use thiserror::Error;

use crate::MlaDecodeProblem;

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
    /// The kernel for NVIDIA's Blackwell of data centers, with TMA and tcgen05.
    Sm100,
}

/// A choice and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathChoice {
    /// What runs.
    pub path: Path,
    /// Why, in a sentence.
    pub reason: String,
}

impl Path {
    /// All of them, those for fewer devices last.
    pub const ALL: [Path; 5] = [Path::Reference, Path::Portable, Path::PortableMma, Path::Sm90, Path::Sm100];

    /// The kernel that it is; none for [`Path::Reference`].
    #[cfg(feature = "_gpu")]
    pub(crate) fn kernel(self) -> Option<DecodeKernel> {
        match self {
            Path::Reference => None,
            Path::Portable => Some(DecodeKernel::Plain),
            Path::PortableMma => Some(DecodeKernel::Mma),
            Path::Sm90 => Some(DecodeKernel::Sm90),
            Path::Sm100 => Some(DecodeKernel::Sm100),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Reference => "reference",
            Path::Portable => "portable",
            Path::PortableMma => "portable-mma",
            Path::Sm90 => "sm90",
            Path::Sm100 => "sm100",
        })
    }
}

/// A text that names no [`Path`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the path is {0:?}, expected reference, portable, portable-mma, sm90 or sm100")]
pub struct UnknownPath(pub String);

impl FromStr for Path {
    type Err = UnknownPath;

    fn from_str(name: &str) -> Result<Self, UnknownPath> {
        Path::ALL.into_iter().find(|path| path.to_string() == name).ok_or_else(|| UnknownPath(name.to_string()))
    }
}

impl fmt::Display for PathChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

/// Which implementation of [`mla_decode`](crate::mla_decode) runs for a problem on a device, where the options name none.
pub fn explain_path(problem: &MlaDecodeProblem, device: &Device) -> PathChoice {
    let path = available_paths(problem, device).first().copied().unwrap_or(Path::Portable);
    let what = match path {
        Path::Reference => {
            return PathChoice { path, reason: format!("tensor operations, the implementation on {device:?}") };
        }
        Path::Portable => "no matrix instructions",
        Path::PortableMma => "matrix instructions",
        Path::Sm90 => "TMA and wgmma",
        Path::Sm100 => "TMA and tcgen05",
    };
    PathChoice { path, reason: format!("{what} for {} on {device:?}", words(problem)) }
}

/// The implementations of [`mla_decode`](crate::mla_decode) that a device has for a problem, the fastest first.
pub fn available_paths(problem: &MlaDecodeProblem, device: &Device) -> Vec<Path> {
    #[cfg(feature = "_gpu")]
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
        let client = cube.client();
        let has = |path: &Path| path.kernel().is_some_and(|kernel| has_kernel(&client, kernel, &sizes));
        return Path::ALL.into_iter().rev().filter(has).collect();
    }
    let _ = (problem, device);
    vec![Path::Reference]
}

/// What decides the path, for a reader.
pub(crate) fn words(problem: &MlaDecodeProblem) -> String {
    let MlaDecodeProblem { dtype, key_width, value_width, page_size, .. } = problem;
    format!("{dtype:?}, widths of {key_width} and {value_width} and pages of {page_size}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_names() {
        for path in Path::ALL {
            assert_eq!(path.to_string().parse(), Ok(path));
        }
        let error = "sm70".parse::<Path>().unwrap_err().to_string();
        assert_eq!(error, "the path is \"sm70\", expected reference, portable, portable-mma, sm90 or sm100");
    }
}
