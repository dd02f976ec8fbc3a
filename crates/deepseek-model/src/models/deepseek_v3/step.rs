//! What one forward pass works on: new tokens of some requests, where they go, and which keys they see.

use std::ops::Range;

use burn::tensor::{Bool, Device, Int, Tensor};
use mla_ops::cache::{PagedCache, RequestId};
use mla_ops::{
    Determinism, MlaPlan, MlaPlanArgs, RopeQuery, Splits, WriteLatentArgs, WriteLatentError, mla_plan, write_latent,
};

use super::attention_form::{is_naive, is_one_by_one};
use super::config::DeepseekV3Config;
use super::rotary::{RotaryEmbedding, Rotation};
use crate::Result;
use crate::layers::RmsNorm;
use crate::step::{Chunk, ints, padded};

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
    /// Which tokens are none, `[N, 1]`, where some may be: no expert works for them.
    pub(crate) padding: Option<Tensor<2, Bool>>,
}

/// Keys of a split where the result of a token must not depend on the batch.
const SPLIT_TOKENS: usize = 1024;

/// Which keys the new tokens see, and in which form.
#[derive(Debug)]
pub(crate) enum Keys {
    /// All that precede them.
    All {
        /// The first tokens, one by one: their keys are read from the cache, in the absorbed form.
        single: Option<PagedKeys>,
        /// The tokens after those.
        new: Option<NewKeys>,
    },
    /// Some token may see more keys than the indexer picks: all tokens read what it picks, in the absorbed form.
    Indexed(IndexedKeys),
}

/// How chunks of new tokens see their keys: see [`is_naive`].
#[derive(Debug)]
pub(crate) enum NewKeys {
    /// Each other in the naive form, and what the cache held before in the absorbed form.
    Naive {
        /// i32 `[B + 1]`, counted from the first of these tokens.
        cu_seqlens: Tensor<1, Int>,
        past: Vec<ChunkKeys>,
    },
    /// All keys, their own among them, in the absorbed form. That has 3.4 times the arithmetic of the naive one in DeepSeek-V3's
    /// sizes, but keys and values of every head need not be computed.
    Absorbed(Vec<ChunkKeys>),
}

/// Keys in the cache, and the plan for reading them.
#[derive(Debug)]
pub(crate) struct PagedKeys {
    pub(crate) batch: usize,
    /// i32 `[B, maxP]`.
    pub(crate) page_table: Tensor<2, Int>,
    /// i32 `[B]`.
    pub(crate) seq_lens: Tensor<1, Int>,
    pub(crate) plan: MlaPlan,
}

/// Where each new token finds the keys that an indexer picks from.
#[derive(Debug)]
pub(crate) struct IndexedKeys {
    /// i32 `[N, maxP]`: the pages of the token's request.
    pub(crate) page_table: Tensor<2, Int>,
    /// i32 `[N, 1]`: how many keys precede the token, itself included.
    pub(crate) visible: Tensor<2, Int>,
}

