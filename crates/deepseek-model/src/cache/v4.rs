//! The cache of DeepSeek-V4: a window, open windows and compressed entries for each request and layer.

use std::collections::HashMap;

use burn::tensor::DType;
use mla_ops::cache::{CacheError, PageAllocator, RequestId};

use super::CacheSize;
use crate::config::{AttentionSpec, DeepseekV4Config};
use crate::layers::LayerState;
use crate::{ModelError, Result};

/// The state of each request, as tensors of its own. Pages are counted, so that requests share a bounded number of
/// tokens; the entries of a page's tokens take [`Self::bytes_per_token`] for each, and the windows a constant beside that.
#[derive(Debug)]
pub struct V4Cache {
    size: CacheSize,
    layers: usize,
    bytes_per_token: usize,
    allocator: PageAllocator,
    requests: HashMap<RequestId, Request>,
    next_id: u64,
}

#[derive(Debug)]
struct Request {
    /// Its tokens.
    len: usize,
    /// How many of them a forward pass has taken in.
    computed: usize,
    pages: Vec<u32>,
    layers: Vec<LayerState>,
}

impl V4Cache {
    /// An empty cache for a model of this configuration, computing in `dtype`.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming a size that is zero or too large, or a page size that is no power of two.
    pub fn new(config: &DeepseekV4Config, size: CacheSize, dtype: DType) -> Result<Self> {
        let sizes = [
            ("num_pages", size.num_pages),
            ("page_size", size.page_size),
            ("max_requests", size.max_requests),
            ("max_tokens", size.max_tokens),
        ];
        for (name, value) in sizes {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(ModelError::request(name, value, format!("1 to {}", i32::MAX)));
            }
        }
        if !size.page_size.is_power_of_two() {
            return Err(ModelError::request("page_size", size.page_size, "a power of two"));
        }
        Ok(Self {
            size,
            layers: config.layers.len(),
            bytes_per_token: entry_bytes_per_token(config, dtype),
            // The cast keeps the value: it is checked above.
            allocator: PageAllocator::new(size.num_pages as u32),
            requests: HashMap::new(),
            next_id: 0,
        })
    }

    /// Starts a request of no tokens.
    ///
    /// # Errors
    /// [`CacheError::OutOfRequests`].
    pub fn admit(&mut self) -> std::result::Result<RequestId, CacheError> {
        if self.requests.len() >= self.size.max_requests {
            return Err(CacheError::OutOfRequests { max: self.size.max_requests });
        }
        let id = RequestId::new(self.next_id);
        self.next_id += 1;
        let layers = vec![LayerState::default(); self.layers];
        self.requests.insert(id, Request { len: 0, computed: 0, pages: Vec::new(), layers });
        Ok(id)
    }

    /// Makes room for `n_tokens` more tokens.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], [`CacheError::RequestTooLong`], [`CacheError::OutOfPages`]; nothing has changed then.
    pub fn append(&mut self, request: RequestId, n_tokens: usize) -> std::result::Result<(), CacheError> {
        let state = self.requests.get_mut(&request).ok_or(CacheError::UnknownRequest { request })?;
        let (tokens, max) = (state.len.saturating_add(n_tokens), self.size.max_tokens);
        if tokens > max {
            return Err(CacheError::RequestTooLong { request, tokens, max });
        }
        let grow = tokens.div_ceil(self.size.page_size) - state.pages.len();
        state.pages.append(&mut self.allocator.allocate(grow)?);
        state.len = tokens;
        Ok(())
    }

    /// Ends a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`], also for a request that was freed before.
    pub fn free(&mut self, request: RequestId) -> std::result::Result<(), CacheError> {
        let state = self.requests.remove(&request).ok_or(CacheError::UnknownRequest { request })?;
        self.allocator.release(&state.pages)
    }

    /// Tokens of a request.
    ///
    /// # Errors
    /// [`CacheError::UnknownRequest`].
    pub fn len(&self, request: RequestId) -> std::result::Result<usize, CacheError> {
        self.requests.get(&request).map(|state| state.len).ok_or(CacheError::UnknownRequest { request })
    }

    /// Bytes of compressed entries that a token adds, on average.
    pub fn bytes_per_token(&self) -> usize {
        self.bytes_per_token
    }

    /// Bytes of all states.
    pub fn bytes_in_use(&self) -> usize {
        self.requests.values().flat_map(|request| &request.layers).map(LayerState::bytes).sum()
    }

    /// Begins a forward pass over the last `n_tokens` tokens of a request; returns the position of the first. The states
    /// move on with every pass, so a token cannot be computed twice or left out.
    pub(crate) fn begin(&mut self, request: RequestId, n_tokens: usize) -> Result<usize> {
        let state = self.requests.get_mut(&request).ok_or(CacheError::UnknownRequest { request })?;
        let (start, missing) = (state.computed, state.len - state.computed);
        if n_tokens == 0 || n_tokens != missing {
            let expected = format!("the {missing} tokens of {request} that were appended and not computed yet");
            return Err(ModelError::request("chunks", format!("{n_tokens} tokens of {request}"), expected));
        }
        state.computed = state.len;
        Ok(start)
    }

    /// What a layer remembers of a request.
    pub(crate) fn layer(&mut self, request: RequestId, layer: usize) -> Result<&mut LayerState> {
        let state = self.requests.get_mut(&request).ok_or(CacheError::UnknownRequest { request })?;
        Ok(&mut state.layers[layer])
    }
}

