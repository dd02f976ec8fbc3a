//! The paged cache of a model: requests, their pages, and pools of rows.

mod batch;
mod holders;
mod pools;
mod sharing;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::config::{CacheConfig, OP, PoolConfig, wrong_value};
use super::{CacheError, PageAllocator, Pool, RequestToToken};
use crate::MlaError;
use crate::check::Check;

/// The [`PagedCache::id`] of the next cache.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Names a request of one [`PagedCache`]. Ids are never used again, and no two caches of a process give the same, so a stale or
/// foreign one is an error and never another request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId {
    /// [`PagedCache::id`].
    cache: u64,
    number: u64,
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.number)
    }
}

#[derive(Debug, Default)]
struct Request {
    /// Its row of `req_to_token`.
    row: u32,
    /// Its tokens.
    len: usize,
    /// Token `t` lies in `pages[t / page_size]`.
    pages: Vec<u32>,
}

/// Requests, their pages, and pools `[P, S, width]`, `S = page_size / tokens_per_row`. A page id means the same tokens in
/// every pool.
///
/// [`Self::append`] makes room and says in which slots the rows of the new tokens belong; the caller writes them, into every
/// pool, before it forks the request or appends again. [`Self::fork`] shares pages between requests; a shared page that is
/// partly filled is copied when one of its holders appends (copy-on-write), so that no request writes what another one reads.
///
/// Writes are in place as long as the cache owns the only handle of a buffer. So drop what [`Self::pool`] returned before the
/// next append, and what [`Self::req_to_token`] returned before its next call: a handle that stays alive makes a copy necessary
/// and goes stale.
///
/// A call that fails leaves the cache as it was.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig};
/// use mla_ops::{WriteLatentArgs, write_latent};
///
/// let device = Device::flex();
/// let config = CacheConfig {
///     pools: vec![PoolConfig::per_token(12)], // one for each layer
///     num_pages: 8,
///     page_size: 4,
///     max_requests: 2,
///     max_tokens: 16,
///     dtype: FloatDType::F32,
/// };
/// let mut cache = PagedCache::new(config, &device)?;
/// let request = cache.admit()?;
/// let slots = cache.append(request, 3)?; // room for three tokens
/// let slots = index_tensor(slots, &device);
/// for layer in 0..1 {
///     let latent = Tensor::ones([3, 12], &device);
///     cache.write_pool(layer, |cache| {
///         let args = WriteLatentArgs { cache, slots: slots.clone(), latent, rope: None };
///         Ok((write_latent(args)?, ()))
///     })?;
/// }
/// // The arguments of `mla_decode`.
/// let (table, lens) = (cache.page_table(&[request], 1)?, cache.seq_lens(&[request])?);
/// assert_eq!((table.dims(), lens.dims(), cache.pool(0)?.dims()), ([1, 1], [1], [8, 4, 12]));
/// cache.free(request)?;
/// # Ok::<(), mla_ops::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct PagedCache {
    id: u64,
    config: CacheConfig,
    device: Device,
    /// `None` while the pool is taken.
    pools: Vec<Option<Pool>>,
    allocator: PageAllocator,
    /// How often the caller holds a page, by [`PagedCache::retain`].
    retained: HashMap<u32, usize>,
    /// Pages that nobody else holds.
    idle: usize,
    map: RequestToToken,
    /// Rows of the map, and the first position in each that it does not have yet: most callers take the pages from the host.
    unwritten: BTreeMap<u32, usize>,
    requests: HashMap<RequestId, Request>,
    next_id: u64,
}

