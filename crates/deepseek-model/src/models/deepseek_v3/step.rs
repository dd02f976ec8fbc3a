//! What one forward pass works on: new tokens of some requests, where they go, and which keys they see.

use burn::tensor::{Device, Int, Tensor};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, RopeQuery, WriteLatentArgs, WriteLatentError, write_latent};

use super::config::DeepseekV3Config;
use super::keys::Keys;
use super::rotary::{RotaryEmbedding, Rotation};
use crate::Result;
use crate::layers::RmsNorm;
use crate::step::{Chunk, ints};

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
        let mut positions = Vec::new();
        for chunk in chunks {
            let len = cache.len(chunk.request)?;
            positions.extend(len - chunk.tokens.len()..len);
        }
        let ids = chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)).collect();
        let slots = chunks.iter().flat_map(|chunk| chunk.slots.iter().copied()).collect();
        let keys = Keys::new(chunks, &positions, cache, (config, heads, determinism), device)?;
        Ok(Self {
            determinism,
            input_ids: ints(ids, device),
            slots: ints(slots, device),
            rotation: rotary.at(&positions, device),
            keys,
            padded_slots: None,
        })
    }

    /// Puts the rows of the new tokens, `[N, D]`, into a pool of the cache.
    pub(crate) fn write(&self, cache: &mut PagedCache, pool: usize, rows: Tensor<2>) -> Result<()> {
        let (slots, latent) = (self.slots.clone(), rows);
        let args = WriteLatentArgs { cache: cache.take_pool(pool)?, slots, latent, rope: None };
        put_back(cache, pool, write_latent(args).map(|pool| (pool, ())))
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
        let target = (cache.take_pool(pool)?, self.slots.clone());
        let written = self.rotation.rope_and_write(query, latent, norm, target);
        put_back(cache, pool, written.map(|written| (written.cache, (written.q, written.latent))))
    }
}

/// Gives a pool back to the cache, written or refused.
fn put_back<T>(
    cache: &mut PagedCache,
    pool: usize,
    result: std::result::Result<(Tensor<3>, T), Box<WriteLatentError>>,
) -> Result<T> {
    match result {
        Ok((written, rest)) => {
            cache.put_pool(pool, written)?;
            Ok(rest)
        }
        Err(refused) => {
            cache.put_pool(pool, refused.cache)?;
            Err(refused.error.into())
        }
    }
}
