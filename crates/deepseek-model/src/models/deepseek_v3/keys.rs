//! Which keys the new tokens of a forward pass see, and in which form.

use std::iter;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor};
use mla_ops::batch::{cu_seqlens, slots};
use mla_ops::cache::{PagedCache, RequestId};
use mla_ops::{
    Determinism, ListLengths, MlaPlan, MlaPlanArgs, SparseMlaPlan, SparseMlaPlanArgs, Splits, mla_plan, sparse_mla_plan,
};

use super::attention_form::{ChunkLengths, is_naive, is_one_by_one};
use super::indexer_config::IndexerConfig;
use super::mla_config::MlaConfig;
use crate::Result;
use crate::index_keys::{IndexSizes, IndexedKeys, list_lengths};
use crate::step::{Chunk, ints, padded};

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
    Indexed {
        /// Those that it picks from.
        keys: Vec<IndexedKeys>,
        /// How many each token gets.
        picked: PickedKeys,
    },
}

/// How many keys an indexer picks for each token of a step.
#[derive(Debug)]
pub(crate) struct PickedKeys {
    /// i32 `[N, 1]`.
    pub(crate) lengths: Tensor<2, Int>,
    /// How they are divided, where there are so few tokens that they are.
    pub(crate) plan: Option<SparseMlaPlan>,
}

/// How chunks of new tokens see their keys: see [`is_naive`].
#[derive(Debug)]
pub(crate) enum NewKeys {
    /// In the naive form, with keys and values of every head; block by block, for all of them need memory.
    Naive {
        /// i32 `[B + 1]`, counted from the first of these tokens.
        cu_seqlens: Tensor<1, Int>,
        /// The keys of the new tokens themselves, each request's behind some that the cache held before; `None` if it held none.
        last: Option<CachedKeys>,
        /// The keys before those.
        before: Vec<CachedKeys>,
    },
    /// In the absorbed form.
    Absorbed(Vec<ChunkKeys>),
}

