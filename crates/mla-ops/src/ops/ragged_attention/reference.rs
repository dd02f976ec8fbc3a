use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Bool, DType, FloatDType, Int, Tensor, s};

use super::RaggedAttentionOptions;
use super::backend::{BackendKeys, RaggedAttentionBackend};
use crate::independent::map_independent;
use crate::ops::merge_state::reference::merge_state;
use crate::reference::{IntoFlex, QUERY_TILE, SCORES, host, softmax_values, tensor};

impl RaggedAttentionBackend for Flex {
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: BackendKeys<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        cu_seqlens_k: IntTensor<Self>,
        options: RaggedAttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let qkv = [tensor(q), whole(k), tensor(v)];
        ragged_attention(qkv, tensor(cu_seqlens), tensor(cu_seqlens_k), &options).into_flex()
    }
}

/// `[M, Hkv, dqk]`.
fn whole(k: BackendKeys<Flex>) -> Tensor<3> {
    match k {
        BackendKeys::Whole(k) => tensor(k),
        BackendKeys::Shared(k, k_pe) => {
            let (k, k_pe): (Tensor<3>, Tensor<2>) = (tensor(k), tensor(k_pe));
            let ([keys, kv_heads, _], [_, shared]) = (k.dims(), k_pe.dims());
            Tensor::cat(vec![k, k_pe.unsqueeze_dim::<3>(1).expand([keys, kv_heads, shared])], 2)
        }
    }
}

/// out `[N, H, dv]` in the dtype of q, lse f32 `[N, H]`.
fn ragged_attention(
    [q, k, v]: [Tensor<3>; 3],
    cu_seqlens: Tensor<1, Int>,
    cu_seqlens_k: Tensor<1, Int>,
    options: &RaggedAttentionOptions,
) -> (Tensor<3>, Tensor<2>) {
    let ([tokens, heads, _], [keys, _, value_width]) = (q.dims(), v.dims());
    let (dtype, device) = (q.dtype(), q.device());
    let no_keys = |tokens: usize| {
        let out = Tensor::<3>::zeros([tokens, heads, value_width], (&device, dtype));
        (out, Tensor::<2>::full([tokens, heads], f32::NEG_INFINITY, (&device, DType::F32)))
    };
    // Head-major, as the batched matmul wants them.
    let by_head = |tensor: Tensor<3>| tensor.cast(FloatDType::F32).swap_dims(0, 1);
    let q = by_head(q) * options.softmax_scale;
    let [k, v] = [k, v].map(|tensor| for_heads(by_head(tensor), heads));

    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    let mut push = |(out, lse): (Tensor<3>, Tensor<2>)| {
        outs.push(out);
        lses.push(lse);
    };
    let ends = |cu_seqlens, len| ends(host(cu_seqlens), len);
    let (mut done, mut keys_done) = (0, 0);
    for (end, end_key) in ends(cu_seqlens, tokens).into_iter().zip(ends(cu_seqlens_k, keys)) {
        let sequence = Sequence { first: done, end, first_key: keys_done, end_key, options };
        if sequence.blind() > 0 {
            push(no_keys(sequence.blind()));
        }
        for (out, lse) in sequence.attend(&q, &k, &v) {
            let out = out.swap_dims(0, 1).cast(FloatDType::from(dtype));
            push((out, lse.swap_dims(0, 1).reshape([-1, heads as i32])));
        }
        (done, keys_done) = (end, end_key);
    }
    if done < tokens || tokens == 0 {
        push(no_keys(tokens - done));
    }
    (Tensor::cat(outs, 0), Tensor::cat(lses, 0))
}

/// Where sequences end: within the tokens, and ascending.
fn ends(cu_seqlens: Vec<i32>, tokens: usize) -> Vec<usize> {
    let mut least = 0;
    let ends = cu_seqlens.into_iter().skip(1).map(|end| {
        least = (end.clamp(0, tokens as i32) as usize).max(least);
        least
    });
    ends.collect()
}

/// `[Hkv, M, d]` for each of the query's heads.
fn for_heads(tensor: Tensor<3>, heads: usize) -> Tensor<3> {
    let [kv_heads, keys, width] = tensor.dims();
    if kv_heads == heads {
        return tensor;
    }
    let group = heads / kv_heads;
    tensor.unsqueeze_dim::<4>(1).expand([kv_heads, group, keys, width]).reshape([heads, keys, width])
}

/// The query tokens `first .. end`, and the key tokens.
struct Sequence<'a> {
    first: usize,
    end: usize,
    first_key: usize,
    end_key: usize,
    options: &'a RaggedAttentionOptions,
}

