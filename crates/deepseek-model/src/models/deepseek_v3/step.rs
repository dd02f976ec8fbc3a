//! What one forward pass works on: new tokens of some requests, where they go, and which keys they see.

use burn::tensor::{Device, Int, Tensor};
use mla_ops::batch::positions;
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, RopeQuery, WriteLatentArgs, write_latent};

use super::config::DeepseekV3Config;
use super::keys::Keys;
use super::rotary::{RotaryEmbedding, Rotation};
use crate::Result;
use crate::layers::RmsNorm;
use crate::step::{Chunk, ints, positions_of};

/// The inputs of a forward pass, on the device.
#[derive(Debug)]
pub(crate) struct Step {
    /// Whether a token's bits may depend on the others.
    pub(crate) determinism: Determinism,
    /// i32 `[N]`.
    pub(crate) input_ids: Tensor<1, Int>,
    /// i32 `[N]`.
    pub(crate) slots: Tensor<1, Int>,
    pub(crate) rotation: Rotation,
    pub(crate) keys: Keys,
    /// i32 `[N]`, where some tokens may be padding: those have none, and no expert works for them.
    pub(crate) padded_slots: Option<Tensor<1, Int>>,
}

impl Step {
    /// For a rank with so many heads.
    pub(crate) fn new(
        chunks: &[Chunk],
        cache: &PagedCache,
        rotary: &RotaryEmbedding,
        (config, heads): (&DeepseekV3Config, usize),
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        let positions = positions(&positions_of(chunks, cache)?)?;
        let ids = chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)).collect();
        let slots = chunks.iter().flat_map(|chunk| chunk.slots.iter().copied()).collect();
        let keys = Keys::new(chunks, &positions, cache, (config, heads, determinism), device)?;
        Ok(Self {
            determinism,
            input_ids: ints(ids, device),
            slots: ints(slots, device),
            rotation: rotary.at(&positions, device)?,
            keys,
            padded_slots: None,
        })
    }

    /// Puts the rows of the new tokens, `[N, D]`, into a pool of the cache.
    pub(crate) fn write(&self, cache: &mut PagedCache, pool: usize, rows: Tensor<2>) -> Result<()> {
        let (slots, latent) = (self.slots.clone(), rows);
        let write = |cache| Ok((write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?, ()));
        Ok(cache.write_pool(pool, write)?)
    }

    /// Applies RoPE to the queries and to the rotary keys of the new tokens, norms their latents `[N, D]`, and puts these into a
    /// pool of the cache.
    pub(crate) fn rope_and_write(
        &self,
        cache: &mut PagedCache,
        pool: usize,
        query: RopeQuery,
        latent: Tensor<2>,
        norm: &RmsNorm,
    ) -> Result<(Tensor<3>, Option<Tensor<2>>)> {
        let write = |cache| {
            let written = self.rotation.rope_and_write(query, latent, norm, (cache, self.slots.clone()))?;
            Ok((written.cache, (written.q, written.latent)))
        };
        Ok(cache.write_pool(pool, write)?)
    }
}
