//! What an engine is made with.

use burn::tensor::Device;
use mla_ops::largest_buffer;

/// Sizes and modes of an [`Engine`](super::Engine).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens in a cache page, a power of two.
    pub page_size: usize,
    /// Pages of the cache: what all running requests share. [`Self::fit_cache`] has as many as the memory has room for.
    pub cache_pages: usize,
    /// Requests that run at once at most.
    pub max_batch: usize,
    /// Tokens in a forward pass at most: one of each request that generates, the rest from prompts. At least `max_batch`,
    /// so that no request waits for ever.
    pub token_budget: usize,
    /// Of these, tokens of prompts at most where other requests generate in the same forward pass: their readers wait for it. At least 1.
    pub mixed_prompt_tokens: usize,
    /// Prefix caching: whether requests that begin alike share pages.
    pub prefix_caching: bool,
    /// Tokens between two snapshots, a multiple of the cache's pages, for models with a state beside the pages
    /// ([`PrefixSupport::Snapshots`](crate::PrefixSupport::Snapshots)): requests share pages up to a snapshot. One is taken at the last
    /// whole page of each prompt, too, by the forward pass that computes the tokens before it. The cache has a slot for each time that
    /// its pages hold as many tokens; of snapshots that are more, the longest unused give up theirs.
    pub snapshot_spacing: usize,
    /// Whether a request's logits are the same, bit for bit, whatever else runs and however its prompt is divided. Costs
    /// speed; on GPUs other than Hopper mostly in the prompts.
    pub deterministic: bool,
    /// Whether steps with one token of each request are captured, and replayed for batches up to the next power of two, on
    /// devices that have graphs; [`EngineStats::graphs`](super::EngineStats::graphs) says why they are not. 16 graphs are kept at a time,
    /// those used last; [`ModelConfig::captured_bytes`](crate::ModelConfig::captured_bytes) estimates their memory. While a step is captured, other
    /// threads of the program that use the device wait, and CUDA refuses memory to those that ask for some on another one.
    pub graphs: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            page_size: 64,
            cache_pages: 512,
            max_batch: 64,
            token_budget: 512,
            mixed_prompt_tokens: 1024,
            prefix_caching: true,
            snapshot_spacing: 1024,
            deterministic: false,
            graphs: false,
        }
    }
}

/// Buffers from which on a device takes steps of many tokens: V3's activations of as many fit into one.
const LARGE_BUFFER: u64 = 4 << 30;

impl EngineOptions {
    /// The default for a device: a `token_budget` of 8192 where a tensor may have 4 GiB (data-centre GPUs), else of 512. More tokens
    /// in a step make prefill faster, and take more memory.
    pub fn on(device: &Device) -> Self {
        let default = Self::default();
        let large = largest_buffer(device).is_some_and(|bytes| bytes >= LARGE_BUFFER);
        Self { token_budget: if large { 8192 } else { default.token_budget }, ..default }
    }
}
