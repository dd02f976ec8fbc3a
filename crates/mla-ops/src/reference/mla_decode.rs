use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::merge_state::merge_states;
use super::softmax::softmax_values;
use super::{device_i32, host};
use crate::backend::DecodeSpec;

/// Rows of the paged cache, found through the page table.
pub(crate) struct PagedRows {
    /// `[P, S, D]`.
    pub kv_cache: Tensor<3>,
    /// i32 `[B, maxP]`.
    pub page_table: Tensor<2, Int>,
}

impl PagedRows {
    /// The rows `first .. end` of a sequence, f32 `[end - first, D]`; `first < end`. Only their pages are read.
    fn gather(&self, sequence: usize, first: usize, end: usize) -> Tensor<2> {
        let [_, page_size, width] = self.kv_cache.dims();
        let pages = first / page_size..end.div_ceil(page_size);
        let used = pages.len();
        let ids = self.page_table.clone().slice([sequence..sequence + 1, pages]).reshape([used]);
        let rows = self.kv_cache.clone().select(0, ids).reshape([used * page_size, width]);
        rows.narrow(0, first % page_size, end - first).cast(FloatDType::F32)
    }
}

/// out `[B, Sq, H, Dv]` in the dtype of q, lse f32 `[B, Sq, H]`; follows the work items of the plan.
pub(crate) fn mla_decode(
    q: Tensor<4>,
    cache: PagedRows,
    seq_lens: Tensor<1, Int>,
    items: Tensor<2, Int>,
    spec: &DecodeSpec,
) -> (Tensor<4>, Tensor<3>) {
    let [batch, query_len, heads, width] = q.dims();
    let (dtype, device) = (q.dtype(), q.device());
    if batch == 0 || query_len == 0 {
        let out = Tensor::zeros([batch, query_len, heads, spec.value_width], (&device, dtype));
        return (out, Tensor::zeros([batch, query_len, heads], (&device, DType::F32)));
    }
    let lens = host(seq_lens);
    let rows = query_len * heads;
    let q = (q.cast(FloatDType::F32) * spec.softmax_scale).reshape([batch, rows, width]);

    let mut splits: Vec<Vec<(Tensor<3>, Tensor<2>)>> = vec![Vec::new(); batch];
    for item in host(items).chunks_exact(4) {
        let Ok(sequence) = usize::try_from(item[0]) else { break };
        let (first, end) = (item[1] as usize, item[2] as usize);
        let query = q.clone().slice([sequence..sequence + 1, 0..rows, 0..width]).reshape([rows, width]);
        let block = KeyBlock { first, end, seq_len: lens[sequence], query_len, heads };
        let (out, lse) = block.attend(query, &cache, sequence, spec);
        splits[sequence].push((out.reshape([query_len, heads, spec.value_width]), lse.reshape([query_len, heads])));
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
        let [rows, width] = query.dims();
        let blind = self.blind_queries(spec.causal) * self.heads;
        let seeing = (rows > blind).then(|| {
            let keys = cache.gather(sequence, self.first, self.end);
            let query = query.clone().slice([blind..rows, 0..width]);
            let scores = self.hide_future(query.matmul(keys.clone().transpose()), rows - blind, spec.causal);
            softmax_values(scores, keys.narrow(1, 0, spec.value_width))
        });
        let empty = (blind > 0).then(|| {
            let options = (&query.device(), DType::F32);
            (Tensor::zeros([blind, spec.value_width], options), Tensor::full([blind, 1], f32::NEG_INFINITY, options))
        });
        match (empty, seeing) {
            (Some(top), Some(bottom)) => (Tensor::cat(vec![top.0, bottom.0], 0), Tensor::cat(vec![top.1, bottom.1], 0)),
            (Some(state), None) | (None, Some(state)) => state,
            (None, None) => unreachable!("a query has at least one row"),
        }
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

    /// -inf where a query may not see the key; the last `rows` rows of all.
    fn hide_future(&self, scores: Tensor<2>, rows: usize, causal: bool) -> Tensor<2> {
        let first_query = self.query_len - rows / self.heads;
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
