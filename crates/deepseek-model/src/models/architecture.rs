//! What the rest of the crate knows of a model: its configuration ([`Architecture`]), its forward pass ([`Model`]), and the
//! decode steps that can be captured ([`Capture`]). A new model implements the first two, and is entered in the registry.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::cache::RowFormat;
use mla_ops::{Determinism, MlaDecodeProblem, Routing};

use crate::Result;
use crate::cache::{CacheSize, KvCacheFormat, ModelCache};
use crate::config::{LayerSummary, Quantization};
use crate::step::Chunk;
use crate::weights::{LoadAs, Published, WeightLoader};

/// The configuration of a model: all that is known of it before weights are loaded.
pub(crate) trait Architecture: Any + Debug + Send + Sync {
    /// The sizes that every model has.
    fn sizes(&self) -> Sizes<'_>;

    /// The layers, first to last, with such caches.
    fn layers(&self, load_as: LoadAs) -> Vec<LayerSummary>;

    /// Bytes of a cache of this size: the pools, and what requests have beside them.
    ///
    /// # Errors
    /// As [`Model::new_cache`], but for what a device has no memory for.
    fn cache_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128>;

    /// Bytes that a step dequantises a layer's index keys in FP8 to, at most; errors as [`Self::cache_bytes`].
    fn index_scratch_bytes(&self, size: CacheSize, load_as: LoadAs) -> Result<u128>;

    /// How rows of latents are stored in a cache of this format.
    ///
    /// # Errors
    /// A format that the model's caches do not have.
    fn row_format(&self, kv_cache: KvCacheFormat) -> Result<RowFormat>;

    /// Numbers that a layer computes for a token, all of them together.
    fn activations_per_token(&self) -> usize;

    /// What requests that begin alike can share, with caches of `dtype`.
    fn prefix_support(&self, dtype: FloatDType) -> PrefixSupport;

    /// The same model with its first `layers` layers only; there are as many.
    fn with_layers(&self, layers: usize) -> Arc<dyn Architecture>;

    /// How the weights are published.
    fn published(&self) -> Published;

    /// Takes the weights out of a loader; what is missing or wrong shows when the loader is finished. A loader that lists
    /// what is asked for gives the specs of all weights.
    fn load(&self, loader: &mut WeightLoader, device: &Device) -> Box<dyn Model>;
}

/// What requests that begin alike can share (prefix caching).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixSupport {
    /// Whole pages, wherever they part: a request has nothing beside its pages.
    Pages,
    /// Whole pages up to a position where a snapshot was taken of the state that a request has beside them, which belongs to that
    /// position.
    Snapshots {
        /// Of a snapshot.
        bytes: usize,
    },
}

/// Sizes that every model has, by their names in `config.json`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes<'c> {
    /// Layers, without the multi-token-prediction ones.
    pub(crate) num_hidden_layers: usize,
    pub(crate) vocab_size: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) n_routed_experts: usize,
    pub(crate) num_experts_per_tok: usize,
    pub(crate) eos_token_ids: &'c [u32],
    pub(crate) quantization: Option<Quantization>,
}

/// A point of the forward pass that can be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden {
    /// After the embedding.
    Embedding,
    /// The residual stream after this layer; DeepSeek-V4: all streams of a token, one after the other.
    Layer(usize),
    /// DeepSeek-V4: after the streams have been added up.
    HyperHead,
    /// After the final norm.
    FinalNorm,
}

/// Sees what is computed on the way.
pub(crate) enum Observer<'o> {
    /// The hidden states `[N, hidden]`.
    Hidden(&'o mut dyn FnMut(Hidden, &Tensor<2>)),
    /// The experts of each token, i32 `[N, k]`, layer by layer.
    Experts(&'o mut dyn FnMut(Tensor<2, Int>)),
}

impl Observer<'_> {
    /// Shows hidden states, if somebody looks at them.
    pub(crate) fn hidden(observer: &mut Option<Self>, point: Hidden, states: impl FnOnce() -> Tensor<2>) {
        if let Some(Self::Hidden(look)) = observer {
            look(point, &states());
        }
    }

    /// Shows a layer's choice of experts, if somebody looks at it. It is then in memory; the bits of what follows are the same.
    pub(crate) fn experts(observer: &mut Option<Self>, routing: Routing) -> Routing {
        let Some(Self::Experts(look)) = observer else { return routing };
        let (indices, weights) = routing.materialise();
        look(indices.clone());
        Routing::given(indices, weights)
    }
}

