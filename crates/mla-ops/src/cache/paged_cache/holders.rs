//! Who holds pages: requests, and whoever wants them to outlive requests.

use std::collections::HashMap;

use super::PagedCache;
use crate::cache::CacheError;

impl PagedCache {
    /// Adds a holder to pages, one per mention: they outlive their requests, until [`Self::release`].
    ///
    /// # Errors
    /// [`CacheError::NotAllocated`]; then nothing changes.
    pub fn retain(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        self.allocator.retain(pages)?;
        for &page in pages {
            *self.retained.entry(page).or_default() += 1;
        }
        Ok(())
    }

    /// Takes away what [`Self::retain`] has added; the holds of live requests stay.
    ///
    /// # Errors
    /// [`CacheError::NotAllocated`]; [`CacheError::NotRetained`] for a page that the list names more often than it was
    /// retained; then nothing changes.
    pub fn release(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        let mut mentions: HashMap<u32, usize> = HashMap::new();
        for &page in pages {
            *mentions.entry(page).or_default() += 1;
        }
        for &page in pages {
            let (times, retained) = (mentions[&page], self.retained.get(&page).copied().unwrap_or(0));
            if self.allocator.ref_count(page) == 0 {
                return Err(CacheError::NotAllocated { page });
            }
            if times > retained {
                return Err(CacheError::NotRetained { page, times, retained });
            }
        }
        self.idle -=
            mentions.iter().filter(|&(page, times)| self.is_idle(*page) && self.retained[page] == *times).count();
        self.allocator.release(pages)?;
        for (page, times) in mentions {
            match self.retained.get_mut(&page) {
                Some(retained) if *retained > times => *retained -= times,
                _ => drop(self.retained.remove(&page)),
            }
        }
        Ok(())
    }

    /// Holders of a page: requests and [`Self::retain`]s.
    pub fn holders(&self, page: u32) -> u32 {
        self.allocator.ref_count(page)
    }

    /// Pages that only [`Self::retain`] holds. Counted as they come and go: to ask costs nothing.
    pub fn idle_pages(&self) -> usize {
        self.idle
    }

    /// A request holds these pages, too.
    pub(super) fn hold(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        let before = self.idle_among(pages);
        self.allocator.retain(pages)?;
        self.idle -= before - self.idle_among(pages);
        Ok(())
    }

    /// A request holds these pages no longer.
    pub(super) fn let_go(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        let before = self.idle_among(pages);
        self.allocator.release(pages)?;
        self.idle += self.idle_among(pages) - before;
        Ok(())
    }

    fn is_idle(&self, page: u32) -> bool {
        self.retained.get(&page).is_some_and(|&times| times == self.allocator.ref_count(page) as usize)
    }

    /// How many of these pages are idle, each counted once.
    fn idle_among(&self, pages: &[u32]) -> usize {
        if self.retained.is_empty() {
            return 0;
        }
        let mut idle: Vec<u32> = pages.iter().copied().filter(|&page| self.is_idle(page)).collect();
        idle.sort_unstable();
        idle.dedup();
        idle.len()
    }
}
