//! Records launches as traces that `ptx-sim` can run again.
use crate::config::TraceConfig;
use crate::module::Call;
use ptx_sim::{Range, Recorded, Trace};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// A shape of a launch: of two alike, one is recorded.
type Shape = (u64, [u32; 3], Vec<u64>);

/// Decides which launches are recorded, and writes them.
#[derive(Debug)]
pub struct Recorder {
    config: TraceConfig,
    device: String,
    kernels: HashMap<u64, u64>,
    shapes: HashSet<Shape>,
    written: u64,
}

/// A launch that is being recorded.
#[derive(Debug)]
pub struct Recording {
    trace: Trace,
    folder: PathBuf,
}

impl Recorder {
    /// A recorder. What the folder holds already counts for the limit of its size.
    pub fn new(config: TraceConfig, device: String) -> Self {
        let written = size(&config.folder);
        Self { config, device, kernels: HashMap::new(), shapes: HashSet::new(), written }
    }

    /// Copies the memory that a launch can reach, if the launch is to be recorded. `ranges` are all allocations, `read`
    /// copies one of them.
    pub fn start<E>(
        &mut self,
        call: &Call,
        ranges: impl Iterator<Item = std::ops::Range<u64>>,
        read: impl FnMut(&Range) -> Result<Vec<u8>, E>,
    ) -> Option<Recording> {
        let name = &call.function.entry().name;
        let wanted = self.config.filter.is_empty() || self.config.filter.iter().any(|part| name.contains(part));
        let module = call.function.module.hash;
        let count = self.kernels.get(&module).copied().unwrap_or(0);
        if !wanted || count >= self.config.launches || self.written >= self.config.total_bytes {
            return None;
        }
        let allocations = reachable(call, ranges);
        let shape = (module, call.grid, allocations.iter().map(|range| range.bytes).collect());
        let bytes: u64 = allocations.iter().map(|range| range.bytes).sum();
        if bytes > self.config.launch_bytes || self.shapes.contains(&shape) {
            return None;
        }
        let folder = self.config.folder.join(format!("{name}-{:08x}-{count}", module as u32));
        if folder.exists() {
            return None;
        }
        let before = allocations.iter().map(read).collect::<Result<Vec<_>, _>>().ok()?;
        self.shapes.insert(shape);
        self.kernels.insert(module, count + 1);
        let launch = Recorded {
            device: self.device.clone(),
            module: format!("../modules/{module:016x}.ptx").into(),
            entry: name.clone(),
            grid: call.grid,
            block: call.block,
            cluster: call.function.entry().cluster.unwrap_or([1; 3]),
            dynamic_shared: u64::from(call.dynamic_shared),
            params: call.params.clone(),
            allocations,
        };
        let ptx = call.function.module.ptx.clone();
        Some(Recording { trace: Trace { launch, ptx, before, after: Vec::new() }, folder })
    }

    /// Writes a launch after it ran.
    pub fn finish<E>(&mut self, recording: Recording, read: impl FnMut(&Range) -> Result<Vec<u8>, E>) {
        let Recording { mut trace, folder } = recording;
        let Ok(after) = trace.launch.allocations.iter().map(read).collect::<Result<Vec<_>, _>>() else { return };
        trace.after = after;
        match trace.save(&folder) {
            Ok(()) => self.written += size(&folder),
            Err(error) => eprintln!("sim-cuda: the trace is not written: {error}"),
        }
    }
}

/// The allocations that 8 bytes somewhere in the parameters point into, in order.
fn reachable(call: &Call, ranges: impl Iterator<Item = std::ops::Range<u64>>) -> Vec<Range> {
    let pointers: Vec<u64> = call.words().collect();
    ranges
        .filter(|range| pointers.iter().any(|pointer| range.contains(pointer)))
        .map(|range| Range { address: range.start, bytes: range.end - range.start })
        .collect()
}

/// Bytes in a folder.
fn size(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.flatten().map(of).sum()
}
