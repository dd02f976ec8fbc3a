//! Kernels from files of PTX.
use ptx_sim::{Module, ReplayError, SimError, parse};
use std::path::{Path, PathBuf};

/// Why there is no estimate.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A file of PTX.
    #[error("{}: {error}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// What is wrong.
        error: std::io::Error,
    },
    /// PTX that is none, or a launch that fails.
    #[error("{name}: {error}")]
    Run {
        /// The kernel.
        name: String,
        /// What is wrong.
        error: ReplayError,
    },
}

/// A kernel's module.
pub struct Kernel {
    pub name: String,
    pub module: Module,
}

impl Kernel {
    /// The kernel of this name among the files that the offline compiler leaves.
    pub fn load(folder: &Path, name: &str) -> Result<Self, Failure> {
        let path = folder.join(format!("{name}.ptx"));
        let text = std::fs::read_to_string(&path).map_err(|error| Failure::File { path, error })?;
        let module = parse(&text).map_err(|error| Failure::Run { name: name.to_string(), error: error.into() })?;
        Ok(Self { name: name.to_string(), module })
    }

    pub fn entry(&self) -> &str {
        self.module.entries.first().map_or("", |entry| &entry.name)
    }

    pub fn fault(&self, error: SimError) -> Failure {
        Failure::Run { name: self.name.clone(), error: error.into() }
    }
}
