//! The cache of DeepSeek-V4: for each request a state of fixed size, and pages of compressed entries.

use std::collections::HashMap;
use std::ops::Range;

use burn::tensor::{Device, Tensor};
use mla_ops::cache::{CacheConfig, CacheError, PagedCache, Pool, RequestId};

use super::config::DeepseekV4Config;
use super::snapshots::SnapshotRows;
use super::states::{MarkedRows, State, States};
use crate::cache::{CacheSize, RequestCache, Snapshot, Snapshots};
use crate::models::architecture::Architecture;
use crate::weights::LoadAs;
use crate::{ModelError, Result, memory};

/// A request has a row in the state of every layer and compressor, which is its own as long as it lives, and pages that
/// it shares with its forks, and with requests that begin like it. A page holds the compressed entries and index keys of its
/// tokens, for all layers.
#[derive(Debug)]
pub(crate) struct V4Cache {
    device: Device,
    load_as: LoadAs,
    /// A pool for each compressor.
    entries: PagedCache,
    /// A row for each request.
    states: States,
    /// Rows for snapshots, once there is room for some.
    snapshots: Option<SnapshotRows>,
    /// How many of a request's tokens a forward pass has taken in.
    computed: HashMap<RequestId, usize>,
    /// Tokens that a state has something of, at most.
    state_tokens: usize,
    bytes_per_request: usize,
}

/// A request in a forward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// Its row in the states.
    pub(crate) row: usize,
    /// The position of its first new token.
    pub(crate) start: usize,
}

impl V4Cache {
    /// An empty cache for a model of this configuration, computing in `dtype`. A page covers at least the tokens of the
    /// longest compressed window; where that is more than `size.page_size`, there is room for as many tokens as `size`
    /// says, and a last page for each request.
    ///
    /// # Errors
    /// A size that is zero or too large, or a page size that is no power of two.
    pub(crate) fn new(config: &DeepseekV4Config, size: CacheSize, load_as: LoadAs, device: &Device) -> Result<Self> {
        let (dtype, bytes) = (load_as.dtype, Self::bytes(config, size, load_as)?);
        memory::check("a KV cache", bytes, device)?;
        Ok(Self {
            device: device.clone(),
            load_as,
            entries: PagedCache::new(entry_pages(config, size, load_as)?, device)?,
            states: States::new(config, size.max_requests, dtype, device)?,
            snapshots: None,
            computed: HashMap::new(),
            state_tokens: config.state_tokens(),
            bytes_per_request: config.bytes_per_request(dtype),
        })
    }

    /// Bytes of a cache of this size.
    pub(super) fn bytes(config: &DeepseekV4Config, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        let pages = entry_pages(config, size, load_as)?.bytes().map_err(CacheError::from)?;
        let states = (size.max_requests as u128).saturating_mul(config.bytes_per_request(load_as.dtype) as u128);
        Ok(states.saturating_add(pages as u128))
    }

    /// Bytes that a step dequantises a layer's index keys to, at most.
    pub(super) fn index_scratch_bytes(config: &DeepseekV4Config, size: CacheSize, load_as: LoadAs) -> Result<u128> {
        Ok(entry_pages(config, size, load_as)?.index_scratch_bytes().map_err(CacheError::from)? as u128)
    }

    /// The pages of entries.
    pub(crate) fn entries(&self) -> &PagedCache {
        &self.entries
    }

    /// Moves the pool of a compressor out; [`Self::put_entries`] gives it back.
    pub(crate) fn take_entries(&mut self, pool: usize) -> Result<Pool> {
        Ok(self.entries.take_pool(pool)?)
    }

    /// Gives back what [`Self::take_entries`] handed out.
    pub(crate) fn put_entries(&mut self, pool: usize, entries: Pool) -> Result<()> {
        Ok(self.entries.put_pool(pool, entries)?)
    }

    /// Begins a forward pass over the last `n_tokens` tokens of a request. The state moves on with every pass, so a token
    /// cannot be left out, or computed twice; but for the last one of all, which finds the state as it left it: what it writes goes
    /// where it went before, and nothing of that is read by it alone.
    pub(crate) fn begin(&mut self, request: RequestId, n_tokens: usize) -> Result<Place> {
        let (len, computed) = (self.entries.len(request)?, self.computed(request)?);
        let missing = len - computed;
        let again = missing == 0 && n_tokens == 1 && len > 0;
        if !again && (n_tokens == 0 || n_tokens != missing) {
            let expected = format!("the {missing} tokens of {request} that were appended and not computed yet");
            return Err(ModelError::request("chunks", format!("{n_tokens} tokens of {request}"), expected));
        }
        self.computed.insert(request, len);
        Ok(Place { row: self.entries.row(request)? as usize, start: len - n_tokens })
    }

