use std::ops::Range;

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::backend::{BackendDecode, DecodeSpec, MlaDecodeBackend};
use crate::Path;
use crate::cache::Pool;
use crate::independent::map_independent;
use crate::ops::merge_state::reference::merge_states;
use crate::reference::{IntoFlex, QUERY_TILE, SCORES, device_i32, host, softmax_values, tensor};

impl MlaDecodeBackend for Flex {
    fn mla_decode(step: BackendDecode<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        mla_decode(step).into_flex()
    }
}

/// Rows of the paged cache, found through the page table.
struct PagedRows {
    /// `[P, S, D]`.
    kv_cache: Pool,
    /// `[B, maxP]`, on the host.
    page_table: Vec<i32>,
    max_pages: usize,
}

impl PagedRows {
    /// kv_cache `[P, S, D]`, page_table i32 `[B, maxP]`.
    fn new(kv_cache: Pool, page_table: Tensor<2, Int>) -> Self {
        let [_, max_pages] = page_table.dims();
        Self { kv_cache, page_table: host(page_table), max_pages }
    }

    /// The rows `first .. end` of a sequence, f32 `[end - first, D]`; `first < end`. Only their pages are read, and
    /// neighbouring pages are not copied.
    fn gather(&self, sequence: usize, first: usize, end: usize) -> Tensor<2> {
        let [_, page_size, width] = self.kv_cache.dims();
        let row = sequence * self.max_pages;
        let ids = &self.page_table[row + first / page_size..row + end.div_ceil(page_size)];
        let (used, device) = (ids.len(), self.kv_cache.device());
        let Some(cache) = self.kv_cache.dense_rows().cloned() else {
            let slots = (first..end)
                .map(|key| ids[key / page_size - first / page_size] * page_size as i32 + (key % page_size) as i32);
            let slots = device_i32(slots.collect(), [end - first], &device);
            return self.kv_cache.read(slots).cast(FloatDType::F32);
        };
        let pages = if ids.windows(2).all(|pair| pair[1] == pair[0] + 1) {
            cache.narrow(0, ids[0] as usize, used)
        } else {
            cache.select(0, device_i32(ids.to_vec(), [used], &device))
        };
        let rows = pages.reshape([used * page_size, width]);
        rows.narrow(0, first % page_size, end - first).cast(FloatDType::F32)
    }
}

/// out `[B, Sq, H, Dv]` in the dtype of q, lse f32 `[B, Sq, H]`; follows the work items of the plan.
fn mla_decode(step: BackendDecode<Flex>) -> (Tensor<4>, Tensor<3>) {
    let BackendDecode { q, kv_cache, page_table, seq_lens, items, spec, .. } = step;
    debug_assert!(matches!(spec.path, None | Some(Path::Reference)), "a path that the public function refuses");
    let (q, cache): (Tensor<4>, _) = (tensor(q), PagedRows::new(kv_cache.pool(), tensor(page_table)));
    let (seq_lens, items): (Tensor<1, Int>, Tensor<2, Int>) = (tensor(seq_lens), tensor(items));
    let [batch, query_len, heads, width] = q.dims();
    let (dtype, device) = (q.dtype(), q.device());
    if batch == 0 || query_len == 0 {
        let out = Tensor::zeros([batch, query_len, heads, spec.value_width], (&device, dtype));
        return (out, Tensor::zeros([batch, query_len, heads], (&device, DType::F32)));
    }
    let lens = host(seq_lens);
    let rows = query_len * heads;
    let q = (q.cast(FloatDType::F32) * spec.softmax_scale).reshape([batch, rows, width]);

    let used = |item: &&[i32]| item[0] >= 0;
    let items: Vec<Vec<i32>> = host(items).chunks_exact(4).take_while(used).map(<[i32]>::to_vec).collect();
    let sequences: Vec<usize> = items.iter().map(|item| item[0] as usize).collect();
    let keys: usize = items.iter().map(|item| (item[2] - item[1]) as usize).sum();
    let states = map_independent(&device, rows * keys * (width + spec.value_width), items, |item| {
        let (sequence, seq_len) = (item[0] as usize, lens[item[0] as usize]);
        // Whatever the plan says, there are no keys past the end.
        let [first, end] = [item[1], item[2]].map(|key| key.min(seq_len).max(0) as usize);
        let query = q.clone().slice([sequence..sequence + 1, 0..rows, 0..width]).reshape([rows, width]);
        let block = KeyBlock { first, end, seq_len, query_len, heads };
        let (out, lse) = block.attend(query, &cache, sequence, &spec);
        (out.reshape([query_len, heads, spec.value_width]), lse.reshape([query_len, heads]))
    });
    let mut splits: Vec<Vec<(Tensor<3>, Tensor<2>)>> = vec![Vec::new(); batch];
    for (sequence, state) in sequences.into_iter().zip(states) {
        splits[sequence].push(state);
    }
    let (outs, lses) = splits.into_iter().map(merge_splits).unzip();
    (Tensor::stack::<4>(outs, 0).cast(FloatDType::from(dtype)), Tensor::stack::<3>(lses, 0))
}

