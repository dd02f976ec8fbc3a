//! The caches of the models behind one interface.

mod v4;

use mla_ops::cache::{CacheError, PagedCache, RequestId};

pub use self::v4::V4Cache;
pub(crate) use self::v4::{Place, State};
use crate::step::Chunk;
use crate::{ModelError, Result};

/// How much a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Pages, handed out to requests as they grow.
    pub num_pages: usize,
    /// Tokens of a page, a power of two. [`V4Cache`] may take larger pages.
    pub page_size: usize,
    /// Requests that may live at once.
    pub max_requests: usize,
    /// Tokens that a request may have.
    pub max_tokens: usize,
}

/// What a model remembers of its requests.
#[derive(Debug)]
pub enum ModelCache {
    /// The latents of every token (V2, V3).
    Latent(PagedCache),
    /// Windows and compressed entries (V4).
    V4(V4Cache),
}

impl ModelCache {
    /// Starts a request of no tokens.
    ///
    /// # Errors
    /// [`CacheError::OutOfRequests`].
    pub fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        match self {
            Self::Latent(cache) => cache.admit(),
            Self::V4(cache) => cache.admit(),
        }
    }

    /// Makes room for the next tokens of a request; they are computed by passing the chunk to the model, once.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::RequestTooLong`], [`CacheError::OutOfPages`]; nothing has changed then.
    pub fn append(&mut self, request: RequestId, tokens: &[u32]) -> std::result::Result<Chunk, CacheError> {
        let slots = match self {
            Self::Latent(cache) => cache.append(request, tokens.len())?,
            Self::V4(cache) => {
                cache.append(request, tokens.len())?;
                Vec::new()
            }
        };
        Ok(Chunk { request, tokens: tokens.to_vec(), slots })
    }

    /// Starts a request with the tokens of `request`, which must all be computed. Full pages are shared.
    ///
    /// # Errors
    /// [`CacheError`] for an unknown request, or one too many; in [`V4Cache`] also tokens that are not computed.
    pub fn fork(&mut self, request: RequestId) -> Result<RequestId> {
        match self {
            Self::Latent(cache) => Ok(cache.fork(request)?),
            Self::V4(cache) => cache.fork(request),
        }
    }

    /// Ends a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], also for a request that was freed before.
    pub fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        match self {
            Self::Latent(cache) => cache.free(request),
            Self::V4(cache) => cache.free(request),
        }
    }

    /// Tokens of a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn len(&self, request: RequestId) -> std::result::Result<usize, CacheError> {
        match self {
            Self::Latent(cache) => cache.len(request),
            Self::V4(cache) => cache.len(request),
        }
    }

    /// Bytes by which a request grows with each token, on average.
    pub fn bytes_per_token(&self) -> usize {
        match self {
            Self::Latent(cache) => cache.bytes_per_token(),
            Self::V4(cache) => cache.bytes_per_token(),
        }
    }

    /// Bytes that requests hold.
    pub fn bytes_in_use(&self) -> usize {
        match self {
            Self::Latent(cache) => cache.bytes_in_use(),
            Self::V4(cache) => cache.bytes_in_use(),
        }
    }

    /// Tokens of a page; of V4 that may be more than was asked for.
    pub fn page_size(&self) -> usize {
        self.pages().config().page_size
    }

    /// Pages there are.
    pub fn num_pages(&self) -> usize {
        self.pages().config().num_pages
    }

    /// Pages that nobody holds.
    pub fn free_pages(&self) -> usize {
        self.pages().free_pages()
    }

    fn pages(&self) -> &PagedCache {
        match self {
            Self::Latent(cache) => cache,
            Self::V4(cache) => cache.entries(),
        }
    }

    /// The cache of a model with latents.
    pub(crate) fn latent(&mut self) -> Result<&mut PagedCache> {
        match self {
            Self::Latent(cache) => Ok(cache),
            Self::V4(_) => Err(ModelError::request("cache", "that of a DeepSeek-V4 model", MADE_BY_THE_MODEL)),
        }
    }

    /// The cache of a DeepSeek-V4 model.
    pub(crate) fn v4(&mut self) -> Result<&mut V4Cache> {
        match self {
            Self::V4(cache) => Ok(cache),
            Self::Latent(_) => Err(ModelError::request("cache", "a cache of latents", MADE_BY_THE_MODEL)),
        }
    }
}

const MADE_BY_THE_MODEL: &str = "one that `new_cache` of this model made";
