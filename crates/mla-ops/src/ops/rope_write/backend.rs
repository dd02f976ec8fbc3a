//! [`rope_write`](super::rope_write()) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::Determinism;
use crate::cache::BackendPool;
use crate::ops::compress_kv::backend::{BackendSteps, BackendStepsDone};
use crate::ops::norm_rope::BackendNorm;
use crate::weight::BackendWeight;

/// Latents and where they go, as in [`RopeWriteArgs`](super::RopeWriteArgs).
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendLatents<B: Backend> {
    /// `[N, D]`.
    pub(super) latent: FloatTensor<B>,
    /// f32 `[D - dr]` or `[D]`.
    pub(super) norm_weight: FloatTensor<B>,
    /// f32 `[N, dr / 2]`.
    pub(super) cos: FloatTensor<B>,
    /// f32 `[N, dr / 2]`.
    pub(super) sin: FloatTensor<B>,
    /// `[P, S, D]`.
    #[extension_type]
    pub(super) cache: BackendPool<B>,
    /// i32 `[N]`.
    pub(super) slots: IntTensor<B>,
    pub(super) norm_eps: f32,
}

/// Queries of an indexer.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendIndexHeads<B: Backend> {
    /// There are none.
    None,
    /// `[N, Hi, di]`.
    Heads(FloatTensor<B>),
}

/// Queries.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendRopeQuery<B: Backend> {
    /// Normed whole, and what else RoPE is applied to.
    Heads {
        /// `[N, H, d]`.
        q: FloatTensor<B>,
        /// None, or one without a weight.
        #[extension_type]
        norm: BackendNorm<B>,
        #[extension_type]
        index: BackendIndexHeads<B>,
    },
    /// `[N, H, dn + dr]` of a few tokens, and what they are absorbed by, `[H, R, dn]`.
    Absorbed(FloatTensor<B>, #[extension_type] BackendWeight<B>, Determinism),
}

/// What was computed of them, and the cache's own buffer.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum BackendRopeWritten<B: Backend> {
    /// Of [`BackendRopeQuery::Heads`].
    Heads {
        /// `[N, H, d]`.
        q: FloatTensor<B>,
        #[extension_type]
        index: BackendIndexHeads<B>,
        /// `[N, D]`.
        latent: FloatTensor<B>,
        /// `[P, S, D]`.
        #[extension_type]
        cache: BackendPool<B>,
        #[extension_type]
        compressed: BackendStepsDone<B>,
    },
    /// Of [`BackendRopeQuery::Absorbed`].
    Absorbed {
        /// `[N, H, R + dr]`.
        q: FloatTensor<B>,
        /// `[P, S, D]`.
        #[extension_type]
        cache: BackendPool<B>,
    },
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait RopeWriteBackend: Backend {
    /// [`rope_write`](super::rope_write()); of queries that are absorbed there are no steps.
    #[fusion(meta = |query, latents, steps| match query {
        BackendRopeQueryMetadata::Heads { q, index, .. } => BackendRopeWrittenMetadata::Heads {
            q: q.clone(),
            index: match index {
                BackendIndexHeadsMetadata::None => BackendIndexHeadsMetadata::None,
                BackendIndexHeadsMetadata::Heads(q) => BackendIndexHeadsMetadata::Heads(q.clone()),
            },
            latent: latents.latent.clone(),
            cache: latents.cache.same(),
            compressed: crate::ops::compress_kv::backend::fusion::done(steps),
        },
        BackendRopeQueryMetadata::Absorbed(q, weight, ..) => {
            let ([rows, heads, width], [_, outputs, inputs]) = (q.shape.dims(), weight.dims());
            let q = crate::fusion::spec([rows, heads, outputs + width - inputs], q.dtype);
            BackendRopeWrittenMetadata::Absorbed { q, cache: latents.cache.same() }
        }
    })]
    fn rope_write(
        #[extension_type] query: BackendRopeQuery<Self>,
        #[extension_type] latents: BackendLatents<Self>,
        #[extension_type] steps: BackendSteps<Self>,
    ) -> BackendRopeWritten<Self>;
}
