//! The implementations of operations, by name.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

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
