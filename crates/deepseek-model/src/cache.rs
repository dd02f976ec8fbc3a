//! The caches of the models behind one interface.

use std::any::Any;
use std::fmt::Debug;

use mla_ops::cache::{CacheError, PagedCache, RequestId, RowFormat};

use crate::step::Chunk;
use crate::{ModelError, Result};

/// How much a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Pages, handed out to requests as they grow.
    pub num_pages: usize,
    /// Tokens of a page, a power of two. A model with compressed entries (DeepSeek-V4) may take larger pages.
    pub page_size: usize,
    /// Requests that may live at once.
    pub max_requests: usize,
    /// Tokens that a request may have.
    pub max_tokens: usize,
}

impl CacheSize {
    /// Pages of 64 tokens, as many as all requests need at their longest.
    pub fn new(max_requests: usize, max_tokens: usize) -> Self {
        let page_size = 64;
        let num_pages = max_requests.saturating_mul(max_tokens.div_ceil(page_size));
        Self { num_pages, page_size, max_requests, max_tokens }
    }
}

/// How the rows of a KV cache are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvCacheFormat {
    /// In the dtype of the model.
    #[default]
    Auto,
    /// Latents in FP8 with a scale for every 128 channels, and their rotary channels in bf16
    /// ([`RowFormat::Fp8`](mla_ops::cache::RowFormat::Fp8)): 656 bytes for the 576 channels of DeepSeek-V2, V3 and V3.2. The new tokens
    /// of a prompt attend to each other before they are rounded, unless results are batch-invariant; later ones see what the cache
    /// holds.
    ///
    /// Of DeepSeek-V4 the entries that an indexer picks from, with a scale for every 64 channels
    /// ([`RowFormat::Fp8E8m0`](mla_ops::cache::RowFormat::Fp8E8m0)): 584 bytes for 512 channels. The window and the few heavily compressed
    /// entries stay in the dtype of the model.
    ///
    /// Index keys of both (V3.2, V4) have a scale each ([`RowFormat::Fp8IndexKeys`](mla_ops::cache::RowFormat::Fp8IndexKeys)): 132 bytes for 128
    /// channels. All tokens are scored with what the cache holds.
    Fp8,
}

/// The format of index keys beside latents or entries in this one.
pub(crate) fn index_key_format(entries: RowFormat) -> RowFormat {
    match entries {
        RowFormat::Dense => RowFormat::Dense,
        RowFormat::Fp8 { .. } | RowFormat::Fp8E8m0 { .. } | RowFormat::Fp8IndexKeys => RowFormat::Fp8IndexKeys,
    }
}

/// That index keys of so many channels can be stored in FP8.
///
/// # Errors
/// [`ModelError::Request`] of another width.
pub(crate) fn check_fp8_index_keys(width: usize) -> Result<()> {
    if width.is_multiple_of(4) && width <= 512 {
        return Ok(());
    }
    let expected = format!("auto: in FP8 `index_head_dim` = {width} would have to be a multiple of 4, at most 512");
    Err(ModelError::request("kv_cache", "fp8", expected))
}

/// What a model's cache does for the engine. The model itself knows its type: [`ModelCache::get_mut`].
pub(crate) trait RequestCache: Any + Debug + Send {
    /// What kind of cache it is, in words.
    fn kind(&self) -> &'static str;
    /// Starts a request of no tokens.
    fn admit(&mut self) -> std::result::Result<RequestId, CacheError>;
    /// Makes room for the next tokens of a request; their slots, where a token has a row of its own.
    fn append(&mut self, request: RequestId, n_tokens: usize) -> std::result::Result<Vec<i32>, CacheError>;
    /// Starts a request with the tokens of another.
    fn fork(&mut self, request: RequestId) -> Result<RequestId>;
    /// Takes the tokens of a request from position `len` on back, which may be computed or not; whether that can be done.
    fn truncate(&mut self, request: RequestId, len: usize) -> std::result::Result<bool, CacheError> {
        self.pages_mut().truncate(request, len).map(|()| true)
    }
    /// Ends a request.
    fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError>;
    /// Bytes that requests hold.
    fn bytes_in_use(&self) -> usize;
    /// Takes all tokens of a request as computed, where somebody counts them: for steps that compute nothing.
    fn skip(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        let _ = request;
        Ok(())
    }
    /// The pages, which the requests share.
    fn pages(&self) -> &PagedCache;
    /// The same, for whoever holds pages that no request needs.
    fn pages_mut(&mut self) -> &mut PagedCache;
    /// Starts a request whose first tokens are these whole pages, which somebody holds, and have the state in `snapshot` after them,
    /// where requests have one.
    fn admit_with(&mut self, pages: &[u32], snapshot: Option<Snapshot>) -> Result<RequestId>;
    /// Snapshots of the state that a request has beside its pages; `None` where it has none.
    fn snapshots(&mut self) -> Option<&mut dyn Snapshots>;
}

/// Names a snapshot of one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Snapshot(pub(crate) u32);

/// Copies of the states that requests have had, on the device: others may go on from there.
pub(crate) trait Snapshots {
    /// Allocates so many slots; there are no others.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`], or slots that are too many for the device.
    fn reserve(&mut self, slots: usize) -> Result<()>;

    /// Whether a slot is free.
    fn has_room(&self) -> bool;

    /// Takes a slot for the state of a request after its first `len` tokens, which the forward pass that computes them is to write on its
    /// way. `false` if every slot is taken, and where only a pass that ends there has that state.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    fn mark(&mut self, request: RequestId, len: usize) -> Result<bool>;

    /// Keeps the state of a request after its first `len` tokens: what was marked, or a copy of what it has. `None` if every slot is taken.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], tokens that are not computed, or a state that has moved on.
    fn keep(&mut self, request: RequestId, len: usize) -> Result<Option<Snapshot>>;

