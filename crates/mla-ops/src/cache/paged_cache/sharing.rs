//! Requests that begin with pages of others, and those that give tokens back.

use super::{PagedCache, Request, RequestId, wrong_value};
use crate::cache::CacheError;

/// Prefixes: shared, adopted, cut off.
impl PagedCache {
    /// Starts a request with the tokens of `request`, sharing all its pages.
    ///
    /// ```
    /// # use burn::tensor::{Device, FloatDType};
    /// # use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
    /// # let config = CacheConfig {
    /// #     pools: vec![PoolConfig::per_token(12)],
    /// #     num_pages: 8,
    /// #     page_size: 4,
    /// #     max_requests: 2,
    /// #     max_tokens: 16,
    /// #     dtype: FloatDType::F32,
    /// # };
    /// let mut cache = PagedCache::new(config, &Device::flex())?;
    /// let first = cache.admit()?;
    /// cache.append(first, 6)?;
    /// let second = cache.fork(first)?; // shares two pages, the second one half full
    /// cache.append(second, 1)?; // copies that one
    /// assert_eq!(cache.pages(first)?[0], cache.pages(second)?[0]);
    /// assert_eq!((cache.len(second)?, cache.pages_in_use()), (7, 3));
    /// # Ok::<(), mla_ops::cache::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::OutOfRequests`].
    pub fn fork(&mut self, request: RequestId) -> Result<RequestId, CacheError> {
        let parent = self.request(request)?;
        let (len, pages) = (parent.len, parent.pages.clone());
        let row = self.map.take_row()?;
        self.hold(&pages)?;
        self.unwritten.insert(row, 0);
        Ok(self.insert(Request { row, len, pages }))
    }

    /// Starts a request whose first tokens are these whole pages, which somebody holds: their rows are written already.
    ///
    /// ```
    /// # use burn::tensor::{Device, FloatDType};
    /// # use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
    /// # let config = CacheConfig {
    /// #     pools: vec![PoolConfig::per_token(12)],
    /// #     num_pages: 8,
    /// #     page_size: 4,
    /// #     max_requests: 2,
    /// #     max_tokens: 16,
    /// #     dtype: FloatDType::F32,
    /// # };
    /// let mut cache = PagedCache::new(config, &Device::flex())?;
    /// let prompt = cache.admit()?;
    /// cache.append(prompt, 10)?;
    /// // Its two whole pages outlive it, for prompts that begin alike (prefix caching).
    /// let prefix = cache.pages(prompt)?[..2].to_vec();
    /// cache.retain(&prefix)?;
    /// cache.free(prompt)?;
    /// let next = cache.admit_with(&prefix)?;
    /// assert_eq!((cache.len(next)?, cache.pages_in_use()), (8, 2));
    /// # Ok::<(), mla_ops::cache::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::NotAllocated`], [`CacheError::RequestTooLong`], [`CacheError::OutOfRequests`].
    pub fn admit_with(&mut self, pages: &[u32]) -> Result<RequestId, CacheError> {
        let max = self.config.max_tokens;
        let len = pages.len().saturating_mul(self.config.page_size);
        if len > max {
            return Err(CacheError::RequestTooLong { request: self.next_request(), tokens: len, max });
        }
        self.hold(pages)?;
        let row = match self.map.take_row() {
            Ok(row) => row,
            Err(error) => {
                self.let_go(pages)?;
                return Err(error);
            }
        };
        self.unwritten.insert(row, 0);
        Ok(self.insert(Request { row, len, pages: pages.to_vec() }))
    }

    /// Takes the last tokens of a request back, those from position `len` on: a step that failed can be rolled back. Pages
    /// that nobody else holds are free again; a page that is shared and partly kept is copied at the next append.
    ///
    /// ```
    /// # use burn::tensor::{Device, FloatDType};
    /// # use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
    /// # let config = CacheConfig {
    /// #     pools: vec![PoolConfig::per_token(12)],
    /// #     num_pages: 8,
    /// #     page_size: 4,
    /// #     max_requests: 2,
    /// #     max_tokens: 16,
    /// #     dtype: FloatDType::F32,
    /// # };
    /// let mut cache = PagedCache::new(config, &Device::flex())?;
    /// let request = cache.admit()?;
    /// cache.append(request, 9)?;
    /// cache.truncate(request, 4)?;
    /// assert_eq!((cache.len(request)?, cache.pages_in_use()), (4, 1));
    /// # Ok::<(), mla_ops::cache::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`]; [`MlaError::Value`](crate::MlaError::Value) for more tokens than it has.
    pub fn truncate(&mut self, request: RequestId, len: usize) -> Result<(), CacheError> {
        let kept = len.div_ceil(self.config.page_size);
        let state = self.request(request)?;
        if len > state.len {
            return Err(wrong_value("len", len, format!("at most {}, the tokens of {request}", state.len)).into());
        }
        let cut = state.pages[kept..].to_vec();
        self.let_go(&cut)?;
        let state = self.request_mut(request)?;
        state.pages.truncate(kept);
        state.len = len;
        Ok(())
    }

    /// Gives a request these pages, which somebody holds, in the place of its first ones, which it releases: they have the same rows.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::NotAllocated`]; [`MlaError::Value`](crate::MlaError::Value) for more pages than its
    /// tokens fill.
    pub fn replace_first_pages(&mut self, request: RequestId, pages: &[u32]) -> Result<(), CacheError> {
        let Request { row, len, pages: held } = self.request(request)?;
        let (row, filled) = (*row, len / self.config.page_size);
        if pages.len() > filled {
            return Err(wrong_value("pages", pages.len(), format!("at most {filled}, which {request} fills")).into());
        }
        let Some(changed) = pages.iter().zip(held).position(|(new, old)| new != old) else {
            return Ok(());
        };
        let old = held[changed..pages.len()].to_vec();
        self.hold(&pages[changed..])?;
        self.let_go(&old)?;
        self.request_mut(request)?.pages[changed..pages.len()].copy_from_slice(&pages[changed..]);
        let first = changed * self.config.page_size;
        self.unwritten.entry(row).and_modify(|other| *other = first.min(*other)).or_insert(first);
        Ok(())
    }
}
