//! Snapshots of requests' states, from which others with the same first tokens go on.

use std::collections::HashMap;

use burn::tensor::{Device, Tensor};

use super::states::States;
use crate::cache::Snapshot;
use crate::{ModelError, Result};

/// Rows of states that belong to no request.
#[derive(Debug)]
pub(super) struct SnapshotRows {
    states: States,
    free: Vec<Snapshot>,
    /// The tokens of each that is kept.
    lens: HashMap<Snapshot, usize>,
}

impl SnapshotRows {
    /// Rows of which none is taken.
    pub(super) fn new(states: States, rows: usize) -> Self {
        Self { states, free: (0..rows as u32).rev().map(Snapshot).collect(), lens: HashMap::new() }
    }

    /// Snapshots that are kept.
    pub(super) fn kept(&self) -> usize {
        self.lens.len()
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Keeps the state after so many tokens; `None` without room.
    pub(super) fn keep(&mut self, len: usize, state: Vec<Tensor<3>>) -> Option<Snapshot> {
        let snapshot = self.free.pop()?;
        self.states.set_row(snapshot.0 as usize, state);
        self.lens.insert(snapshot, len);
        Some(snapshot)
    }

    pub(super) fn discard(&mut self, snapshot: Snapshot) {
        if self.lens.remove(&snapshot).is_some() {
            self.free.push(snapshot);
        }
    }

    /// A copy of the state after so many tokens.
    ///
    /// # Errors
    /// A snapshot that is not there, or of another position.
    pub(super) fn state_after(&self, snapshot: Snapshot, len: usize, device: &Device) -> Result<Vec<Tensor<3>>> {
        match self.lens.get(&snapshot) {
            Some(&kept) if kept == len => self.states.row(snapshot.0 as usize, device),
            Some(kept) => {
                let actual = format!("one of the state after {kept} tokens");
                Err(ModelError::request("snapshot", actual, format!("one of that after {len}, as the pages have")))
            }
            None => Err(Self::unknown(snapshot)),
        }
    }

    /// The error of a snapshot that is not there.
    pub(super) fn unknown(Snapshot(number): Snapshot) -> ModelError {
        ModelError::request("snapshot", number, "one that is kept")
    }
}