    /// Gives back the slots of a request's marks of which nothing was kept.
    fn unmark(&mut self, request: RequestId);

    /// Gives the slot back.
    fn discard(&mut self, snapshot: Snapshot);
}

/// What a model remembers of its requests: the KV cache, made by [`DeepseekModel::new_cache`](crate::DeepseekModel::new_cache).
#[derive(Debug)]
pub struct ModelCache(Box<dyn RequestCache>);

impl ModelCache {
    pub(crate) fn new(cache: impl RequestCache) -> Self {
        Self(Box::new(cache))
    }

    /// Starts a request of no tokens.
    ///
    /// # Errors
    /// [`CacheError::OutOfRequests`].
    pub fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        self.0.admit()
    }

    /// Makes room for the next tokens of a request; they are computed by passing the chunk to the model, once.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::RequestTooLong`], [`CacheError::OutOfPages`]; nothing has changed then.
    pub fn append(&mut self, request: RequestId, tokens: &[u32]) -> std::result::Result<Chunk, CacheError> {
        let slots = self.0.append(request, tokens.len())?;
        Ok(Chunk { request, tokens: tokens.to_vec(), slots })
    }

    /// Makes room for tokens of a request that no model will compute.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn skip(&mut self, request: RequestId, tokens: usize) -> std::result::Result<(), CacheError> {
        self.0.append(request, tokens)?;
        self.0.skip(request)
    }

    /// Starts a request with the tokens of `request`, which must all be computed. Full pages are shared.
    ///
    /// # Errors
    /// [`CacheError`] for an unknown request, or one too many; for DeepSeek-V4 also tokens that are not computed.
    pub fn fork(&mut self, request: RequestId) -> Result<RequestId> {
        self.0.fork(request)
    }

    /// Takes the tokens of a request from position `len` on back, those of a step that has failed; whether that can be done. It cannot
    /// where they are in a state that the request has beside its pages.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], or more tokens than it has.
    pub(crate) fn truncate(&mut self, request: RequestId, len: usize) -> std::result::Result<bool, CacheError> {
        self.0.truncate(request, len)
    }

    /// Ends a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], also for a request that was freed before.
    pub fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        self.0.free(request)
    }

    /// Tokens of a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn len(&self, request: RequestId) -> std::result::Result<usize, CacheError> {
        self.pages().len(request)
    }

    /// Bytes by which a request grows with each token, on average.
    pub fn bytes_per_token(&self) -> usize {
        self.pages().bytes_per_token()
    }

    /// Bytes that requests hold.
    pub fn bytes_in_use(&self) -> usize {
        self.0.bytes_in_use()
    }

    /// Tokens of a page; that may be more than was asked for.
    pub fn page_size(&self) -> usize {
        self.pages().config().page_size
    }

    /// Pages there are.
    pub fn num_pages(&self) -> usize {
        self.pages().config().num_pages
    }

    /// Free pages.
    pub fn free_pages(&self) -> usize {
        self.pages().free_pages()
    }

    /// The pages, which the requests share.
    pub(crate) fn pages(&self) -> &PagedCache {
        self.0.pages()
    }

    /// The same, for whoever holds pages that no request needs.
    pub(crate) fn pages_mut(&mut self) -> &mut PagedCache {
        self.0.pages_mut()
    }

    /// Starts a request whose first tokens are these whole pages, as [`RequestCache::admit_with`] says.
    ///
    /// # Errors
    /// Those of [`PagedCache::admit_with`]; a snapshot that is not there, or of another position.
    pub(crate) fn admit_with(&mut self, pages: &[u32], snapshot: Option<Snapshot>) -> Result<RequestId> {
        self.0.admit_with(pages, snapshot)
    }

    /// Snapshots of the state that a request has beside its pages, if it has one.
    pub(crate) fn snapshots(&mut self) -> Option<&mut dyn Snapshots> {
        self.0.snapshots()
    }

    /// The cache as its model knows it.
    ///
    /// # Errors
    /// [`ModelError::Request`] for the cache of another model.
    pub(crate) fn get<T: RequestCache>(&self) -> Result<&T> {
        let cache: &dyn Any = &*self.0;
        cache.downcast_ref().ok_or_else(|| foreign(self.0.kind()))
    }

    /// The same, to write to.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn get_mut<T: RequestCache>(&mut self) -> Result<&mut T> {
        let kind = self.0.kind();
        let cache: &mut dyn Any = &mut *self.0;
        cache.downcast_mut().ok_or_else(|| foreign(kind))
    }
}

fn foreign(kind: &'static str) -> ModelError {
    ModelError::request("cache", kind, "one that `new_cache` of this model made")
}

/// A row for each token is all that the model keeps: multi-head latent attention, with or without an indexer.
impl RequestCache for PagedCache {
    fn kind(&self) -> &'static str {
        "a cache of latents"
    }

    fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        self.admit()
    }

    fn append(&mut self, request: RequestId, n_tokens: usize) -> std::result::Result<Vec<i32>, CacheError> {
        self.append(request, n_tokens)
    }

    fn fork(&mut self, request: RequestId) -> Result<RequestId> {
        Ok(self.fork(request)?)
    }

    fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        self.free(request)
    }

    fn bytes_in_use(&self) -> usize {
        self.bytes_in_use()
    }

    fn pages(&self) -> &PagedCache {
        self
    }

    fn pages_mut(&mut self) -> &mut PagedCache {
        self
    }

    fn admit_with(&mut self, pages: &[u32], _: Option<Snapshot>) -> Result<RequestId> {
        Ok(self.admit_with(pages)?)
    }

    fn snapshots(&mut self) -> Option<&mut dyn Snapshots> {
        None
    }
}
