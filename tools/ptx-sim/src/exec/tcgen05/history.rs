//! The order of accesses to tensor memory (PTX ISA, Memory Consistency Model for 5th generation of TensorCore
//! operations).
//!
//! All accesses are asynchronous. One is ordered after another if
//! - its warp waited for it: `tcgen05.wait` for its own loads and stores;
//! - a barrier came between, with `tcgen05.fence::before_thread_sync` in front of it (`tcgen05.commit` needs none) and
//!   `tcgen05.fence::after_thread_sync` behind it;
//! - the two form a pipeline ([`Operation::leads`]), and were issued in this order: by one thread, or by two with
//!   fences and a barrier between.
//!
//! Memory is watched in cells of one column of sixteen lanes.
use super::tmem::{COLUMNS, LANES, Place};
use crate::error::Fault;
use crate::exec::order::{Clock, Stamp};
use std::ops::Range;

/// Lanes of a cell: the fewest that a layout keeps together.
const CELL: u32 = 16;

/// What an operation is, as far as pipelines care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Load,
    Store,
    /// The accumulator's address, M and N.
    Mma {
        accumulator: u32,
        shape: (u32, u32),
    },
    Copy {
        /// `.4x256b`.
        rows: bool,
    },
    Shift,
}

impl Operation {
    /// Whether this one, issued first, is executed first (Pipelined tcgen05 Instructions). All of a kernel have the
    /// same `.cta_group`, and here the same `.kind`.
    fn leads(self, next: Self) -> bool {
        match (self, next) {
            (Self::Mma { .. }, Self::Mma { .. }) => self == next,
            (Self::Copy { .. } | Self::Shift, Self::Mma { .. }) | (Self::Mma { .. }, Self::Shift) => true,
            (Self::Shift, Self::Copy { rows }) => rows,
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Load => "tcgen05.ld",
            Self::Store => "tcgen05.st",
            Self::Mma { .. } => "tcgen05.mma",
            Self::Copy { .. } => "tcgen05.cp",
            Self::Shift => "tcgen05.shift",
        }
    }
}

/// The thread that issued an operation: its warp in the cluster, and the lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Thread {
    pub warp: usize,
    pub lane: usize,
}

/// An operation that was issued.
#[derive(Debug, Clone, Copy)]
pub(super) struct Issued {
    pub operation: Operation,
    pub thread: Thread,
    /// What a clock has seen when the operation is over.
    pub stamp: Stamp,
    /// What a clock has seen that comes from behind the next `fence::before_thread_sync` of the warp.
    pub published: Option<Stamp>,
    pub line: u32,
}

/// The operations of a cluster, by number.
#[derive(Default)]
pub(super) struct Operations(Vec<Issued>);

impl Operations {
    pub fn add(&mut self, issued: Issued) -> u32 {
        self.0.push(issued);
        (self.0.len() - 1) as u32
    }

    /// `tcgen05.fence::before_thread_sync` after an operation.
    pub fn publish(&mut self, number: u32, stamp: Stamp) {
        self.0[number as usize].published.get_or_insert(stamp);
    }

    fn over(&self, known: &Clock, number: u32) -> bool {
        known.has_seen(self.0[number as usize].stamp)
    }

    /// Whether an earlier operation is ordered before a new one, whose warp knows the clock.
    fn ordered(&self, known: &Clock, earlier: u32, new: u32) -> bool {
        let (old, next) = (&self.0[earlier as usize], &self.0[new as usize]);
        let in_turn = old.thread == next.thread || old.published.is_some_and(|stamp| known.has_seen(stamp));
        earlier == new || known.has_seen(old.stamp) || in_turn && old.operation.leads(next.operation)
    }

    fn describe(&self, number: u32) -> String {
        let issued = &self.0[number as usize];
        let Thread { warp, lane } = issued.thread;
        let who = match issued.operation {
            Operation::Load | Operation::Store => format!("warp {warp}"),
            _ => format!("warp {warp}, lane {lane},"),
        };
        format!("the {} that {who} issued at PTX line {}", issued.operation.name(), issued.line)
    }
}

#[derive(Default, Clone)]
struct Cell {
    write: Option<u32>,
    reads: Vec<u32>,
}

/// Who last accessed the cells of a CTA's tensor memory.
pub(super) struct History {
    cells: Vec<Cell>,
}

/// Who accesses, and what its warp knows.
pub(super) struct By<'a> {
    pub operations: &'a Operations,
    pub known: &'a Clock,
    pub number: u32,
}

impl History {
    pub fn new() -> Self {
        Self { cells: vec![Cell::default(); (LANES / CELL * COLUMNS) as usize] }
    }

    fn cells(lanes: Range<u32>, columns: Range<u32>) -> impl Iterator<Item = (Place, usize)> {
        let groups = lanes.start / CELL..lanes.end.div_ceil(CELL);
        groups.flat_map(move |g| {
            columns.clone().map(move |column| (Place { lane: g * CELL, column }, (g * COLUMNS + column) as usize))
        })
    }

    /// Checks and notes a read.
    pub fn read(&mut self, by: &By, lanes: Range<u32>, columns: Range<u32>) -> Result<(), Fault> {
        let mut judge = Judge::new(by);
        for (place, index) in Self::cells(lanes, columns) {
            let cell = &mut self.cells[index];
            judge.check(place, "read", "write", cell.write)?;
            if cell.reads.last() != Some(&by.number) {
                // What is ordered before this read is also before all that must come after it.
                cell.reads.retain(|read| !by.operations.over(by.known, *read));
                cell.reads.push(by.number);
            }
        }
        Ok(())
    }

    /// Checks and notes a write, or a read and a write.
    pub fn write(&mut self, by: &By, lanes: Range<u32>, columns: Range<u32>) -> Result<(), Fault> {
        let mut judge = Judge::new(by);
        for (place, index) in Self::cells(lanes, columns) {
            let cell = &mut self.cells[index];
            judge.check(place, "write", "write", cell.write)?;
            for read in &cell.reads {
                judge.check(place, "write", "read", Some(*read))?;
            }
            cell.write = Some(by.number);
            cell.reads.clear();
        }
        Ok(())
    }

    /// Forgets columns that are given back; all accesses must be over for a clock.
    pub fn forget(&mut self, operations: &Operations, known: &Clock, columns: Range<u32>) -> Result<(), Fault> {
        for (place, index) in Self::cells(0..LANES, columns) {
            let cell = std::mem::take(&mut self.cells[index]);
            if let Some(late) = cell.write.iter().chain(&cell.reads).find(|n| !operations.over(known, **n)) {
                let problem = format!("tcgen05.dealloc is not ordered after {}", operations.describe(*late));
                return Err(place.fault(problem));
            }
        }
        Ok(())
    }
}

/// Judges accesses of one operation; neighbouring cells mostly have the same history.
struct Judge<'a> {
    by: &'a By<'a>,
    fine: Vec<u32>,
}

impl<'a> Judge<'a> {
    fn new(by: &'a By<'a>) -> Self {
        Self { by, fine: Vec::new() }
    }

    fn check(&mut self, place: Place, access: &str, earlier: &str, number: Option<u32>) -> Result<(), Fault> {
        let Some(number) = number.filter(|n| !self.fine.contains(n)) else { return Ok(()) };
        let By { operations, known, number: new } = *self.by;
        if operations.ordered(known, number, new) {
            self.fine.push(number);
            return Ok(());
        }
        Err(place.fault(format!("{access} is not ordered after the {earlier} by {}", operations.describe(number))))
    }
}
