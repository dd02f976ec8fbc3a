//! Errors of the paged cache.

use thiserror::Error;

use super::RequestId;
use crate::MlaError;

/// A call on the cache that cannot be carried out. The cache is as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CacheError {
    /// More pages are needed than are free.
    #[error(
        "{needed} pages are needed, but {free} of {total} are free; free a request, or build the cache with more pages"
    )]
    OutOfPages {
        /// Pages that the call needs.
        needed: usize,
        /// Free pages.
        free: usize,
        /// Pages of the cache.
        total: usize,
    },
    /// Every request row is taken.
    #[error("all {max} requests of the cache are live; free one, or build the cache with a larger `max_requests`")]
    OutOfRequests {
        /// Requests that may live at once.
        max: usize,
    },
    /// The id names no live request: it was freed, or comes from another cache.
    #[error("{request} is not a live request of this cache (ids die with `free` and are never used again)")]
    UnknownRequest {
        /// The id.
        request: RequestId,
    },
    /// The request would outgrow its row of `req_to_token`.
    #[error(
        "{request} would have {tokens} tokens, at most {max} are allowed; build the cache with a larger `max_tokens`"
    )]
    RequestTooLong {
        /// The request.
        request: RequestId,
        /// Tokens it would have.
        tokens: usize,
        /// Tokens it may have.
        max: usize,
    },
    /// A page that is free, or that does not exist, was retained or released.
    #[error("page {page} is not allocated; only pages that `allocate` gave out can be retained or released")]
    NotAllocated {
        /// The page.
        page: u32,
    },
    /// A list of pages to release names a page more often than it has holders.
    #[error("page {page} would be released {times} times but has {holders} holders; release it once per holder")]
    DoubleFree {
        /// The page.
        page: u32,
        /// How often the list names it.
        times: usize,
        /// How many holders it has.
        holders: u32,
    },
    /// A list of pages to release names a page more often than it was retained: live requests hold it.
    #[error(
        "page {page} would be released {times} times but was retained {retained} times; what requests hold is released by `free` or `truncate`"
    )]
    NotRetained {
        /// The page.
        page: u32,
        /// How often the list names it.
        times: usize,
        /// How often it was retained and not yet released.
        retained: usize,
    },
    /// A pool was taken and is not back yet.
    #[error("pool {pool} is taken; give it back with `put_pool` first")]
    PoolTaken {
        /// Its number.
        pool: usize,
    },
    /// A pool was given back that the cache still has.
    #[error("pool {pool} was not taken; `put_pool` only gives back what `take_pool` handed out")]
    PoolNotTaken {
        /// Its number.
        pool: usize,
    },
    /// An argument is wrong.
    #[error(transparent)]
    Mla(#[from] MlaError),
}
