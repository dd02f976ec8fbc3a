//! The implementations of operations, by name, and which of them runs.

mod explain;
pub(crate) mod problem;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

pub use self::explain::{available_paths, explain_path};
pub use self::problem::Problem;

/// An implementation of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Ordinary tensor operations, on the CPU.
    Reference,
    /// Burn's product of matrices, on a GPU: it is for many rows that no kernel here is made for.
    Matmul,
    /// CubeCL kernels that every GPU runs.
    Portable,
    /// The CubeCL kernel for GPUs with matrix instructions.
    PortableMma,
    /// The kernel for NVIDIA's Hopper, with TMA and wgmma.
    Sm90,
    /// The kernel for NVIDIA's Blackwell of data centers, with TMA and tcgen05.
    Sm100,
}

/// A choice and its reason: what [`explain_path`] gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathChoice {
    /// What runs.
    pub path: Path,
    /// Why: among which implementations, for which sizes and dtype, on which device, and what it needs of them.
    pub reason: String,
}

impl Path {
    /// All of them, those for fewer devices last.
    pub const ALL: [Path; 6] =
        [Path::Reference, Path::Matmul, Path::Portable, Path::PortableMma, Path::Sm90, Path::Sm100];
}

#[cfg(feature = "_gpu")]
impl From<mla_kernels::Path> for Path {
    fn from(kernel: mla_kernels::Path) -> Self {
        match kernel {
            mla_kernels::Path::Plain => Self::Portable,
            mla_kernels::Path::Mma => Self::PortableMma,
            mla_kernels::Path::Sm90 => Self::Sm90,
            mla_kernels::Path::Sm100 => Self::Sm100,
        }
    }
}

#[cfg(feature = "_gpu")]
impl Path {
    /// The kernel that it is, if it is one.
    pub(crate) fn kernel(self) -> Option<mla_kernels::Path> {
        mla_kernels::Path::ALL.into_iter().find(|&kernel| Self::from(kernel) == self)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Reference => "reference",
            Path::Matmul => "matmul",
            Path::Portable => "portable",
            Path::PortableMma => "portable-mma",
            Path::Sm90 => "sm90",
            Path::Sm100 => "sm100",
        })
    }
}

/// A text that names no [`Path`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the path is {0:?}, expected reference, matmul, portable, portable-mma, sm90 or sm100")]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_names() {
        for path in Path::ALL {
            assert_eq!(path.to_string().parse(), Ok(path));
        }
        let error = "sm70".parse::<Path>().unwrap_err().to_string();
        assert_eq!(error, "the path is \"sm70\", expected reference, matmul, portable, portable-mma, sm90 or sm100");
    }
}