/// A model with its weights. A draft model for speculative decoding (multi-token prediction) would be one more.
pub(crate) trait Model: Debug + Send + Sync {
    /// An empty cache.
    ///
    /// # Errors
    /// A size that is zero or too large, a page size that is no power of two, or a format that the model's caches do not have.
    fn new_cache(&self, size: CacheSize, load_as: LoadAs) -> Result<ModelCache>;

    /// One forward pass over the new tokens of some requests: their final hidden states `[N, hidden]`, normed. The cache has
    /// taken in the tokens afterwards.
    ///
    /// # Errors
    /// An operation that refuses its arguments, or a cache that is another model's or does not know a request.
    fn forward(
        &self,
        chunks: &[Chunk],
        cache: &mut ModelCache,
        determinism: Determinism,
        observe: Option<Observer<'_>>,
    ) -> Result<Tensor<2>>;

    /// Logits `[N, vocab]` of final hidden states `[N, hidden]`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn logits(&self, hidden: Tensor<2>, determinism: Determinism) -> Result<Tensor<2>>;

    /// What the attention of a decode step of so many requests is, with such a cache.
    fn decode_problem(&self, batch: usize, page_size: usize, load_as: LoadAs) -> MlaDecodeProblem;

    /// What captures its decode steps; why there is none otherwise.
    fn capture(&self) -> std::result::Result<&dyn Capture, &'static str>;
}

/// Why the steps of ranks are not captured.
pub(crate) const RANKS_TALK: &str =
    "a captured step has launches alone, and not what ranks say to one another by way of the host";

/// A model whose decode steps can be captured: with their inputs in buffers, they read nothing else from the host, and may run
/// several times with the same result.
pub(crate) trait Capture: Send + Sync {
    /// A step without requests: one token of each of `batch` requests with at most as many pages, of as many
    /// tokens, as `pages` says.
    fn buffered_step(
        &self,
        batch: usize,
        pages: [usize; 2],
        determinism: Determinism,
    ) -> Result<Box<dyn BufferedStep + '_>>;

    /// A cache with the layout of `cache` and next to no rows, which stands in its place while a step has it.
    ///
    /// # Errors
    /// A cache that is another model's.
    fn stand_in(&self, cache: &ModelCache) -> Result<ModelCache>;
}

/// A decode step whose inputs are in buffers that stay where they are.
pub(crate) trait BufferedStep: Send {
    /// Whether these are the only handles of the buffers, so that [`Self::fill`] stays in them.
    fn is_in_place(&self) -> bool;

    /// Takes the inputs of a step: chunks of one token, at most `batch`, of requests with at most `max_pages` pages. Where somebody
    /// counts them, the tokens are computed from now on.
    ///
    /// # Errors
    /// A cache that is another model's or does not know a request.
    fn fill(&mut self, chunks: &[Chunk], cache: &mut ModelCache) -> Result<()>;

    /// Puts tokens that are still on the device, i32 `[n]`, in the place of those of the first requests. Where there is none
    /// (-1), what follows is not read. The vocabulary has at least two tokens.
    fn feed(&mut self, ids: Tensor<1, Int>);

    /// Logits `[batch, vocab]` of the step in the buffers.
    ///
    /// # Errors
    /// As [`Model::forward`].
    fn logits(&self, cache: &mut ModelCache) -> Result<Tensor<2>>;

    /// Other handles of the buffers, for tests on devices that capture steps.
    #[cfg(all(test, feature = "_gpu"))]
    #[allow(dead_code, reason = "under fusion no step is captured")]
    fn handles(&self) -> Box<dyn Any>;
}
