//! A cache for tests of the scheduler.

use std::collections::HashMap;

use mla_ops::cache::{CacheError, PagedCache, RequestId};

use crate::Result;
use crate::cache::{RequestCache, Snapshot, Snapshots};

/// A cache whose requests have a state beside their pages, which stands for all tokens so far: the row of the last one.
#[derive(Debug)]
pub(super) struct StatefulCache {
    pub(super) pages: PagedCache,
    pub(super) states: HashMap<RequestId, f32>,
    /// Snapshots by their slots.
    pub(super) kept: Vec<Option<f32>>,
    /// What passes have to write, and how many tokens these have computed of each request.
    pub(super) marks: HashMap<(RequestId, usize), Option<f32>>,
    pub(super) computed: HashMap<RequestId, usize>,
}

/// A pass has the state behind so many of its tokens, and behind more.
pub(super) const FIRST_MARK: usize = 3;

impl StatefulCache {
    pub(super) fn new(pages: PagedCache) -> Self {
        let (states, kept, marks, computed) = Default::default();
        Self { pages, states, kept, marks, computed }
    }
}

impl RequestCache for StatefulCache {
    fn kind(&self) -> &'static str {
        "that of a test"
    }

    fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        self.pages.admit()
    }

    fn append(&mut self, request: RequestId, n_tokens: usize) -> std::result::Result<Vec<i32>, CacheError> {
        self.pages.append(request, n_tokens)
    }

    fn fork(&mut self, request: RequestId) -> Result<RequestId> {
        Ok(self.pages.fork(request)?)
    }

    fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        self.states.remove(&request);
        self.computed.remove(&request);
        self.unmark(request);
        self.pages.free(request)
    }

    fn bytes_in_use(&self) -> usize {
        self.pages.bytes_in_use()
    }

    fn pages(&self) -> &PagedCache {
        &self.pages
    }

    fn pages_mut(&mut self) -> &mut PagedCache {
        &mut self.pages
    }

    fn admit_with(&mut self, pages: &[u32], snapshot: Option<Snapshot>) -> Result<RequestId> {
        let request = self.pages.admit_with(pages)?;
        if let Some(Snapshot(slot)) = snapshot {
            self.states.insert(request, self.kept[slot as usize].expect("it is kept"));
            self.computed.insert(request, self.pages.len(request)?);
        }
        Ok(request)
    }

    fn snapshots(&mut self) -> Option<&mut dyn Snapshots> {
        Some(self)
    }
}

impl Snapshots for StatefulCache {
    fn reserve(&mut self, slots: usize) -> Result<()> {
        self.kept = vec![None; slots];
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.kept.iter().flatten().count() + self.marks.len() < self.kept.len()
    }

    fn mark(&mut self, request: RequestId, len: usize) -> Result<bool> {
        let computed = self.computed.get(&request).copied().unwrap_or(0);
        let possible = self.has_room() && len >= computed + FIRST_MARK;
        if possible {
            assert_eq!(self.marks.insert((request, len), None), None, "a mark of its own");
        }
        Ok(possible)
    }

    fn keep(&mut self, request: RequestId, len: usize) -> Result<Option<Snapshot>> {
        let state = match self.marks.remove(&(request, len)) {
            Some(written) => written.expect("a pass has written it"),
            None if !self.has_room() => return Ok(None),
            None => {
                assert_eq!(self.computed[&request], len, "the state has moved on");
                self.states[&request]
            }
        };
        let slot = self.kept.iter().position(Option::is_none).expect("that of the mark, or room");
        self.kept[slot] = Some(state);
        Ok(Some(Snapshot(slot as u32)))
    }

    fn unmark(&mut self, request: RequestId) {
        self.marks.retain(|(of, _), _| *of != request);
    }

    fn discard(&mut self, Snapshot(slot): Snapshot) {
        self.kept[slot as usize].take().expect("it is kept");
    }
}
