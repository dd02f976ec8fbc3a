//! The indexer of DeepSeek-V3.2, which picks the keys that a token sees (DeepSeek sparse attention).

use burn::tensor::{FloatDType, Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{IndexForm, LightningIndexOptions};

use super::config::{DeepseekV3Config, IndexerConfig};
use super::layer_norm::LayerNorm;
use super::rotary::Rotation;
use super::step::Step;
use crate::Result;
use crate::index_keys::{self, IndexedKeys};
use crate::layers::Linear;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// The norm of the index keys has this epsilon.
const NORM_EPS: f64 = 1e-6;

/// The indexer of one layer; every rank has all of it, and picks the same keys.
#[derive(Debug, Clone)]
pub(crate) struct Indexer {
    /// The pool of its keys.
    pool: usize,
    wq_b: Linear,
    wk: Linear,
    k_norm: LayerNorm,
    weights_proj: Linear,
    config: IndexerConfig,
    qk_rope_head_dim: usize,
}

impl Indexer {
    /// Loads `{name}.*` of layer number `layer`.
    pub(crate) fn load(
        loader: &mut WeightLoader,
        name: &str,
        layer: usize,
        indexer: IndexerConfig,
        config: &DeepseekV3Config,
    ) -> Self {
        let IndexerConfig { heads, head_dim, .. } = indexer;
        let (hidden, rank) = (config.hidden_size, config.q_lora_rank.unwrap_or(config.hidden_size));
        Self {
            pool: config.num_hidden_layers + layer,
            wq_b: Linear::load(loader, &format!("{name}.wq_b"), [heads * head_dim, rank], Cut::Whole),
            wk: Linear::load(loader, &format!("{name}.wk"), [head_dim, hidden], Cut::Whole),
            k_norm: LayerNorm::load(loader, &format!("{name}.k_norm"), head_dim, NORM_EPS),
            weights_proj: Linear::load(loader, &format!("{name}.weights_proj"), [heads, hidden], Cut::Whole),
            config: indexer,
            qk_rope_head_dim: config.qk_rope_head_dim,
        }
    }

    /// Puts the index keys of the new tokens into the cache; x `[N, hidden]`.
    pub(crate) fn write_keys(&self, x: Tensor<2>, step: &Step, cache: &mut PagedCache) -> Result<()> {
        let [tokens, _] = x.dims();
        let keys =
            self.k_norm.forward(self.wk.forward(x, step.determinism)?).reshape([tokens, 1, self.config.head_dim]);
        let keys = self.rotate(keys, &step.rotation).reshape([tokens, self.config.head_dim]);
        step.write(cache, self.pool, keys)
    }

    /// The slots of the keys that each new token sees, i32 `[N, 1, k]`, from its query latent `[N, rank]` and x
    /// `[N, hidden]`; -1 where there are fewer.
    pub(crate) fn pick(
        &self,
        q_latent: Tensor<2>,
        x: Tensor<2>,
        step: &Step,
        keys: &[IndexedKeys],
        cache: &PagedCache,
    ) -> Result<Tensor<3, Int>> {
        let ([tokens, _], IndexerConfig { heads, head_dim, topk }) = (x.dims(), self.config);
        let q = self
            .rotate(self.wq_b.forward(q_latent, step.determinism)?.reshape([tokens, heads, head_dim]), &step.rotation);
        let head_weights =
            self.weights_proj.forward(x, step.determinism)?.cast(FloatDType::F32).mul_scalar((heads as f64).powf(-0.5));
        let scale = (head_dim as f32).powf(-0.5);
        let options = LightningIndexOptions { k: topk, scale, form: IndexForm::Slots };
        index_keys::pick(&q, &head_weights, &cache.pool(self.pool)?.dense(), keys, &options)
    }

    /// Applies RoPE to the leading channels of `[N, heads, di]`: here the rotary part comes first, and is not interleaved.
    fn rotate(&self, x: Tensor<3>, rotation: &Rotation) -> Tensor<3> {
        let width = self.qk_rope_head_dim;
        let rotated = rotation.rotate_halves(x.clone().narrow(2, 0, width));
        if width == self.config.head_dim {
            return rotated;
        }
        Tensor::cat(vec![rotated, x.narrow(2, width, self.config.head_dim - width)], 2)
    }
}