impl Sequence<'_> {
    /// How many queries, the first ones, see no key.
    fn blind(&self) -> usize {
        let (queries, keys) = (self.end - self.first, self.end_key - self.first_key);
        match keys {
            0 => queries,
            _ if self.options.causal => queries.saturating_sub(keys),
            _ => 0,
        }
    }

    /// out `[H, rows, dv]` and lse `[H, rows, 1]` of each query tile that sees a key; q, k, v head-major f32.
    fn attend(&self, q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>) -> Vec<(Tensor<3>, Tensor<3>)> {
        let tiles = (self.first + self.blind()..self.end).step_by(QUERY_TILE).collect();
        let (queries, keys) = (self.end - self.first, self.end_key - self.first_key);
        let work = queries * keys / 2 * (q.dims()[0] * (q.dims()[2] + v.dims()[2]));
        map_independent(&q.device(), work, tiles, |q_first| self.attend_tile(q_first, q, k, v))
    }

    /// out `[H, rows, dv]` and lse `[H, rows, 1]` of the query tile from `q_first` on.
    fn attend_tile(&self, q_first: usize, q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let [heads, ..] = q.dims();
        let key_tile = (SCORES / (heads * QUERY_TILE) / QUERY_TILE).max(1) * QUERY_TILE;
        let rows = |tensor: &Tensor<3>, from: usize, to: usize| tensor.clone().narrow(1, from, to - from);
        let q_end = (q_first + QUERY_TILE).min(self.end);
        let query = rows(q, q_first, q_end);
        // The key at the position of the first query: its last one.
        let own = (self.end_key + q_first).saturating_sub(self.end);
        let seen_end = if self.options.causal { own + q_end - q_first } else { self.end_key };
        let block = |k_first: usize, k_end: usize| {
            let mut scores = query.clone().matmul(rows(k, k_first, k_end).transpose());
            if let Some(softcap) = self.options.softcap {
                scores = (scores / softcap).tanh() * softcap;
            }
            if self.options.causal && k_end > own {
                scores = hide_future(scores, own - k_first);
            }
            match self.options.window {
                // Row r is at position own + r, and sees what is less than a window before.
                Some(window) => windowed(scores, (own + 1) as i64 - k_first as i64, window, rows(v, k_first, k_end)),
                None => softmax_values(scores, rows(v, k_first, k_end)),
            }
        };
        let first_seen = self.options.window.map_or(self.first_key, |window| (own + 1).saturating_sub(window));
        let first_key = first_seen.max(self.first_key);
        // All but the first begin whole query tiles away from the key at the first query's position, none past it: without a
        // window every row sees a key of each.
        let ahead = if self.options.causal { (own - first_key) % QUERY_TILE } else { 0 };
        let first = if ahead > 0 { ahead } else { key_tile };
        let first_end = (first_key + first).min(seen_end);
        let mut state = block(first_key, first_end);
        for k_first in (first_end..seen_end).step_by(key_tile) {
            state = merge_blocks(state, block(k_first, (k_first + key_tile).min(seen_end)));
        }
        state
    }
}

/// -inf where the key's position is past the query's; scores `[H, rows, keys]`, whose last `rows` keys are the queries'
/// own positions.
fn hide_future(scores: Tensor<3>, own: usize) -> Tensor<3> {
    let [heads, rows, keys] = scores.dims();
    let device = scores.device();
    let diagonal = scores.clone().narrow(2, own, keys - own);
    let future = Tensor::<2, Bool>::tril_mask([rows, keys - own], 0, &device);
    let hidden = diagonal.mask_fill(future.unsqueeze::<3>().expand([heads, rows, keys - own]), f32::NEG_INFINITY);
    scores.slice_assign(s![.., .., own..keys], hidden)
}

/// [`softmax_values`] of rows that see only their last keys, and perhaps none of these: row r those from `r + sees - window` on.
fn windowed(scores: Tensor<3>, sees: i64, window: usize, values: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let [heads, rows, keys] = scores.dims();
    // Windows that hide nothing are all the same.
    let first = (sees - i64::try_from(window).unwrap_or(i64::MAX)).max(-(rows as i64));
    let past = Tensor::<2, Bool>::triu_mask([rows, keys], first, &scores.device());
    let scores = scores.mask_fill(past.unsqueeze::<3>().expand([heads, rows, keys]), f32::NEG_INFINITY);
    let blind = scores.clone().max_dim(2).equal_elem(f32::NEG_INFINITY);
    let (out, lse) = softmax_values(scores, values);
    let of_out = blind.clone().expand(out.dims());
    (out.mask_fill(of_out, 0.0), lse.mask_fill(blind, f32::NEG_INFINITY))
}

fn merge_blocks(a: (Tensor<3>, Tensor<3>), b: (Tensor<3>, Tensor<3>)) -> (Tensor<3>, Tensor<3>) {
    let (out, lse) = merge_state(a.0, a.1.squeeze_dim(2), b.0, b.1.squeeze_dim(2));
    (out, lse.unsqueeze_dim(2))
}
