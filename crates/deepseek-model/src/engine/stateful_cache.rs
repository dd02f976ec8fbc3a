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
}

impl StatefulCache {
    pub(super) fn new(pages: PagedCache) -> Self {
        Self { pages, states: HashMap::new(), kept: Vec::new() }
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

    fn keep(&mut self, request: RequestId) -> Result<Option<Snapshot>> {
        let slot = self.kept.iter().position(Option::is_none);
        Ok(slot.map(|slot| {
            self.kept[slot] = Some(self.states[&request]);
            Snapshot(slot as u32)
        }))
    }

    fn discard(&mut self, Snapshot(slot): Snapshot) {
        self.kept[slot as usize].take().expect("it is kept");
    }
}