/// Bytes of a token's share of entries and index keys, in all layers together, rounded up.
fn entry_bytes_per_token(config: &DeepseekV4Config, dtype: DType) -> usize {
    let rates = config.layers.iter().filter_map(|layer| layer.attention.rate());
    // Rates divide one another, so that the longest window holds whole entries of all layers.
    let longest = rates.max().unwrap_or(1);
    let elements = config.layers.iter().map(|layer| match layer.attention {
        AttentionSpec::Sliding => 0,
        AttentionSpec::Csa { rate } => longest / rate * (config.head_dim + config.index_head_dim),
        AttentionSpec::Hca { rate } => longest / rate * config.head_dim,
    });
    (elements.sum::<usize>() * dtype.size()).div_ceil(longest)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn config() -> DeepseekV4Config {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v4-tiny/config.json");
        DeepseekV4Config::read(&PathBuf::from(path)).unwrap()
    }

    const SIZE: CacheSize = CacheSize { num_pages: 3, page_size: 4, max_requests: 2, max_tokens: 10 };

    fn cache() -> V4Cache {
        V4Cache::new(&config(), SIZE, DType::F32).unwrap()
    }

    #[test]
    fn requests_share_the_pages_and_give_them_back() {
        let mut cache = cache();
        let (a, b) = (cache.admit().unwrap(), cache.admit().unwrap());
        assert!(matches!(cache.admit(), Err(CacheError::OutOfRequests { max: 2 })));
        cache.append(a, 5).unwrap();
        cache.append(b, 4).unwrap();
        assert!(matches!(cache.append(b, 1), Err(CacheError::OutOfPages { .. })));
        assert!(matches!(cache.append(a, 6), Err(CacheError::RequestTooLong { tokens: 11, .. })));
        assert_eq!((cache.len(a).unwrap(), cache.len(b).unwrap()), (5, 4));
        cache.free(a).unwrap();
        assert!(matches!(cache.free(a), Err(CacheError::UnknownRequest { .. })));
        cache.append(b, 6).unwrap();
    }

    #[test]
    fn tokens_are_computed_once_and_in_order() {
        let mut cache = cache();
        let request = cache.admit().unwrap();
        cache.append(request, 3).unwrap();
        assert!(cache.begin(request, 2).is_err());
        assert_eq!(cache.begin(request, 3).unwrap(), 0);
        let message = cache.begin(request, 3).unwrap_err().to_string();
        assert!(message.contains("`chunks`") && message.contains("the 0 tokens"), "{message}");
        cache.append(request, 2).unwrap();
        assert_eq!(cache.begin(request, 2).unwrap(), 3);
    }

    #[test]
    fn sizes_are_checked_by_name() {
        for (size, name) in [
            (CacheSize { page_size: 3, ..SIZE }, "page_size"),
            (CacheSize { num_pages: 0, ..SIZE }, "num_pages"),
            (CacheSize { max_requests: usize::MAX, ..SIZE }, "max_requests"),
        ] {
            let message = V4Cache::new(&config(), size, DType::F32).unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
        }
    }

    #[test]
    fn a_token_takes_its_share_of_the_entries() {
        // Two layers with (32 + 32) channels per 4 tokens, two with 32 per 16.
        assert_eq!(cache().bytes_per_token(), (2 * 64 / 4 + 2 * 32 / 16) * 4);
    }
}