impl PagedCache {
    /// An empty cache; the pools are allocated, and zero.
    ///
    /// # Errors
    /// [`MlaError::Value`] for a size that is zero or too large, or a page size that is no power of two; [`MlaError::DType`] for
    /// a dtype that is none of the caches' or of the device's; [`MlaError::DeviceLimit`] for pools or a map that the device has
    /// no memory for; [`MlaError::UnsupportedDevice`], also for an autodiff device. Nothing is
    /// allocated then. [`MlaError::Read`] if a GPU runs out of memory on the way.
    pub fn new(config: CacheConfig, device: &Device) -> Result<Self, CacheError> {
        config.check(&Check::on(OP, device)?)?;
        // The casts keep the values: the check bounds both by `i32::MAX`.
        let map = RequestToToken::new(config.max_requests as u32, config.max_tokens, device)?;
        let pool = |pool: &PoolConfig| {
            let pool = Pool::zeros(OP, config.pool_shape(pool), config.dtype.into(), pool.format, device)?;
            pool.check_written("pools")?;
            Ok(Some(pool))
        };
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            pools: config.pools.iter().map(pool).collect::<Result<_, MlaError>>()?,
            allocator: PageAllocator::new(config.num_pages as u32),
            retained: HashMap::new(),
            idle: 0,
            map,
            unwritten: BTreeMap::new(),
            requests: HashMap::new(),
            next_id: 0,
            device: device.clone(),
            config,
        })
    }

    /// Tells this cache from all others of the process, for whoever remembers where its pools lie.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What the cache was built with.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Starts a request of no tokens.
    ///
    /// # Errors
    /// [`CacheError::OutOfRequests`].
    pub fn admit(&mut self) -> Result<RequestId, CacheError> {
        let row = self.map.take_row()?;
        Ok(self.insert(Request { row, ..Request::default() }))
    }

    /// Makes room for `n_tokens` more tokens and returns their slots (`page * page_size + offset`), in order. They are the
    /// slots of the pools with a row for each token.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::RequestTooLong`], [`CacheError::OutOfPages`]; and
    /// [`CacheError::PoolTaken`] if a shared page has to be copied while a pool is away.
    pub fn append(&mut self, request: RequestId, n_tokens: usize) -> Result<Vec<i32>, CacheError> {
        let (page_size, max) = (self.config.page_size, self.config.max_tokens);
        let Request { row, len, pages } = self.request(request)?;
        let (row, len, held) = (*row, *len, pages.len());
        let tokens = len.saturating_add(n_tokens);
        if tokens > max {
            return Err(CacheError::RequestTooLong { request, tokens, max });
        }
        if n_tokens == 0 {
            return Ok(Vec::new());
        }
        let shared = self.shared_tail(request)?;
        if shared.is_some() {
            self.check_all_pools_present()?;
        }
        let grow = tokens.div_ceil(page_size) - held;
        let mut new_pages = self.allocator.allocate(grow + usize::from(shared.is_some()))?;
        // From here on nothing can fail.
        let mut first_changed = len;
        if let Some(page) = shared {
            let copy = new_pages[0];
            self.copy_page(page, copy);
            self.let_go(&[page])?;
            self.request_mut(request)?.pages.pop();
            first_changed = len - len % page_size;
        }
        let state = self.request_mut(request)?;
        state.pages.append(&mut new_pages);
        state.len = tokens;
        let changed: Vec<i32> = (first_changed..tokens).map(|token| slot(&state.pages, page_size, token)).collect();
        self.unwritten.entry(row).and_modify(|first| *first = first_changed.min(*first)).or_insert(first_changed);
        Ok(changed[len - first_changed..].to_vec())
    }

    /// Ends a request. Pages that no other request holds are free again.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], also for a request that was freed before.
    pub fn free(&mut self, request: RequestId) -> Result<(), CacheError> {
        let Some(state) = self.requests.remove(&request) else {
            return Err(CacheError::UnknownRequest { request });
        };
        self.let_go(&state.pages)?;
        self.unwritten.remove(&state.row);
        self.map.free_row(state.row)
    }

    /// Tokens of a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn len(&self, request: RequestId) -> Result<usize, CacheError> {
        Ok(self.request(request)?.len)
    }

    /// Pages of a request, in the order of its tokens.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn pages(&self, request: RequestId) -> Result<&[u32], CacheError> {
        Ok(&self.request(request)?.pages)
    }

    /// Free pages.
    pub fn free_pages(&self) -> usize {
        self.allocator.free_pages()
    }

    /// Pages that somebody holds; a shared page counts once.
    pub fn pages_in_use(&self) -> usize {
        self.allocator.num_pages() - self.allocator.free_pages()
    }

    /// The row of [`Self::req_to_token`] that belongs to a request: a number below R, its own as long as it lives.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn row(&self, request: RequestId) -> Result<u32, CacheError> {
        Ok(self.request(request)?.row)
    }

    /// Bytes that one token takes, in all pools together, rounded up.
    pub fn bytes_per_token(&self) -> usize {
        self.config.bytes_per_page().div_ceil(self.config.page_size)
    }

    /// Bytes of the pages in use, in all pools together.
    pub fn bytes_in_use(&self) -> usize {
        self.pages_in_use() * self.config.bytes_per_page()
    }
}

impl PagedCache {
    fn request(&self, request: RequestId) -> Result<&Request, CacheError> {
        let state = self.requests.get(&request);
        state.ok_or(CacheError::UnknownRequest { request })
    }

    fn request_mut(&mut self, request: RequestId) -> Result<&mut Request, CacheError> {
        let state = self.requests.get_mut(&request);
        state.ok_or(CacheError::UnknownRequest { request })
    }

    fn next_request(&self) -> RequestId {
        RequestId { cache: self.id, number: self.next_id }
    }

    fn insert(&mut self, request: Request) -> RequestId {
        let id = self.next_request();
        self.next_id += 1;
        self.requests.insert(id, request);
        id
    }

    /// The request's last page, if the next token would go into it and another request holds it too.
    fn shared_tail(&self, request: RequestId) -> Result<Option<u32>, CacheError> {
        let request = self.request(request)?;
        let has_room = !request.len.is_multiple_of(self.config.page_size);
        let last = request.pages.last().copied().filter(|_| has_room);
        Ok(last.filter(|&page| self.allocator.ref_count(page) > 1))
    }

    /// Copies a page in every pool. The pools are taken out of `self` one by one, so that the write has the only handle and
    /// stays in place.
    fn copy_page(&mut self, from: u32, to: u32) {
        let index = self.upload(vec![from as i32]);
        let to = to as usize;
        for entry in &mut self.pools {
            if let Some(pool) = entry.take() {
                *entry = Some(pool.with_page_copied(index.clone(), to));
            }
        }
    }

    fn upload(&self, values: Vec<i32>) -> Tensor<1, Int> {
        let shape = [values.len()];
        Tensor::from_data(TensorData::new(values, shape), (&self.device, DType::I32))
    }
}

/// Where token `token` of a request with these pages lies. It fits: the config bounds all slots by `i32::MAX`.
fn slot(pages: &[u32], page_size: usize, token: usize) -> i32 {
    (pages[token / page_size] as usize * page_size + token % page_size) as i32
}

#[cfg(all(test, feature = "flex"))]
#[path = "paged_cache_program_tests.rs"]
mod program_tests;
#[cfg(all(test, feature = "flex"))]
#[path = "paged_cache_tests.rs"]
mod tests;
