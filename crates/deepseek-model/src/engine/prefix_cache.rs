//! What is kept of requests for those that begin like them: pages, and snapshots where a request has a state beside its pages.

use std::collections::HashMap;

#[cfg(test)]
use mla_ops::cache::PagedCache;
use mla_ops::cache::RequestId;

use super::EngineOptions;
use super::prefix_tree::{Found, PrefixTree};
use crate::cache::{ModelCache, Snapshot};
use crate::models::PrefixSupport;
use crate::{ModelError, Result};

/// The pages of former requests by their tokens, and snapshots at the ends of some.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    page_size: usize,
    tree: PrefixTree,
    /// `None` where pages are all that is needed.
    snapshots: Option<KeptSnapshots>,
}

/// Snapshots by the page at whose end they were taken: with that they leave the tree.
#[derive(Debug)]
struct KeptSnapshots {
    /// Tokens between two of them.
    spacing: usize,
    slots: usize,
    at: HashMap<u32, Kept>,
    /// Counts the uses.
    clock: u64,
}

#[derive(Debug)]
struct Kept {
    snapshot: Snapshot,
    used: u64,
}

/// What a request can begin with.
#[derive(Debug, Default)]
pub(crate) struct Prefix {
    /// Whole pages.
    pub(crate) pages: Vec<u32>,
    /// Of the state after them.
    pub(crate) snapshot: Option<Snapshot>,
}

impl PrefixCache {
    /// That of an engine, if it has one. Slots for snapshots are allocated.
    ///
    /// # Errors
    /// A spacing that is no multiple of the pages, or slots that the memory has no room for.
    pub(crate) fn of_engine(
        options: &EngineOptions,
        support: PrefixSupport,
        cache: &mut ModelCache,
    ) -> Result<Option<Self>> {
        match support {
            _ if !options.prefix_caching => Ok(None),
            PrefixSupport::Pages => Ok(Some(Self::of_pages(cache))),
            PrefixSupport::Snapshots { .. } => {
                let (spacing, tokens) = (options.snapshot_spacing, cache.num_pages() * cache.page_size());
                Self::with_snapshots(cache, spacing, tokens.div_ceil(spacing.max(1))).map(Some)
            }
        }
    }

    /// For requests that have nothing beside their pages.
    pub(crate) fn of_pages(cache: &ModelCache) -> Self {
        let page_size = cache.page_size();
        Self { page_size, tree: PrefixTree::new(page_size), snapshots: None }
    }

    /// For requests with a state beside their pages; with so many snapshots at most.
    ///
    /// # Errors
    /// As [`Self::of_engine`].
    pub(crate) fn with_snapshots(cache: &mut ModelCache, spacing: usize, slots: usize) -> Result<Self> {
        let pages = Self::of_pages(cache);
        if spacing == 0 || !spacing.is_multiple_of(pages.page_size) {
            // A page has whole compressed entries, so that its size is a multiple of each compression rate.
            let expected = format!("a multiple of {}, the tokens of this cache's pages", pages.page_size);
            return Err(ModelError::request("snapshot_spacing", spacing, expected));
        }
        if let Some(snapshots) = cache.snapshots() {
            snapshots.reserve(slots)?;
        }
        Ok(Self { snapshots: Some(KeptSnapshots { spacing, slots, at: HashMap::new(), clock: 0 }), ..pages })
    }

    /// Snapshots, and slots for them.
    pub(crate) fn snapshots(&self) -> [usize; 2] {
        self.snapshots.as_ref().map_or([0; 2], |kept| [kept.at.len(), kept.slots])
    }

    /// Pages in the tree.
    #[cfg(test)]
    pub(crate) fn pages(&self) -> usize {
        self.tree.len()
    }

    /// Pages that [`Self::evict`] could free.
    #[cfg(test)]
    pub(crate) fn evictable_pages(&self, cache: &PagedCache) -> usize {
        self.tree.evictable(|page| cache.holders(page) == 1)
    }

    /// Pages of tokens that were looked for.
    #[cfg(test)]
    pub(crate) fn compared(&self) -> usize {
        self.tree.compared.get()
    }

    /// The longest beginning of `tokens` from which a request can go on; `found` is what is known of them.
    pub(crate) fn longest(&mut self, tokens: &[u32], found: &mut Found) -> Prefix {
        let mut pages = self.tree.longest_prefix(tokens, found);
        let Some(kept) = &mut self.snapshots else {
            return Prefix { pages, snapshot: None };
        };
        pages.truncate(pages.iter().rposition(|page| kept.at.contains_key(page)).map_or(0, |last| last + 1));
        let snapshot = pages.last().and_then(|page| kept.used(*page));
        Prefix { pages, snapshot }
    }

    /// How many of the next `n` tokens of a request, behind `cached` of `len`, its chunk has: all, where the pass that computes them
    /// takes the snapshots within them.
    ///
    /// # Errors
    /// A cache that is damaged.
    pub(crate) fn chunk_len(
        &mut self,
        cache: &mut ModelCache,
        request: RequestId,
        [cached, n, len]: [usize; 3],
    ) -> Result<usize> {
        let mut end = cached + n;
        if self.snapshots.is_some() && end < len {
            // What follows begins with a page, and the state before the next snapshot is all its own.
            let whole = end / self.page_size * self.page_size;
            end = if whole > cached { whole } else { end };
        }
        let mut before = cached;
        while let Some(stop) = self.next_stop(before, len).filter(|&stop| stop < end) {
            let marked = self.snapshots.as_mut().map_or(Ok(false), |kept| kept.mark(request, stop, cache))?;
            if !marked {
                return Ok(stop - cached);
            }
            before = stop;
        }
        Ok(end - cached)
    }

