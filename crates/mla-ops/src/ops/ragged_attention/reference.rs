use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Bool, DType, FloatDType, Int, Tensor, s};

use super::RaggedAttentionOptions;
use super::backend::RaggedAttentionBackend;
use crate::independent::map_independent;
use crate::ops::merge_state::reference::merge_state;
use crate::reference::{IntoFlex, QUERY_TILE, SCORES, host, softmax_values, tensor};

impl RaggedAttentionBackend for Flex {
    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        options: RaggedAttentionOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        ragged_attention(tensor(q), tensor(k), tensor(v), tensor(cu_seqlens), &options).into_flex()
    }
}

/// out `[N, H, dv]` in the dtype of q, lse f32 `[N, H]`.
fn ragged_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    cu_seqlens: Tensor<1, Int>,
    options: &RaggedAttentionOptions,
) -> (Tensor<3>, Tensor<2>) {
    let [tokens, heads, _] = q.dims();
    let [_, _, value_width] = v.dims();
    let (dtype, device) = (q.dtype(), q.device());
    let no_sequence = |tokens: usize| {
        let out = Tensor::<3>::zeros([tokens, heads, value_width], (&device, dtype));
        (out, Tensor::<2>::full([tokens, heads], f32::NEG_INFINITY, (&device, DType::F32)))
    };
    // Head-major, as the batched matmul wants them.
    let by_head = |tensor: Tensor<3>| tensor.swap_dims(0, 1);
    let q = by_head(q.cast(FloatDType::F32) * options.softmax_scale);
    let (k, v) = (by_head(k.cast(FloatDType::F32)), by_head(v.cast(FloatDType::F32)));

    let mut done = 0;
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    let ends = host(cu_seqlens).into_iter().map(|end| end.clamp(0, tokens as i32) as usize);
    for end in ends.filter(|&end| end > 0) {
        let sequence = Sequence { first: done, end: end.max(done), causal: options.causal };
        for (out, lse) in sequence.attend(&q, &k, &v) {
            outs.push(out.swap_dims(0, 1).cast(FloatDType::from(dtype)));
            lses.push(lse.swap_dims(0, 1).reshape([-1, heads as i32]));
        }
        done = sequence.end;
    }
    if done < tokens || tokens == 0 {
        let (out, lse) = no_sequence(tokens - done);
        outs.push(out);
        lses.push(lse);
    }
    (Tensor::cat(outs, 0), Tensor::cat(lses, 0))
}

/// The tokens `first .. end`.
struct Sequence {
    first: usize,
    end: usize,
    causal: bool,
}

impl Sequence {
    /// out `[H, rows, dv]` and lse `[H, rows, 1]` of each query tile; q, k, v head-major f32.
    fn attend(&self, q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>) -> Vec<(Tensor<3>, Tensor<3>)> {
        let tiles = (self.first..self.end).step_by(QUERY_TILE).collect();
        let len = self.end - self.first;
        let work = len * len / 2 * (q.dims()[0] * (q.dims()[2] + v.dims()[2]));
        map_independent(&q.device(), work, tiles, |q_first| self.attend_tile(q_first, q, k, v))
    }

    /// out `[H, rows, dv]` and lse `[H, rows, 1]` of the query tile from `q_first` on.
    fn attend_tile(&self, q_first: usize, q: &Tensor<3>, k: &Tensor<3>, v: &Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let [heads, ..] = q.dims();
        // Whole query tiles, so that a tile of keys begins no later than the query tile that ends it: every row sees a key.
        let key_tile = (SCORES / (heads * QUERY_TILE) / QUERY_TILE).max(1) * QUERY_TILE;
        let rows = |tensor: &Tensor<3>, from: usize, to: usize| tensor.clone().narrow(1, from, to - from);
        let q_end = (q_first + QUERY_TILE).min(self.end);
        let query = rows(q, q_first, q_end);
        let seen_end = if self.causal { q_end } else { self.end };
        let block = |k_first: usize| {
            let k_end = (k_first + key_tile).min(seen_end);
            let mut scores = query.clone().matmul(rows(k, k_first, k_end).transpose());
            if self.causal && k_end > q_first {
                scores = hide_future(scores, q_first - k_first);
            }
            softmax_values(scores, rows(v, k_first, k_end))
        };
        let mut state = block(self.first);
        for k_first in (self.first..seen_end).step_by(key_tile).skip(1) {
            state = merge_blocks(state, block(k_first));
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

fn merge_blocks(a: (Tensor<3>, Tensor<3>), b: (Tensor<3>, Tensor<3>)) -> (Tensor<3>, Tensor<3>) {
    let (out, lse) = merge_state(a.0, a.1.squeeze_dim(2), b.0, b.1.squeeze_dim(2));
    (out, lse.unsqueeze_dim(2))
}