/// A range of keys of one sequence, and the query tokens that look at it.
struct KeyBlock {
    first: usize,
    end: usize,
    seq_len: i32,
    query_len: usize,
    heads: usize,
}

impl KeyBlock {
    /// out `[Sq * H, Dv]`, lse `[Sq * H, 1]`.
    fn attend(
        &self,
        query: Tensor<2>,
        cache: &PagedRows,
        sequence: usize,
        spec: &DecodeSpec,
    ) -> (Tensor<2>, Tensor<2>) {
        let blind = self.blind_queries(spec.causal);
        let mut states = Vec::new();
        if blind > 0 {
            let (rows, options) = (blind * self.heads, (&query.device(), DType::F32));
            let lse = Tensor::full([rows, 1], f32::NEG_INFINITY, options);
            states.push((Tensor::zeros([rows, spec.value_width], options), lse));
        }
        if blind < self.query_len {
            let keys = cache.gather(sequence, self.first, self.end);
            let [count, width] = keys.dims();
            let tile = (SCORES / (self.heads * count)).clamp(1, QUERY_TILE);
            let tiles = (blind..self.query_len).step_by(tile).collect();
            let work = query.dims()[0] * count * (width + spec.value_width);
            states.extend(map_independent(&query.device(), work, tiles, |first| {
                let queries = first..(first + tile).min(self.query_len);
                self.attend_tile(queries, &query, &keys, spec)
            }));
        }
        let (outs, lses): (Vec<_>, Vec<_>) = states.into_iter().unzip();
        (Tensor::cat(outs, 0), Tensor::cat(lses, 0))
    }

    /// The state of some of the query tokens; each of them sees a key.
    fn attend_tile(
        &self,
        queries: Range<usize>,
        query: &Tensor<2>,
        keys: &Tensor<2>,
        spec: &DecodeSpec,
    ) -> (Tensor<2>, Tensor<2>) {
        let [_, width] = query.dims();
        let rows = queries.start * self.heads..queries.end * self.heads;
        let scores = query.clone().slice([rows, 0..width]).matmul(keys.clone().transpose());
        let scores = self.hide_future(scores, queries.start, spec.causal);
        softmax_values(scores, keys.clone().narrow(1, 0, spec.value_width))
    }

    /// How many query tokens, from the first on, see no key of this block.
    fn blind_queries(&self, causal: bool) -> usize {
        match self.first == self.end {
            true => self.query_len,
            false if causal => (self.first as i64 - self.last_seen(0)).clamp(0, self.query_len as i64) as usize,
            false => 0,
        }
    }

    /// The last key that query token `query` sees: `j <= seq_len - Sq + query`.
    fn last_seen(&self, query: usize) -> i64 {
        i64::from(self.seq_len) - self.query_len as i64 + query as i64
    }

    /// -inf where a query may not see the key; the rows of the queries from `first_query` on.
    fn hide_future(&self, scores: Tensor<2>, first_query: usize, causal: bool) -> Tensor<2> {
        if !causal || self.last_seen(first_query) + 1 >= self.end as i64 {
            return scores;
        }
        let [rows, keys] = scores.dims();
        let device = scores.device();
        let limits = (0..rows).map(|row| self.last_seen(first_query + row / self.heads) as i32).collect();
        let limits = device_i32(limits, [rows, 1], &device).expand([rows, keys]);
        let positions = device_i32((self.first as i32..self.end as i32).collect(), [1, keys], &device);
        scores.mask_fill(positions.expand([rows, keys]).greater(limits), f32::NEG_INFINITY)
    }
}

/// One state from those of the splits: out `[Sq, H, Dv]`, lse `[Sq, H]`.
fn merge_splits(mut splits: Vec<(Tensor<3>, Tensor<2>)>) -> (Tensor<3>, Tensor<2>) {
    match splits.len() {
        1 => splits.remove(0),
        _ => {
            let (outs, lses): (Vec<_>, Vec<_>) = splits.into_iter().unzip();
            merge_states(Tensor::stack(outs, 1), Tensor::stack(lses, 1))
        }
    }
}