    /// A cache of the same layout, with next to no rows.
    pub(super) fn stand_in(&self, config: &DeepseekV4Config) -> Result<Self> {
        let size =
            CacheSize { num_pages: 1, page_size: self.entries.config().page_size, max_requests: 1, max_tokens: 1 };
        Self::new(config, size, self.load_as, &self.device)
    }

    /// Moves a state out, so that the caller owns the only handle and can write in place; [`Self::put`] gives it back.
    pub(crate) fn take(&mut self, state: State) -> Result<Tensor<3>> {
        self.states.take(state)
    }

    /// Gives back what [`Self::take`] handed out.
    pub(crate) fn put(&mut self, state: State, tensor: Tensor<3>) {
        self.states.put(state, tensor);
    }

    /// Another handle of a state.
    pub(crate) fn read(&mut self, state: State) -> Result<Tensor<3>> {
        let tensor = self.take(state)?;
        self.put(state, tensor.clone());
        Ok(tensor)
    }

    /// The snapshots that a forward pass over new tokens of a request writes: the tokens before each, and its row.
    pub(super) fn marked(&self, request: RequestId, new: Range<usize>) -> Vec<(usize, usize)> {
        let marked = self.snapshots.iter().flat_map(|rows| rows.marked(request));
        marked.filter(|(len, _)| (new.start + self.state_tokens..=new.end).contains(len)).collect()
    }

    /// Of the rows `[N, C]` of new tokens, what the snapshots take that this pass writes.
    pub(crate) fn write_marked(&mut self, state: State, rows: &Tensor<2>, marked: &MarkedRows) -> Result<()> {
        self.snapshots.as_mut().map_or(Ok(()), |snapshots| snapshots.write_marked(state, rows, marked))
    }

    fn computed(&self, request: RequestId) -> std::result::Result<usize, CacheError> {
        self.computed.get(&request).copied().ok_or(CacheError::UnknownRequest { request })
    }

    /// The row of a request whose tokens are all computed.
    fn row_of(&self, request: RequestId) -> Result<usize> {
        let missing = self.entries.len(request)? - self.computed(request)?;
        if missing > 0 {
            let actual = format!("{request}, with {missing} tokens that were appended and not computed yet");
            return Err(ModelError::request("request", actual, "one whose tokens are all computed"));
        }
        Ok(self.entries.row(request)? as usize)
    }
}

impl RequestCache for V4Cache {
    fn kind(&self) -> &'static str {
        "that of a DeepSeek-V4 model"
    }

    fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        let request = self.entries.admit()?;
        self.computed.insert(request, 0);
        Ok(request)
    }

    /// A token has no row of its own.
    fn append(&mut self, request: RequestId, n_tokens: usize) -> std::result::Result<Vec<i32>, CacheError> {
        self.entries.append(request, n_tokens).map(|_| Vec::new())
    }

    fn skip(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        let len = self.entries.len(request)?;
        self.computed.insert(request, len);
        Ok(())
    }

    /// The state is copied, the pages are shared.
    fn fork(&mut self, request: RequestId) -> Result<RequestId> {
        let state = self.states.copied_row(self.row_of(request)?, &self.device)?;
        let fork = self.entries.fork(request)?;
        self.states.set_row(self.entries.row(fork)? as usize, state);
        self.computed.insert(fork, self.computed(request)?);
        Ok(fork)
    }

    /// A forward pass that has begun with these tokens has moved the state on.
    fn truncate(&mut self, request: RequestId, len: usize) -> std::result::Result<bool, CacheError> {
        let possible = self.computed(request)? <= len;
        if possible {
            self.entries.truncate(request, len)?;
            self.unmark(request);
        }
        Ok(possible)
    }

    fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        self.entries.free(request)?;
        self.computed.remove(&request);
        self.unmark(request);
        Ok(())
    }

    /// Bytes of the live requests' states, of the snapshots that are kept, and of the pages in use.
    fn bytes_in_use(&self) -> usize {
        let snapshots = self.snapshots.as_ref().map_or(0, SnapshotRows::kept);
        (self.computed.len() + snapshots) * self.bytes_per_request + self.entries.bytes_in_use()
    }

    fn pages(&self) -> &PagedCache {
        &self.entries
    }

    fn pages_mut(&mut self) -> &mut PagedCache {
        &mut self.entries
    }

    /// The state of a snapshot is copied, the pages are shared.
    fn admit_with(&mut self, pages: &[u32], snapshot: Option<Snapshot>) -> Result<RequestId> {
        let Some(snapshot) = snapshot.filter(|_| !pages.is_empty()) else {
            return match pages {
                [] => Ok(self.admit()?),
                _ => Err(ModelError::request("snapshot", "none", "one of the state after these pages")),
            };
        };
        let len = pages.len().saturating_mul(self.entries.config().page_size);
        let rows = self.snapshots.as_ref().ok_or_else(|| SnapshotRows::unknown(snapshot))?;
        let state = rows.state_after(snapshot, len)?;
        let request = self.entries.admit_with(pages)?;
        self.states.set_row(self.entries.row(request)? as usize, state);
        self.computed.insert(request, len);
        Ok(request)
    }

    fn snapshots(&mut self) -> Option<&mut dyn Snapshots> {
        Some(self)
    }
}

