//! What one forward pass works on: new tokens of some requests, where they go, and which keys they see.

use burn::tensor::{Device, Int, Tensor};
use mla_ops::batch::{positions, slots};
use mla_ops::cache::PagedCache;
use mla_ops::{Determinism, RopeQuery, WriteLatentArgs, write_latent};

use super::keys::Keys;
use super::mla_config::MlaConfig;
use super::rotary::{RotaryEmbedding, Rotation};
use crate::layers::RmsNorm;
use crate::step::{Chunk, check_chunks, ints, positions_of};
use crate::{ModelError, Result};

/// The inputs of a forward pass, on the device: new tokens of some requests, where they go in the cache, and which keys they see. All
/// layers of a model share one; [`MultiHeadLatentAttention::step`](super::MultiHeadLatentAttention::step) makes it.
#[derive(Debug)]
pub struct MlaStep {
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

impl MlaStep {
    /// [`Self::new`] of chunks that nobody has checked.
    pub(super) fn alone(
        chunks: &[Chunk],
        cache: &PagedCache,
        rotary: &RotaryEmbedding,
        sizes: (&MlaConfig, usize),
        determinism: Determinism,
        device: &Device,
    ) -> Result<Self> {
        check_chunks(chunks, cache)?;
        for (i, (chunk, tokens)) in chunks.iter().zip(positions_of(chunks, cache)?).enumerate() {
            let (given, request) = (&chunk.slots, chunk.request);
            if given.len() != tokens.len() {
                let expected = format!("{}, one for each token", tokens.len());
                let actual = format!("{} slots in chunks[{i}].slots, of {request}", given.len());
                return Err(ModelError::request("chunks", actual, expected));
            }
            let own = slots(&[tokens], &[cache.pages(request)?], cache.config().page_size)?;
            if let Some((at, (given, own))) = given.iter().zip(own).enumerate().find(|(_, (given, own))| *given != own)
            {
                let expected =
                    format!("{own}, the slot that `PagedCache::append` returned for this token of {request}");
                return Err(ModelError::request("chunks", format!("{given} in chunks[{i}].slots[{at}]"), expected));
            }
        }
        Self::new(chunks, cache, rotary, sizes, determinism, device)
    }

    /// For a rank with so many heads.
    pub(crate) fn new(
        chunks: &[Chunk],
        cache: &PagedCache,
        rotary: &RotaryEmbedding,
        (config, heads): (&MlaConfig, usize),
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

    /// Whether an argument has a row for each token.
    pub(super) fn check_rows(&self, argument: &'static str, [rows, _]: [usize; 2]) -> Result<()> {
        let [tokens] = self.slots.dims();
        let wrong = || ModelError::request(argument, format!("{rows} rows"), format!("{tokens}, one for each token"));
        if rows == tokens { Ok(()) } else { Err(wrong()) }
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