    /// Where the next snapshot of a request of `len` tokens is taken, behind `cached`: at the next multiple of the spacing, or at the end
    /// of the last whole page. The last token is never before that.
    fn next_stop(&self, cached: usize, len: usize) -> Option<usize> {
        let kept = self.snapshots.as_ref()?;
        let last = len.saturating_sub(1) / self.page_size * self.page_size;
        let stop = ((cached / kept.spacing + 1) * kept.spacing).min(last);
        (stop > cached).then_some(stop)
    }

    /// A running request has computed a chunk, up to the end of the first of these parts of its tokens.
    pub(crate) fn computed(
        &mut self,
        cache: &mut ModelCache,
        request: RequestId,
        (tokens, missing): (&[u32], &[u32]),
        found: &mut Found,
        chunk_len: usize,
    ) -> Result<()> {
        match self.snapshots {
            // Pages that generated tokens fill are offered when the request ends.
            None if chunk_len > 1 => self.insert(cache, request, tokens, found, true),
            None => Ok(()),
            Some(_) => {
                let (mut before, len) = (tokens.len() - chunk_len, tokens.len() + missing.len());
                while let Some(stop) = self.next_stop(before, len).filter(|&stop| stop <= tokens.len()) {
                    self.keep(cache, request, &tokens[..stop], found)?;
                    before = stop;
                }
                if let Some(snapshots) = cache.snapshots() {
                    snapshots.unmark(request);
                }
                Ok(())
            }
        }
    }

    /// A request with these tokens is about to give up its pages. Without a snapshot at their ends they are of no use.
    pub(crate) fn left(
        &mut self,
        cache: &mut ModelCache,
        request: RequestId,
        tokens: &[u32],
        found: &mut Found,
    ) -> Result<()> {
        if self.snapshots.is_some() { Ok(()) } else { self.insert(cache, request, tokens, found, false) }
    }

    /// Frees up to `n` unused pages, the longest unused first, and snapshots at their ends; returns how many pages.
    pub(crate) fn evict(&mut self, cache: &mut ModelCache, n: usize) -> Result<usize> {
        let evicted = self.tree.evict(n, |page| is_idle(cache, page));
        if let Some(kept) = &mut self.snapshots {
            evicted.iter().for_each(|&page| kept.discard(page, cache));
        }
        cache.pages_mut().release(&evicted)?;
        Ok(evicted.len())
    }

    /// Puts the whole pages of a request into the tree; `runs`, if it goes on holding them.
    fn insert(
        &mut self,
        cache: &mut ModelCache,
        request: RequestId,
        tokens: &[u32],
        found: &mut Found,
        runs: bool,
    ) -> Result<()> {
        let pages = cache.pages_mut();
        let added = self.tree.insert(tokens, found, pages.pages(request)?, runs);
        Ok(pages.retain(&added)?)
    }

    /// Keeps whole pages of a request that runs, and its state after them. Where it has computed again what lies between a snapshot
    /// and the end of the common prefix, it goes on with the pages that are there, so that all of a path are those of one request.
    fn keep(&mut self, cache: &mut ModelCache, request: RequestId, tokens: &[u32], found: &mut Found) -> Result<()> {
        let known = self.tree.longest_prefix(tokens, found);
        cache.pages_mut().replace_first_pages(request, &known)?;
        self.insert(cache, request, tokens, found, true)?;
        let last = cache.pages().pages(request)?.get((tokens.len() / self.page_size).wrapping_sub(1)).copied();
        match (&mut self.snapshots, last) {
            (Some(kept), Some(page)) => kept.keep(page, (request, tokens.len()), cache),
            _ => Ok(()),
        }
    }
}

impl KeptSnapshots {
    /// The snapshot at the end of a page, which is used now.
    fn used(&mut self, page: u32) -> Option<Snapshot> {
        let kept = self.at.get_mut(&page)?;
        self.clock += 1;
        kept.used = self.clock;
        Some(kept.snapshot)
    }

    /// Whether the pass that computes the first `len` tokens of a request takes one behind them.
    fn mark(&mut self, request: RequestId, len: usize, cache: &mut ModelCache) -> Result<bool> {
        self.make_room(cache);
        cache.snapshots().map_or(Ok(false), |snapshots| snapshots.mark(request, len))
    }

    /// Keeps one of a request behind its first `len` tokens, at the end of a page, if there is none.
    fn keep(&mut self, page: u32, (request, len): (RequestId, usize), cache: &mut ModelCache) -> Result<()> {
        if self.used(page).is_some() {
            return Ok(());
        }
        let Some(snapshots) = cache.snapshots() else {
            return Ok(());
        };
        let mut kept = snapshots.keep(request, len)?;
        if kept.is_none() && self.make_room(cache) {
            kept = cache.snapshots().map(|snapshots| snapshots.keep(request, len)).transpose()?.flatten();
        }
        if let Some(snapshot) = kept {
            self.clock += 1;
            self.at.insert(page, Kept { snapshot, used: self.clock });
        }
        Ok(())
    }

    /// Where every slot is taken, the longest unused gives up its own; whether it did.
    fn make_room(&mut self, cache: &mut ModelCache) -> bool {
        let full = cache.snapshots().is_some_and(|snapshots| !snapshots.has_room());
        let oldest = self.at.iter().filter(|_| full).min_by_key(|(_, kept)| kept.used).map(|(&page, _)| page);
        oldest.map(|page| self.discard(page, cache)).is_some()
    }

    fn discard(&mut self, page: u32, cache: &mut ModelCache) {
        if let (Some(kept), Some(snapshots)) = (self.at.remove(&page), cache.snapshots()) {
            snapshots.discard(kept.snapshot);
        }
    }
}

/// Whether the tree is the only holder.
fn is_idle(cache: &ModelCache, page: u32) -> bool {
    cache.pages().holders(page) == 1
}