impl Snapshots for V4Cache {
    fn reserve(&mut self, slots: usize) -> Result<()> {
        let bytes = (slots as u128).saturating_mul(self.bytes_per_request as u128);
        const WHAT: &str = "snapshots of requests' states";
        memory::check(WHAT, bytes, &self.device)?;
        let states = self.states.like(slots, &self.device);
        let states = states.map_err(|error| memory::of_failure(WHAT, error, &self.device))?;
        self.snapshots = Some(SnapshotRows::new(states, slots));
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.snapshots.as_ref().is_some_and(SnapshotRows::has_room)
    }

    /// A pass has the last rows of all states among its own tokens if there are as many before the mark.
    fn mark(&mut self, request: RequestId, len: usize) -> Result<bool> {
        let has_all = len >= self.computed(request)?.saturating_add(self.state_tokens);
        Ok(has_all && self.snapshots.as_mut().is_some_and(|rows| rows.mark(request, len)))
    }

    fn keep(&mut self, request: RequestId, len: usize) -> Result<Option<Snapshot>> {
        let computed = self.computed(request)?;
        let marked = self.snapshots.as_mut().filter(|_| len <= computed);
        if let Some(snapshot) = marked.and_then(|rows| rows.keep_marked(request, len)) {
            return Ok(Some(snapshot));
        }
        if !self.has_room() {
            return Ok(None);
        }
        let (state, of) = (self.states.row(self.row_of(request)?)?, self.entries.len(request)?);
        if of != len {
            let expected = format!("{of}: the state after fewer was not marked");
            return Err(ModelError::request("len", len, expected));
        }
        Ok(self.snapshots.as_mut().and_then(|rows| rows.keep(len, state)))
    }

    fn unmark(&mut self, request: RequestId) {
        if let Some(rows) = &mut self.snapshots {
            rows.unmark(request);
        }
    }

    fn discard(&mut self, snapshot: Snapshot) {
        if let Some(rows) = &mut self.snapshots {
            rows.discard(snapshot);
        }
    }
}

/// Pages that hold whole entries of every compressor.
fn entry_pages(config: &DeepseekV4Config, size: CacheSize, load_as: LoadAs) -> Result<CacheConfig> {
    let pages = CacheConfig {
        pools: config.pools(config.row_format(load_as.kv_cache)?),
        num_pages: size.num_pages,
        page_size: size.page_size,
        max_requests: size.max_requests,
        max_tokens: size.max_tokens,
        dtype: load_as.dtype,
    };
    Ok(with_whole_entries(pages, config))
}

fn with_whole_entries(size: CacheConfig, config: &DeepseekV4Config) -> CacheConfig {
    let window = config.tokens_per_block();
    if size.page_size >= window || !size.page_size.is_power_of_two() {
        return size;
    }
    let tokens = size.num_pages.saturating_mul(size.page_size);
    // Of zero pages there is nothing to round up: the cache refuses them.
    let pages = if tokens == 0 { 0 } else { tokens.div_ceil(window).saturating_add(size.max_requests) };
    CacheConfig { num_pages: pages, page_size: window, ..size }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
