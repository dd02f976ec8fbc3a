//! Snapshots of requests' states, from which others with the same first tokens go on.

use std::collections::HashMap;

use burn::tensor::Tensor;
use mla_ops::cache::RequestId;

use super::states::{MarkedRows, State, States};
use crate::cache::Snapshot;
use crate::{ModelError, Result};

/// Rows of states that belong to no request.
#[derive(Debug)]
pub(super) struct SnapshotRows {
    states: States,
    free: Vec<Snapshot>,
    /// The tokens of each that is kept.
    lens: HashMap<Snapshot, usize>,
    /// Of each request those that its next forward passes write, with the tokens before them.
    marked: HashMap<RequestId, Vec<(usize, Snapshot)>>,
}

impl SnapshotRows {
    /// Rows of which none is taken.
    pub(super) fn new(states: States, rows: usize) -> Self {
        Self {
            states,
            free: (0..rows as u32).rev().map(Snapshot).collect(),
            lens: HashMap::new(),
            marked: HashMap::new(),
        }
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

    /// Takes a row for the state of a request after so many tokens, if there is one.
    pub(super) fn mark(&mut self, request: RequestId, len: usize) -> bool {
        let snapshot = self.free.pop();
        self.marked.entry(request).or_default().extend(snapshot.map(|snapshot| (len, snapshot)));
        snapshot.is_some()
    }

    /// What is marked of a request: the tokens before each, and its row.
    pub(super) fn marked(&self, request: RequestId) -> impl Iterator<Item = (usize, usize)> {
        self.marked.get(&request).into_iter().flatten().map(|&(len, Snapshot(row))| (len, row as usize))
    }

    /// Writes what a state is at the marks of a forward pass, of the rows `[N, C]` of its tokens.
    ///
    /// # Errors
    /// A state that is taken, or one of another width.
    pub(super) fn write_marked(&mut self, state: State, rows: &Tensor<2>, marked: &MarkedRows) -> Result<()> {
        self.states.write(state, rows.clone().select(0, marked.tokens.clone()), marked.slots.clone())
    }

    /// Keeps what was marked of a request after so many tokens, and written.
    pub(super) fn keep_marked(&mut self, request: RequestId, len: usize) -> Option<Snapshot> {
        let of_request = self.marked.get_mut(&request)?;
        let place = of_request.iter().position(|&(marked, _)| marked == len)?;
        let (_, snapshot) = of_request.swap_remove(place);
        self.lens.insert(snapshot, len);
        Some(snapshot)
    }

    /// Gives back what is marked of a request and was not kept.
    pub(super) fn unmark(&mut self, request: RequestId) {
        let marked = self.marked.remove(&request).into_iter().flatten();
        self.free.extend(marked.map(|(_, snapshot)| snapshot));
    }

    pub(super) fn discard(&mut self, snapshot: Snapshot) {
        if self.lens.remove(&snapshot).is_some() {
            self.free.push(snapshot);
        }
    }

    /// The state after so many tokens, as [`States::row`] has it.
    ///
    /// # Errors
    /// A snapshot that is not there, or of another position.
    pub(super) fn state_after(&self, snapshot: Snapshot, len: usize) -> Result<Vec<Tensor<3>>> {
        match self.lens.get(&snapshot) {
            Some(&kept) if kept == len => self.states.row(snapshot.0 as usize),
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