/// The keys of some requests' new tokens, as many of each.
#[derive(Debug)]
pub(crate) struct ChunkKeys {
    /// The new tokens, counted from the first one of [`NewKeys`].
    pub(crate) tokens: Range<usize>,
    pub(crate) keys: PagedKeys,
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
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        let keys = if is_indexed(config, longest, determinism) {
            Keys::Indexed(IndexedKeys::new(chunks, &positions, cache, device)?)
        } else {
            let one_by_one = is_one_by_one(cache, (config, heads), determinism, device);
            let alone = chunks.iter().take_while(|chunk| one_by_one || chunk.tokens.len() == 1).count();
            let (alone, longer) = chunks.split_at(alone);
            Keys::All {
                single: single_keys(alone, &positions, cache, (heads, determinism), device)?,
                new: new_keys(longer, cache, (config, heads, determinism), device)?,
            }
        };
        Ok(Self {
            determinism,
            input_ids: ints(ids, device),
            slots: ints(slots, device),
            rotation: rotary.at(&positions, device),
            keys,
            padding: None,
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
    pub(crate) fn turn_and_write(
        &self,
        cache: &mut PagedCache,
        pool: usize,
        query: RopeQuery,
        latent: Tensor<2>,
        norm: &RmsNorm,
    ) -> Result<(Tensor<3>, Option<Tensor<2>>)> {
        let target = (cache.take_pool(pool)?, self.slots.clone());
        let written = self.rotation.turn_and_write(query, latent, norm, target);
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

/// Whether the tokens of a step with requests of so many keys at most read what an indexer picks. A token may not see by its
/// neighbours whether it picks all keys.
pub(super) fn is_indexed(config: &DeepseekV3Config, longest: usize, determinism: Determinism) -> bool {
    config.indexer.is_some_and(|indexer| determinism.is_batch_invariant() || longest > indexer.topk)
}

/// How the keys of tokens that are decoded one by one are divided.
pub(super) fn splits(determinism: Determinism) -> Splits {
    match determinism {
        Determinism::BatchInvariant => Splits::Tokens(SPLIT_TOKENS),
        Determinism::Fast => Splits::Auto,
    }
}

/// The keys of each token of some chunks, as if it were alone; `positions` begins with theirs.
fn single_keys(
    chunks: &[Chunk],
    positions: &[usize],
    cache: &PagedCache,
    (heads, determinism): (usize, Determinism),
    device: &Device,
) -> Result<Option<PagedKeys>> {
    let owners: Vec<RequestId> = chunks.iter().flat_map(|chunk| vec![chunk.request; chunk.tokens.len()]).collect();
    if owners.is_empty() {
        return Ok(None);
    }
    let seq_lens = positions[..owners.len()].iter().map(|&position| position + 1).collect();
    let reader = Reader { query_len: 1, heads, splits: splits(determinism) };
    Ok(Some(PagedKeys::new(&owners, seq_lens, reader, cache, device)?))
}

fn new_keys(
    chunks: &[Chunk],
    cache: &PagedCache,
    (config, heads, determinism): (&DeepseekV3Config, usize, Determinism),
    device: &Device,
) -> Result<Option<NewKeys>> {
    if chunks.is_empty() {
        return Ok(None);
    }
    if determinism.is_batch_invariant() || !is_naive(cache, (config, heads), device) {
        return Ok(Some(NewKeys::Absorbed(absorbed_keys(chunks, cache, (heads, determinism), device)?)));
    }
    let mut cu_seqlens = vec![0];
    let mut past = Vec::new();
    let mut first = 0;
    for chunk in chunks {
        let new = chunk.tokens.len();
        let (tokens, before) = (first..first + new, cache.len(chunk.request)? - new);
        if before > 0 {
            let reader = Reader { query_len: new, heads, splits: splits_of(new, heads, determinism) };
            let keys = PagedKeys::new(&[chunk.request], vec![before], reader, cache, device)?;
            past.push(ChunkKeys { tokens: tokens.clone(), keys });
        }
        first = tokens.end;
        cu_seqlens.push(first as i32);
    }
    Ok(Some(NewKeys::Naive { cu_seqlens: ints(cu_seqlens, device), past }))
}

/// Query rows of a request from which keys need not be split for a GPU to have enough to do: 128 tiles of 64.
const FILLS: usize = 128 * 64;

/// How the keys of so many query tokens are divided.
fn splits_of(query_len: usize, heads: usize, determinism: Determinism) -> Splits {
    match determinism {
        Determinism::Fast if query_len * heads >= FILLS => Splits::Count(1),
        _ => splits(determinism),
    }
}

/// New tokens of a request, and its keys up to the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    request: RequestId,
    tokens: usize,
    keys: usize,
}

/// The tokens of a chunk, of a request with so many keys. Where a token's result must not depend on the others, it has to see as
/// many splits as it would alone: pieces end where splits do.
fn pieces(chunk: &Chunk, keys: usize, determinism: Determinism) -> Vec<Piece> {
    let request = chunk.request;
    let mut first = keys - chunk.tokens.len();
    let mut pieces = Vec::new();
    while first < keys {
        let end = match determinism {
            Determinism::Fast => keys,
            Determinism::BatchInvariant => keys.min((first / SPLIT_TOKENS + 1) * SPLIT_TOKENS),
        };
        pieces.push(Piece { request, tokens: end - first, keys: end });
        first = end;
    }
    pieces
}

/// The keys of each chunk; of neighbours with as many new tokens together, unless each fills a GPU and has several splits.
fn absorbed_keys(
    chunks: &[Chunk],
    cache: &PagedCache,
    (heads, determinism): (usize, Determinism),
    device: &Device,
) -> Result<Vec<ChunkKeys>> {
    let mut all = Vec::new();
    for chunk in chunks {
        all.extend(pieces(chunk, cache.len(chunk.request)?, determinism));
    }
    let apart = |tokens| determinism.is_batch_invariant() && tokens * heads >= FILLS;
    let mut first = 0;
    all.chunk_by(|a, b| a.tokens == b.tokens && !apart(a.tokens))
        .map(|pieces| {
            let query_len = pieces[0].tokens;
            let tokens = first..first + pieces.len() * query_len;
            first = tokens.end;
            let (requests, lens): (Vec<_>, Vec<_>) = pieces.iter().map(|piece| (piece.request, piece.keys)).unzip();
            let reader = Reader { query_len, heads, splits: splits_of(query_len, heads, determinism) };
            Ok(ChunkKeys { tokens, keys: PagedKeys::new(&requests, lens, reader, cache, device)? })
        })
        .collect()
}

impl IndexedKeys {
    fn new(chunks: &[Chunk], positions: &[usize], cache: &PagedCache, device: &Device) -> Result<Self> {
        let requests: Vec<RequestId> = chunks.iter().map(|chunk| chunk.request).collect();
        let by_request = cache.page_table(&requests, padded(cache.max_pages(&requests)?))?;
        let owners = chunks.iter().enumerate().flat_map(|(i, chunk)| vec![i as i32; chunk.tokens.len()]).collect();
        let visible = positions.iter().map(|&position| position as i32 + 1).collect();
        Ok(Self {
            page_table: by_request.select(0, ints(owners, device)),
            visible: ints(visible, device).unsqueeze_dim(1),
        })
    }
}

/// How keys in the cache are read.
struct Reader {
    /// Tokens of each request.
    query_len: usize,
    heads: usize,
    splits: Splits,
}

impl PagedKeys {
    /// The first `seq_lens` keys of each request.
    fn new(
        requests: &[RequestId],
        seq_lens: Vec<usize>,
        reader: Reader,
        cache: &PagedCache,
        device: &Device,
    ) -> Result<Self> {
        let page_size = cache.config().page_size;
        let max_pages = padded(seq_lens.iter().map(|len| len.div_ceil(page_size)).max().unwrap_or(0));
        let seq_lens = ints(seq_lens.into_iter().map(|len| len as i32).collect(), device);
        let page_table = cache.page_table(requests, max_pages)?;
        let plan = mla_plan(MlaPlanArgs {
            seq_lens: seq_lens.clone(),
            query_len: reader.query_len,
            heads: reader.heads,
            page_size,
            max_seq_len: max_pages * page_size,
            splits: reader.splits,
        })?;
        Ok(Self { batch: requests.len(), page_table, seq_lens, plan })
    }
}
