//! The groups of bulk stores that lanes have started (PTX ISA, bulk async-groups).
use super::order::Clock;
use std::collections::{HashMap, VecDeque};

/// A store: its flight, and what waiting for it acquires.
pub(super) type Store = (u64, Clock);

/// The stores of one lane.
#[derive(Default)]
pub(super) struct Lane {
    pub open: Vec<Store>,
    pub groups: VecDeque<Vec<Store>>,
}

/// The groups of stores of a warp's lanes.
#[derive(Default)]
pub(crate) struct Groups(HashMap<usize, Lane>);

impl Groups {
    /// Those of a lane.
    pub fn of(&mut self, lane: usize) -> &mut Lane {
        self.0.entry(lane).or_default()
    }
}