/// Rows of the cache, some of each request.
#[derive(Debug)]
pub(crate) struct CachedKeys {
    /// i32 `[K]`.
    pub(crate) slots: Tensor<1, Int>,
    /// i32 `[B + 1]`: where the rows of each request begin.
    pub(crate) cu_seqlens: Tensor<1, Int>,
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

/// The keys of some requests' new tokens, as many of each.
#[derive(Debug)]
pub(crate) struct ChunkKeys {
    /// The new tokens, counted from the first one of [`NewKeys`].
    pub(crate) tokens: Range<usize>,
    pub(crate) keys: PagedKeys,
}

impl Keys {
    /// Of chunks whose tokens have these positions, for a rank with so many heads.
    pub(super) fn new(
        chunks: &[Chunk],
        positions: &[usize],
        cache: &PagedCache,
        (config, heads, determinism): (&MlaConfig, usize, Determinism),
        device: &Device,
    ) -> Result<Self> {
        let longest = positions.iter().max().map_or(0, |position| position + 1);
        if let Some(indexer) = indexer_of(config, longest, determinism) {
            return indexed_keys(chunks, positions, cache, (indexer, heads, determinism), device);
        }
        let one_by_one = is_one_by_one(cache, (config, heads), determinism, device);
        let alone = chunks.iter().take_while(|chunk| one_by_one || chunk.tokens.len() == 1).count();
        let (alone, longer) = chunks.split_at(alone);
        let sizes = (config, heads, determinism);
        let new = || NewKeys::new(longer, cache, sizes, MOST_EXPANDED, device);
        Ok(Self::All {
            single: single_keys(alone, positions, cache, (heads, determinism), device)?,
            new: (!longer.is_empty()).then(new).transpose()?,
        })
    }
}

/// The indexer whose picks the tokens of a step read, with requests of so many keys at most; `None` where they read all. A token may
/// not see by its neighbours whether it picks all keys.
pub(super) fn indexer_of(config: &MlaConfig, longest: usize, determinism: Determinism) -> Option<IndexerConfig> {
    config.indexer.filter(|indexer| determinism.is_batch_invariant() || longest > indexer.topk)
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

/// Numbers of keys and values of every head that are in memory at once, unless the new tokens have more.
const MOST_EXPANDED: usize = 1 << 30;

impl NewKeys {
    /// Of chunks, one at least; with so many numbers expanded at once.
    pub(super) fn new(
        chunks: &[Chunk],
        cache: &PagedCache,
        (config, heads, determinism): (&MlaConfig, usize, Determinism),
        most_expanded: usize,
        device: &Device,
    ) -> Result<Self> {
        let lengths = |chunk: &Chunk| {
            let new = chunk.tokens.len();
            Ok(ChunkLengths { new, past: cache.len(chunk.request)? - new })
        };
        let lengths = chunks.iter().map(lengths).collect::<Result<Vec<_>>>()?;
        if determinism.is_batch_invariant() || !is_naive(&lengths, cache, (config, heads), device) {
            return Ok(Self::Absorbed(absorbed_keys(chunks, cache, (heads, determinism), device)?));
        }
        let new_tokens: Vec<usize> = lengths.iter().map(|lengths| lengths.new).collect();
        let cu_seqlens = ints(cu_seqlens(&new_tokens)?, device);
        if lengths.iter().all(|lengths| lengths.past == 0) {
            return Ok(Self::Naive { cu_seqlens, last: None, before: Vec::new() });
        }
        let most = most_expanded / (heads * (config.qk_nope_head_dim + config.v_head_dim));
        let (last, before) = key_blocks(&lengths, most.max(1));
        let cached = |keys: Vec<Range<usize>>| CachedKeys::new(chunks, keys, cache, device);
        let before = before.into_iter().map(cached).collect::<Result<_>>()?;
        Ok(Self::Naive { cu_seqlens, last: Some(cached(last)?), before })
    }
}

/// The keys of each request, so many at once: the new ones behind the last ones before them, as far as there is room; and the rest.
fn key_blocks(lengths: &[ChunkLengths], most: usize) -> (Vec<Range<usize>>, Vec<Vec<Range<usize>>>) {
    let mut rest: Vec<usize> = lengths.iter().map(|lengths| lengths.past).collect();
    let mut take = |mut room: usize| -> Vec<Range<usize>> {
        let last = |end: &mut usize| {
            let taken = room.min(*end);
            (room, *end) = (room - taken, *end - taken);
            *end..*end + taken
        };
        rest.iter_mut().map(last).collect()
    };
    let new: usize = lengths.iter().map(|lengths| lengths.new).sum();
    let behind = take(most.saturating_sub(new)).into_iter();
    let last = behind.zip(lengths).map(|(keys, lengths)| keys.start..lengths.past + lengths.new).collect();
    let before = iter::from_fn(|| Some(take(most)).filter(|keys| keys.iter().any(|keys| !keys.is_empty())));
    (last, before.collect())
}

impl CachedKeys {
    /// Those at these places of each chunk's request.
    fn new(chunks: &[Chunk], keys: Vec<Range<usize>>, cache: &PagedCache, device: &Device) -> Result<Self> {
        let lens: Vec<usize> = keys.iter().map(ExactSizeIterator::len).collect();
        let pages = chunks.iter().map(|chunk| Ok(cache.pages(chunk.request)?)).collect::<Result<Vec<_>>>()?;
        let slots = slots(&keys, &pages, cache.config().page_size)?;
        Ok(Self { slots: ints(slots, device), cu_seqlens: ints(cu_seqlens(&lens)?, device) })
    }
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

impl PickedKeys {
    /// Of at most `most` each, for so many heads.
    pub(super) fn new(
        lengths: Tensor<2, Int>,
        most: usize,
        (heads, determinism): (usize, Determinism),
    ) -> Result<Self> {
        let [tokens, _] = lengths.dims();
        let plan = || {
            let first = ListLengths { most, lengths: Some(lengths.clone()) };
            sparse_mla_plan(SparseMlaPlanArgs { first, second: None, heads })
        };
        let divides = !determinism.is_batch_invariant() && tokens * heads < FILLS;
        let plan = divides.then(plan).transpose()?;
        Ok(Self { lengths, plan })
    }
}

/// Where the tokens find the keys that the indexer picks from.
fn indexed_keys(
    chunks: &[Chunk],
    positions: &[usize],
    cache: &PagedCache,
    (indexer, query_heads, determinism): (IndexerConfig, usize, Determinism),
    device: &Device,
) -> Result<Keys> {
    let IndexerConfig { heads, head_dim: width, topk } = indexer;
    let requests: Vec<RequestId> = chunks.iter().map(|chunk| chunk.request).collect();
    let most = padded(cache.max_pages(&requests)?);
    // Of each group from the cache: rows of a table of all would be a copy by Burn, which has a kernel for every size of them.
    let pages = |owners: Vec<i32>| {
        let owners: Vec<RequestId> = owners.into_iter().map(|owner| requests[owner as usize]).collect();
        cache.page_table(&owners, most)
    };
    let lens: Vec<usize> = chunks.iter().map(|chunk| chunk.tokens.len()).collect();
    let visible: Vec<i32> = positions.iter().map(|&position| position as i32 + 1).collect();
    let sizes = IndexSizes::new([heads, width], cache.config().page_size, cache.config());
    let keys = IndexedKeys::of_step(&lens, pages, &visible, (&sizes, determinism), device)?;
    let lengths = ints(list_lengths(&visible, topk).collect(), device).unsqueeze_dim(1);
    let picked = PickedKeys::new(lengths, topk, (query_heads, determinism))?;
    Ok(Keys::Indexed { keys, picked })
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
        let page_table = cache.page_table_of_first(requests, max_pages)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_blocks_have_every_key_once_and_the_new_ones_last() {
        let lengths = [(5, 0), (2, 7), (1, 3)].map(|(new, past)| ChunkLengths { new, past });
        for most in [1, 4, 9, 12, 100] {
            let (last, before) = key_blocks(&lengths, most);
            for (i, &ChunkLengths { new, past }) in lengths.iter().enumerate() {
                assert!(last[i].start <= past && last[i].end == past + new, "{last:?}");
                let mut seen: Vec<usize> = before.iter().chain([&last]).flat_map(|block| block[i].clone()).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..past + new).collect::<Vec<_>>(), "at most {most}");
            }
            let keys = |block: &[Range<usize>]| block.iter().map(ExactSizeIterator::len).sum::<usize>();
            assert!(keys(&last) <= most.max(8) && before.iter().all(|block| (1..=most).contains(&keys(block))));
        }
    }
}
