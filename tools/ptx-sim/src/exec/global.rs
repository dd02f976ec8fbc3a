//! Global memory as a cluster sees it, and who touched what in a launch. CTAs of different clusters have no order between
//! them (PTX ISA, "Memory Consistency Model"; what could give them one is an atomic), so what one of them writes no other
//! may touch.
use crate::error::Fault;
use crate::memory::{Memory, Strength};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes that have one state: the smallest elements that CTAs write side by side.
const GRANULE: u64 = 2;
/// Granules that get their states together, when the first of them is touched.
const BLOCK: u64 = 1 << 14;

/// A state is 0 or one of these with the number of the cluster that did it, or with [`MANY`].
const READ: u32 = 1 << 30;
const WRITTEN: u32 = 1 << 31;
/// Several clusters have read.
const MANY: u32 = READ - 1;

type Block = OnceLock<Box<[AtomicU32]>>;

/// Global memory for the CTAs of a cluster.
pub(crate) struct Global<'a> {
    pub memory: &'a Memory,
    /// None where atomics may order the clusters.
    pub touched: Option<&'a Touched>,
    pub cluster: u32,
}

impl Global<'_> {
    pub fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.load_as(Strength::Weak, address, into)
    }

    pub fn load_as(&self, strength: Strength, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.reach("load", address, strength)?;
        if strength.is_strong() {
            self.memory.load_strong(address, into)?
        } else {
            self.memory.load(address, into)?
        }
        let bytes = into.len() as u64;
        self.touched.map_or(Ok(()), |t| t.read(self.cluster, address, bytes).map_err(|c| c.fault("load")))
    }

    pub fn store_as(&self, strength: Strength, address: u64, from: &[u8]) -> Result<(), Fault> {
        self.reach("store", address, strength)?;
        if strength.is_strong() {
            self.memory.store_strong(address, from)?
        } else {
            self.memory.store(address, from)?
        }
        // Elements of one byte lie closer together than states.
        let bytes = if from.len() == 1 { 0 } else { from.len() as u64 };
        self.touched.map_or(Ok(()), |t| t.write(self.cluster, address, bytes).map_err(|c| c.fault("store")))
    }

    /// Bytes of a bulk copy.
    pub fn copy_from(&self, address: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        self.reach("load", address, Strength::Weak)?;
        let found = self.memory.copy_from(address, bytes)?;
        self.touched.map_or(Ok(()), |t| t.read(self.cluster, address, bytes).map_err(|c| c.fault("load")))?;
        Ok(found)
    }

    pub fn copy_to(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.reach("store", address, Strength::Weak)?;
        self.memory.copy_to(address, bytes)?;
        let count = bytes.len() as u64;
        self.touched.map_or(Ok(()), |t| t.write(self.cluster, address, count).map_err(|c| c.fault("store")))
    }

    pub fn update(&self, address: u64, bytes: u64, f: impl Fn(u64) -> u64) -> Result<u64, Fault> {
        // Scopes of atomics are not known here.
        self.reach("atomic", address, Strength::Weak)?;
        self.memory.update(address, bytes, f)
    }

    fn reach(&self, access: &'static str, address: u64, strength: Strength) -> Result<(), Fault> {
        if self.memory.has_foreign() { self.memory.reach(access, address, strength) } else { Ok(()) }
    }
}

/// The states of all memory.
pub(crate) struct Touched {
    allocations: Vec<(Range<u64>, Vec<Block>)>,
}

/// An access to what another cluster touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conflict {
    /// The first such byte.
    pub address: u64,
    /// Whether the other one wrote.
    pub written: bool,
}

impl Conflict {
    fn fault(self, access: &'static str) -> Fault {
        let other = if self.written { "wrote" } else { "read" };
        Fault::GlobalRace { access, address: self.address, other }
    }
}

impl Touched {
    /// Nothing has been touched.
    pub fn new(memory: &Memory) -> Self {
        let blocks = |range: &Range<u64>| (range.end - range.start).div_ceil(GRANULE * BLOCK);
        let states = |range: &Range<u64>| (0..blocks(range)).map(|_| Block::new()).collect();
        Self { allocations: memory.ranges().map(|range| (range.clone(), states(&range))).collect() }
    }

    /// A cluster reads.
    pub fn read(&self, cluster: u32, address: u64, bytes: u64) -> Result<(), Conflict> {
        let own = cluster % MANY;
        self.update(address, bytes, |state| match state {
            0 => Ok(READ | own),
            _ if state & !WRITTEN & !READ == own => Ok(state),
            _ if state & WRITTEN != 0 => Err(true),
            _ => Ok(READ | MANY),
        })
    }

    /// A cluster writes.
    pub fn write(&self, cluster: u32, address: u64, bytes: u64) -> Result<(), Conflict> {
        let own = cluster % MANY;
        self.update(address, bytes, |state| match state {
            _ if state == 0 || state & !WRITTEN & !READ == own => Ok(WRITTEN | own),
            _ => Err(state & WRITTEN != 0),
        })
    }

    fn update(&self, address: u64, bytes: u64, next: impl Fn(u32) -> Result<u32, bool>) -> Result<(), Conflict> {
        let after = self.allocations.partition_point(|(range, _)| range.start <= address);
        let Some((range, blocks)) = self.allocations[..after].last() else { return Ok(()) };
        // Out of bounds is an error of its own.
        let end = (address + bytes).min(range.end).saturating_sub(range.start).div_ceil(GRANULE);
        let granules = (address - range.start) / GRANULE..end;
        for granule in granules {
            let block =
                blocks[(granule / BLOCK) as usize].get_or_init(|| (0..BLOCK).map(|_| AtomicU32::new(0)).collect());
            let state = &block[(granule % BLOCK) as usize];
            let mut old = state.load(Ordering::Relaxed);
            loop {
                let new =
                    next(old).map_err(|written| Conflict { address: range.start + granule * GRANULE, written })?;
                if new == old {
                    break;
                }
                match state.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => break,
                    Err(now) => old = now,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_cluster_writes_no_other_touches() {
        let mut memory = Memory::new();
        let buffer = memory.alloc(&[0; 64]);
        let at = memory.address(buffer);
        let touched = Touched::new(&memory);
        assert_eq!(touched.write(1, at + 8, 4), Ok(()));
        assert_eq!(touched.read(1, at + 8, 4), Ok(()));
        assert_eq!(touched.read(2, at + 4, 8), Err(Conflict { address: at + 8, written: true }));
        assert_eq!(touched.write(2, at + 10, 2), Err(Conflict { address: at + 10, written: true }));
        assert_eq!(touched.write(2, at + 12, 2), Ok(()));
    }

    #[test]
    fn what_others_read_no_cluster_writes() {
        let mut memory = Memory::new();
        let [at, own] = [1 << 20, 2].map(|bytes| {
            let buffer = memory.alloc(&vec![0; bytes]);
            memory.address(buffer)
        });
        let touched = Touched::new(&memory);
        for cluster in [3, 4, 3] {
            assert_eq!(touched.read(cluster, at, 1 << 20), Ok(()));
        }
        assert_eq!(touched.write(3, at + 65536, 4), Err(Conflict { address: at + 65536, written: false }));
        assert_eq!(touched.read(3, own, 2), Ok(()));
        assert_eq!(touched.write(3, own, 2), Ok(()));
    }
}
