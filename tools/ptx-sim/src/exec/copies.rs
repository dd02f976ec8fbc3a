//! `cp.async`: copies that are under way until their thread waits for them (PTX ISA, `cp.async`).
//!
//! The source is read at once. The destination cannot be read until the wait, whatever it held: who reads too early
//! gets an error and not by chance the right bytes.
use super::warp::LANES;
use crate::error::Fault;
use crate::memory::Shared;
use std::collections::VecDeque;

/// Bytes on their way to shared memory.
pub(crate) struct Copy {
    pub dst: u64,
    pub bytes: Vec<u8>,
}

impl Copy {
    fn finish(self, shared: &mut Shared) -> Result<(), Fault> {
        for (i, byte) in self.bytes.iter().enumerate() {
            shared.store(self.dst + i as u64, 1, u64::from(*byte))?;
        }
        Ok(())
    }
}

/// The copies of one lane.
#[derive(Default)]
struct Lane {
    open: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

/// The copies of a warp.
pub(crate) struct Copies {
    lanes: [Lane; LANES],
}

impl Default for Copies {
    fn default() -> Self {
        Self { lanes: std::array::from_fn(|_| Lane::default()) }
    }
}

impl Copies {
    pub fn start(&mut self, lane: usize, copy: Copy, shared: &mut Shared) -> Result<(), Fault> {
        shared.forget(copy.dst, copy.bytes.len() as u64)?;
        self.lanes[lane].open.push(copy);
        Ok(())
    }

    pub fn commit(&mut self, lane: usize) {
        let group = std::mem::take(&mut self.lanes[lane].open);
        self.lanes[lane].groups.push_back(group);
    }

    /// Finishes the oldest groups until `pending` are left.
    pub fn wait(&mut self, lane: usize, pending: usize, shared: &mut Shared) -> Result<(), Fault> {
        while self.lanes[lane].groups.len() > pending {
            for copy in self.lanes[lane].groups.pop_front().into_iter().flatten() {
                copy.finish(shared)?;
            }
        }
        Ok(())
    }

    /// Finishes everything that the lane started.
    pub fn finish(&mut self, lane: usize, shared: &mut Shared) -> Result<(), Fault> {
        self.commit(lane);
        self.wait(lane, 0, shared)
    }
}
