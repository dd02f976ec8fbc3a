//! Compression of windows of tokens into single entries (DeepSeek-V4).

use burn::tensor::{FloatDType, Tensor};
use mla_ops::{CompressKvArgs, CompressKvOptions, CompressedKv, EntryCache, compress_kv};

use super::cache::V4Cache;
use super::config::DeepseekV4Config;
use super::schedule::CompressorSpec;
use super::states::State;
use super::step::{EntryStep, V4Step};
use crate::Result;
use crate::layers::Linear;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// Pools each window of tokens into an entry, by a softmax over its tokens for every channel.
#[derive(Debug, Clone)]
pub(crate) struct Compressor {
    /// Its pool in the cache, and its state.
    number: usize,
    spec: CompressorSpec,
    /// `wkv` above `wgate`.
    kv_gates: Linear,
    /// f32 `[rate, C]` (`ape`).
    position_bias: Tensor<2>,
    /// f32 `[width]`.
    norm: Tensor<1>,
    norm_eps: f32,
}

impl Compressor {
    /// Loads `{name}.wkv`, `wgate`, `ape` and `norm` of compressor `number`.
    pub(crate) fn load(
        loader: &mut WeightLoader,
        name: &str,
        number: usize,
        spec: CompressorSpec,
        config: &DeepseekV4Config,
    ) -> Self {
        let (channels, hidden) = (spec.channels(), config.hidden_size);
        let halves = ["wkv", "wgate"].map(|part| format!("{name}.{part}.weight"));
        Self {
            number,
            spec,
            kv_gates: Linear::new(loader.joined(&halves, [2 * channels, hidden], Cut::Whole)),
            position_bias: loader.tensor_f32(&format!("{name}.ape"), [spec.rate, channels], Cut::Whole),
            norm: loader.tensor_f32(&format!("{name}.norm.weight"), [spec.width], Cut::Whole),
            norm_eps: config.rms_norm_eps as f32,
        }
    }

    /// Its pool in the cache.
    pub(crate) fn pool(&self) -> usize {
        self.number
    }

    /// What makes [`Self::advance`]'s keys and gates of tokens.
    pub(crate) fn kv_gates(&self) -> &Linear {
        &self.kv_gates
    }

    /// Takes in the keys and gates `[N, 2 C]` of the new tokens; the windows that they fill become entries in the cache.
    pub(crate) fn advance(
        &self,
        kv_gates: Tensor<2>,
        step: &V4Step,
        entries: &EntryStep,
        cache: &mut V4Cache,
    ) -> Result<()> {
        let dtype = FloatDType::from(kv_gates.dtype());
        let state = State::Carried(self.number);
        if let Some(marked) = &entries.marked {
            cache.write_marked(state, &kv_gates, marked)?;
        }
        let pool = cache.take_entries(self.number)?;
        let args = CompressKvArgs {
            kv_gates,
            state: cache.take(state)?,
            state_rows: step.state_rows.clone(),
            state_slots: entries.carried_slots.clone(),
            cu_seqlens: step.cu_seqlens.clone(),
            starts: step.starts.clone(),
            position_bias: self.position_bias.clone(),
            norm_weight: self.norm.clone(),
            cos: entries.cos.clone(),
            sin: entries.sin.clone(),
            cache: Some(EntryCache { cache: pool, slots: entries.slots.clone() }),
        };
        let options = CompressKvOptions { overlap: self.spec.overlap, norm_eps: self.norm_eps, dtype };
        let (carried, pool, outcome) = match compress_kv(args, &options) {
            Ok(CompressedKv { state, cache, .. }) => (state, cache, Ok(())),
            Err(refused) => (refused.state, refused.cache, Err(refused.error.into())),
        };
        cache.put(state, carried);
        cache.put_entries(self.number, pool.expect("the one that it was given"))?;
        outcome
    }
}
