//! Recorded launches: a folder with the arguments and the memory before and after, to run again on the simulator.
//!
//! `launch.json` says what was launched and names the file of the module; of allocation `n`, `n.before` and `n.after` have
//! the contents (deflate). Without `n.after` the launch did not change it. Parameters contain addresses as they were, so
//! the allocations are placed there again.
use crate::error::{Fault, ParseError, SimError};
use crate::launch::{Launch, Param};
use crate::memory::{Buffer, Memory};
use crate::parse::{Module, parse};
use crate::stats::Stats;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Fast rather than small.
const COMPRESSION: u8 = 2;

/// What was launched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The device it ran on.
    pub device: String,
    /// The file of the module's PTX, relative to the folder.
    pub module: PathBuf,
    /// The kernel's name.
    pub entry: String,
    /// CTAs in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y, z.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y, z.
    pub cluster: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u64,
    /// The bytes of each parameter.
    pub params: Vec<Vec<u8>>,
    /// The allocations that the parameters point into.
    pub allocations: Vec<Range>,
}

/// Where an allocation lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Its address.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// A recorded launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// What was launched.
    pub launch: Recorded,
    /// The module's text.
    pub ptx: String,
    /// Contents of each allocation before the launch.
    pub before: Vec<Vec<u8>>,
    /// Contents of each allocation after it.
    pub after: Vec<Vec<u8>>,
}

/// What the simulator made of a recorded launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// What was executed.
    pub stats: Stats,
    /// Contents of each allocation afterwards, in the trace's order.
    pub memory: Vec<Vec<u8>>,
}

/// A trace that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A file.
    #[error("{}: {error}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// What is wrong.
        error: std::io::Error,
    },
    /// `launch.json`.
    #[error("{}: {error}", path.display())]
    Json {
        /// Which one.
        path: PathBuf,
        /// What is wrong.
        error: serde_json::Error,
    },
    /// Contents of an allocation that are damaged, or not as long as the allocation.
    #[error("{}: not the contents of an allocation of {bytes} bytes", path.display())]
    Contents {
        /// Which file.
        path: PathBuf,
        /// The allocation's size.
        bytes: u64,
    },
}

/// A launch that cannot be run again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The module.
    #[error("PTX: {0}")]
    Parse(#[from] ParseError),
    /// The launch.
    #[error(transparent)]
    Sim(#[from] SimError),
}

impl Trace {
    /// Reads the trace in a folder.
    ///
    /// # Errors
    /// [`TraceError`]: a file is missing or damaged.
    pub fn load(folder: &Path) -> Result<Self, TraceError> {
        let path = folder.join("launch.json");
        let launch: Recorded =
            serde_json::from_slice(&read(&path)?).map_err(|error| TraceError::Json { path, error })?;
        let path = folder.join(&launch.module);
        let ptx = std::fs::read_to_string(&path).map_err(|error| TraceError::File { path, error })?;
        let (mut before, mut after) = (Vec::new(), Vec::new());
        for (index, range) in launch.allocations.iter().enumerate() {
            let old = contents(&folder.join(format!("{index}.before")), range.bytes)?;
            let path = folder.join(format!("{index}.after"));
            after.push(if path.exists() { contents(&path, range.bytes)? } else { old.clone() });
            before.push(old);
        }
        Ok(Self { launch, ptx, before, after })
    }

    /// Writes the trace into a folder, which is made; the module's file, too, unless it is there.
    ///
    /// # Errors
    /// [`TraceError::File`].
    pub fn save(&self, folder: &Path) -> Result<(), TraceError> {
        let module = folder.join(&self.launch.module);
        for folder in std::iter::once(folder).chain(module.parent()) {
            std::fs::create_dir_all(folder).map_err(|error| TraceError::File { path: folder.to_path_buf(), error })?;
        }
        if !module.exists() {
            write(&module, self.ptx.as_bytes())?;
        }
        for (index, (old, new)) in self.before.iter().zip(&self.after).enumerate() {
            write(&folder.join(format!("{index}.before")), &compress_to_vec(old, COMPRESSION))?;
            if old != new {
                write(&folder.join(format!("{index}.after")), &compress_to_vec(new, COMPRESSION))?;
            }
        }
        let path = folder.join("launch.json");
        let json = serde_json::to_vec(&self.launch).map_err(|error| TraceError::Json { path: path.clone(), error })?;
        write(&path, &json)
    }

    /// Runs the launch on the simulator, from the memory before.
    ///
    /// # Errors
    /// [`ReplayError`]: what the simulator found.
    pub fn run(&self, seed: u64) -> Result<Outcome, ReplayError> {
        Ok(self.run_module(&parse(&self.ptx)?, seed)?)
    }

    /// Runs the launch with another module, for example a changed one.
    ///
    /// # Errors
    /// [`SimError`]: what the simulator found.
    pub fn run_module(&self, module: &Module, seed: u64) -> Result<Outcome, SimError> {
        let mut memory = Memory::new();
        let buffers = self
            .launch
            .allocations
            .iter()
            .zip(&self.before)
            .map(|(range, bytes)| memory.alloc_at(range.address, bytes))
            .collect::<Result<Vec<Buffer>, Fault>>()?;
        let stats = Launch { seed, ..self.launch.with(module) }.run(&memory)?;
        Ok(Outcome { stats, memory: buffers.into_iter().map(|buffer| memory.read(buffer)).collect() })
    }
}

impl Recorded {
    /// The launch, of a kernel of this name in a module.
    pub fn with<'a>(&'a self, module: &'a Module) -> Launch<'a> {
        Launch {
            grid: self.grid,
            block: self.block,
            cluster: self.cluster.map(|n| n.max(1)),
            params: self.params.iter().cloned().map(Param::Bytes).collect(),
            dynamic_shared: self.dynamic_shared,
            ..Launch::new(module, &self.entry)
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TraceError> {
    std::fs::read(path).map_err(|error| TraceError::File { path: path.to_path_buf(), error })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), TraceError> {
    std::fs::write(path, bytes).map_err(|error| TraceError::File { path: path.to_path_buf(), error })
}

fn contents(path: &Path, bytes: u64) -> Result<Vec<u8>, TraceError> {
    let found = decompress_to_vec(&read(path)?).ok().filter(|found| found.len() as u64 == bytes);
    found.ok_or_else(|| TraceError::Contents { path: path.to_path_buf(), bytes })
}
