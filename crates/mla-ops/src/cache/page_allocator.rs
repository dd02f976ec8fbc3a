//! Pages and their holders.

use super::CacheError;

/// Hands out the pages `0..num_pages` and counts the holders of each.
///
/// Pages come lowest first from a fresh allocator; later, the page released last is handed out first. Every call checks all
/// of its input before it changes anything.
///
/// ```
/// use mla_ops::cache::PageAllocator;
///
/// let mut allocator = PageAllocator::new(8);
/// let pages = allocator.allocate(3)?;
/// allocator.retain(&pages[..1])?; // a second request shares the first page
/// allocator.release(&pages)?; // the first one ends
/// assert_eq!((allocator.free_pages(), allocator.ref_count(pages[0])), (7, 1));
/// # Ok::<(), mla_ops::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct PageAllocator {
    num_pages: u32,
    /// Of the pages that were handed out at least once: what a large cache does not use costs no memory.
    ref_counts: Vec<u32>,
    /// Those of them that are free again. A stack: the next page to hand out is at the end.
    free: Vec<u32>,
}

impl PageAllocator {
    /// All pages `0..num_pages`, free.
    pub fn new(num_pages: u32) -> Self {
        Self { num_pages, ref_counts: Vec::new(), free: Vec::new() }
    }

    /// Takes `n` pages, with one holder each.
    ///
    /// # Errors
    /// [`CacheError::OutOfPages`] if fewer than `n` are free; then none is taken.
    pub fn allocate(&mut self, n: usize) -> Result<Vec<u32>, CacheError> {
        if n > self.free_pages() {
            return Err(CacheError::OutOfPages { needed: n, free: self.free_pages(), total: self.num_pages() });
        }
        let kept = self.free.len().saturating_sub(n);
        let mut pages: Vec<u32> = self.free.drain(kept..).rev().collect();
        let fresh = self.ref_counts.len();
        let known = fresh + n - pages.len();
        // The casts keep the values: there are `num_pages` at most, a u32.
        pages.extend(fresh as u32..known as u32);
        self.ref_counts.resize(known, 0);
        for &page in &pages {
            self.ref_counts[page as usize] = 1;
        }
        Ok(pages)
    }

    /// Adds a holder to every page of the list (one per mention).
    ///
    /// # Errors
    /// [`CacheError::NotAllocated`] if one of them has no holder yet; then nothing changes.
    pub fn retain(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        for &page in pages {
            self.holders(page)?;
        }
        for &page in pages {
            self.ref_counts[page as usize] += 1;
        }
        Ok(())
    }

    /// Takes a holder from every page of the list (one per mention). Pages without holders are free again.
    ///
    /// # Errors
    /// [`CacheError::NotAllocated`] for a page without holders, [`CacheError::DoubleFree`] for one that the list names more
    /// often than it has holders; then nothing changes.
    pub fn release(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        // Sorted, so that the mentions of one page stand side by side and can be counted.
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        for mentions in sorted.chunk_by(|a, b| a == b) {
            let (page, times) = (mentions[0], mentions.len());
            let holders = self.holders(page)?;
            if times > holders as usize {
                return Err(CacheError::DoubleFree { page, times, holders });
            }
        }
        for &page in pages {
            let count = &mut self.ref_counts[page as usize];
            *count -= 1;
            if *count == 0 {
                self.free.push(page);
            }
        }
        Ok(())
    }

    /// Free pages.
    pub fn free_pages(&self) -> usize {
        self.num_pages() - self.ref_counts.len() + self.free.len()
    }

    /// Pages there are.
    pub fn num_pages(&self) -> usize {
        self.num_pages as usize
    }

    /// Holders of `page`; 0 if it is free or does not exist.
    pub fn ref_count(&self, page: u32) -> u32 {
        self.ref_counts.get(page as usize).copied().unwrap_or(0)
    }

    fn holders(&self, page: u32) -> Result<u32, CacheError> {
        match self.ref_count(page) {
            0 => Err(CacheError::NotAllocated { page }),
            holders => Ok(holders),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_lowest_first_and_come_back() {
        let mut allocator = PageAllocator::new(4);
        assert_eq!(allocator.allocate(3), Ok(vec![0, 1, 2]));
        assert_eq!(allocator.free_pages(), 1);
        allocator.release(&[1]).unwrap();
        assert_eq!(allocator.allocate(2), Ok(vec![1, 3]));
        assert_eq!(allocator.allocate(0), Ok(vec![]));
        assert_eq!((allocator.free_pages(), allocator.num_pages()), (0, 4));
    }

    #[test]
    fn allocation_is_all_or_nothing() {
        let mut allocator = PageAllocator::new(3);
        allocator.allocate(1).unwrap();
        let error = CacheError::OutOfPages { needed: 3, free: 2, total: 3 };
        assert_eq!(allocator.allocate(3), Err(error));
        assert_eq!(allocator.allocate(2), Ok(vec![1, 2]));
    }

    #[test]
    fn a_page_is_free_when_its_last_holder_leaves() {
        let mut allocator = PageAllocator::new(2);
        allocator.allocate(1).unwrap();
        allocator.retain(&[0, 0]).unwrap();
        assert_eq!(allocator.ref_count(0), 3);
        allocator.release(&[0, 0]).unwrap();
        assert_eq!((allocator.ref_count(0), allocator.free_pages()), (1, 1));
        allocator.release(&[0]).unwrap();
        assert_eq!((allocator.ref_count(0), allocator.free_pages()), (0, 2));
    }

    #[test]
    fn wrong_lists_change_nothing() {
        let mut allocator = PageAllocator::new(4);
        allocator.allocate(2).unwrap();
        let twice = CacheError::DoubleFree { page: 1, times: 2, holders: 1 };
        assert_eq!(allocator.release(&[0, 1, 1]), Err(twice));
        for page in [2, 4, u32::MAX] {
            let unheld = CacheError::NotAllocated { page };
            assert_eq!(allocator.release(&[0, page]), Err(unheld.clone()));
            assert_eq!(allocator.retain(&[0, page]), Err(unheld));
        }
        assert_eq!((allocator.ref_count(0), allocator.ref_count(1)), (1, 1));
        assert_eq!(allocator.free_pages(), 2);
    }
}
