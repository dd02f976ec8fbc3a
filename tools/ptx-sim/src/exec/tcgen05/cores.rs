//! What the tensor cores of a cluster hold, and what warps know of it.
use super::history::{By, History, Operations, Thread};
use super::tmem::{Place, TensorMemory};
use crate::error::Fault;
use crate::exec::order::{Agent, Clock};
use std::collections::HashMap;
use std::ops::Range;

/// What a CTA of a pair asks for together with the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Allocate { columns: u32 },
    Deallocate { address: u32, columns: u32 },
}

/// A CTA's part in something that its pair does together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Part {
    #[default]
    None,
    Asked(Request),
    /// Done: the first column, of an allocation.
    Granted(u32),
}

/// The operations of a thread that a commit tracks.
#[derive(Default)]
pub(super) struct Pipeline {
    /// Those since the last commit.
    pub open: Option<Agent>,
    /// What is known when all that were committed are over.
    pub over: Clock,
}

/// The other CTA of a pair: their ranks differ in the last bit (PTX ISA, CTA Pair).
pub(super) fn peer(rank: usize) -> usize {
    rank ^ 1
}

/// The tensor memory of a CTA.
pub(super) struct CtaMemory {
    pub memory: TensorMemory,
    pub history: History,
    pub part: Part,
}

/// What a warp knows about accesses to tensor memory.
#[derive(Default)]
pub(super) struct View {
    /// What its next accesses are ordered after.
    pub known: Clock,
    /// Its own accesses that it has waited for.
    pub own: Clock,
    /// Its loads and stores since it last waited for them.
    pub loads: Option<Agent>,
    pub stores: Option<Agent>,
    /// Operations since the last `fence::before_thread_sync`.
    pub unpublished: Vec<u32>,
}

/// The tensor cores of a cluster.
pub(crate) struct TensorCores {
    pub(super) ctas: Vec<CtaMemory>,
    /// By the number of the warp in the cluster.
    pub(super) warps: Vec<View>,
    pub(super) pipelines: HashMap<Thread, Pipeline>,
    pub(super) operations: Operations,
}

impl TensorCores {
    pub fn new(ctas: usize, warps: usize) -> Self {
        let cta = |_| CtaMemory { memory: TensorMemory::new(), history: History::new(), part: Part::None };
        Self {
            ctas: (0..ctas).map(cta).collect(),
            warps: (0..warps).map(|_| View::default()).collect(),
            pipelines: HashMap::new(),
            operations: Operations::default(),
        }
    }

    /// Checks and notes an access of a warp's operation to columns, the first and their number, of a CTA.
    pub(super) fn access(
        &mut self,
        rank: usize,
        (warp, number, writes): (Agent, u32, bool),
        lanes: Range<u32>,
        (column, width): (u32, u32),
    ) -> Result<(), Fault> {
        let cta = &mut self.ctas[rank];
        for lane in lanes.clone() {
            cta.memory.reach(Place { lane, column }, width)?;
        }
        let by = By { operations: &self.operations, known: &self.warps[warp.index()].known, number };
        let columns = column..column + width;
        if writes { cta.history.write(&by, lanes, columns) } else { cta.history.read(&by, lanes, columns) }
    }
}

impl TensorCores {
    /// First columns that CTAs of a group could get together.
    pub(super) fn fitting(&self, rank: usize, group: u8, columns: u32) -> Vec<u32> {
        let first = [&self.ctas[rank].memory];
        if group == 1 {
            return TensorMemory::fitting(&first, columns);
        }
        TensorMemory::fitting(&[&self.ctas[rank].memory, &self.ctas[peer(rank)].memory], columns)
    }

    /// Whether a CTA that waits for tensor memory, or for its peer, can go on.
    pub fn can_go_on(&self, rank: usize, columns: Option<u32>) -> bool {
        if let Some(columns) = columns {
            return !self.fitting(rank, 1, columns).is_empty();
        }
        match (self.ctas[rank].part, self.ctas[peer(rank)].part) {
            (Part::Granted(_), _) => true,
            (Part::Asked(Request::Allocate { columns }), Part::Asked(_)) => !self.fitting(rank, 2, columns).is_empty(),
            (_, Part::Asked(_)) => true,
            _ => false,
        }
    }

    /// "128 of 512 columns are free".
    pub fn state(&self, rank: usize) -> String {
        let peers = if self.ctas[rank].part == Part::None { "" } else { ", together with the peer CTA" };
        format!("{} of 512 columns are allocated{peers}", self.ctas[rank].memory.allocated())
    }

    /// What a CTA leaves when it ends.
    pub fn leaks(&self, rank: usize) -> Result<(), Fault> {
        match self.ctas.get(rank).map_or(0, |cta| cta.memory.allocated()) {
            0 => Ok(()),
            columns => {
                let problem = "never deallocated, and the CTA ends".to_string();
                Err(Fault::TensorAllocation { columns, problem })
            }
        }
    }
}
