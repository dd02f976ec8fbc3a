//! The paged cache: who owns which page, where each token of a request lies, and the pools that hold the rows.
//!
//! A page is `page_size` rows of one pool, and the same page id means the same place in the pool of every layer. A slot is
//! `page * page_size + offset`, the address of one token's row.
//!
//! - [`PageAllocator`] counts the holders of every page;
//! - [`RequestToToken`] is the device map from (request row, token position) to slot, `req_to_token` of the paged index ops;
//! - [`PagedCache`] puts the two together with one pool per layer.

mod config;
mod error;
#[cfg(all(test, feature = "flex"))]
mod misuse_tests;
mod new_pool;
mod page_allocator;
mod paged_cache;
mod pool;
mod request_to_token;

pub use config::{CacheConfig, PoolConfig};
pub use error::CacheError;
pub use new_pool::new_pool;
pub use page_allocator::PageAllocator;
pub use paged_cache::{PagedCache, RequestId};
pub(crate) use pool::{BackendPool, Fp8Rows, Fp8Scales};
pub use pool::{Pool, RowFormat};
pub use request_to_token::RequestToToken;
