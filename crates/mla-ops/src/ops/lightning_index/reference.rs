use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use super::backend::LightningIndexBackend;
use super::{IndexForm, LightningIndexOptions};
use crate::cache::{BackendPool, Pool};
use crate::independent::{map_independent, piece_len};
use crate::reference::rows::{Rows, dot, primitive, row_by_row, values};
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl LightningIndexBackend for Flex {
    fn lightning_index(
        q: FloatTensor<Self>,
        keys: BackendPool<Self>,
        page_table: IntTensor<Self>,
        head_weights: FloatTensor<Self>,
        visible: IntTensor<Self>,
        options: LightningIndexOptions,
    ) -> IntTensor<Self> {
        let (keys, page_table, head_weights) = (keys.pool(), tensor(page_table), tensor(head_weights));
        lightning_index(tensor(q), keys, page_table, head_weights, tensor(visible), &options).into_flex()
    }
}

/// Positions or slots of the best keys, i32 `[B, Sq, k]`. A score is summed in one order whatever else is computed.
fn lightning_index(
    q: Tensor<4>,
    keys: Pool,
    page_table: Tensor<2, Int>,
    head_weights: Tensor<3>,
    visible: Tensor<2, Int>,
    options: &LightningIndexOptions,
) -> Tensor<3, Int> {
    let ([batch, query_len, heads, width], [_, page_size, _], device) = (q.dims(), keys.dims(), q.device());
    let ([_, max_pages], tokens) = (page_table.dims(), batch * query_len);
    let visible: Vec<usize> = host(visible).into_iter().map(|keys| keys.max(0) as usize).collect();
    let page_table = host(page_table);
    let pages = |token: usize| {
        let pages = visible[token].div_ceil(page_size);
        &page_table[token / query_len * max_pages..][..pages]
    };
    let (q, head_weights) = (row_by_row(q), row_by_row(head_weights));
    let dense = keys.dense_rows().cloned().map(primitive);
    let scored = |token: &usize| visible[*token] > options.k;
    let named = (0..tokens).filter(scored).flat_map(|token| pages(token).iter().copied());
    let query = Queries {
        q: values(&q),
        head_weights: values(&head_weights),
        keys: match &dense {
            Some(pool) => Rows::new(pool, page_size, named),
            None => Rows::dequantised(&keys.in_f32(), page_size, named),
        },
        heads,
        width,
        scale: options.scale,
    };

    let mut indices = vec![-1; tokens * options.k];
    let work = (0..tokens).filter(scored).map(|token| visible[token]).sum::<usize>() * heads * width;
    let piece = piece_len(tokens, work);
    let pieces: Vec<_> = indices.chunks_mut(piece * options.k).enumerate().collect();
    map_independent(&device, work, pieces, |(i, rows)| {
        let mut scores = Vec::new();
        for (token, row) in (i * piece..).zip(rows.chunks_exact_mut(options.k)) {
            let pages = pages(token);
            let name = |position: usize| match options.form {
                IndexForm::Slots => pages[position / page_size] as usize * page_size + position % page_size,
                IndexForm::Positions => position,
            };
            if scored(&token) {
                query.score(token, pages, visible[token], &mut scores);
                let best = best(&scores, options.k);
                row.iter_mut().zip(best).for_each(|(index, position)| *index = name(position) as i32);
            } else {
                row.iter_mut().zip(0..visible[token]).for_each(|(index, position)| *index = name(position) as i32);
            }
        }
    });
    device_i32(indices, [batch, query_len, options.k], &device)
}

/// The query tokens, and the keys.
struct Queries<'a> {
    /// `[N, Hi, di]`
    q: &'a [f32],
    /// `[N, Hi]`
    head_weights: &'a [f32],
    /// By pages.
    keys: Rows<'a>,
    heads: usize,
    width: usize,
    scale: f32,
}

impl Queries<'_> {
    /// The scores of a token with the first `visible` keys on these pages.
    fn score(&self, token: usize, pages: &[i32], visible: usize, scores: &mut Vec<f32>) {
        let query = &self.q[token * self.heads * self.width..][..self.heads * self.width];
        let weights = &self.head_weights[token * self.heads..][..self.heads];
        scores.clear();
        let keys = pages.iter().flat_map(|&page| self.keys.group(page).chunks_exact(self.width));
        for key in keys.take(visible) {
            let heads = query.chunks_exact(self.width).zip(weights);
            let share = |(query, weight): (&[f32], &f32)| weight * relu(dot(query, key));
            scores.push(self.scale * heads.map(share).sum::<f32>());
        }
    }
}

/// NaN remains NaN.
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// The positions of the `k` greatest scores, ascending; of equal ones the first.
fn best(scores: &[f32], k: usize) -> impl Iterator<Item = usize> {
    let mut order: Vec<u64> =
        (0..).zip(scores).map(|(position, &score)| u64::from(!rank(score)) << 32 | position).collect();
    order.select_nth_unstable(k);
    order.truncate(k);
    let mut positions: Vec<usize> = order.into_iter().map(|entry| (entry & 0xffff_ffff) as usize).collect();
    positions.sort_unstable();
    positions.into_iter()
}

/// A number in the order of the scores: 0 of NaN, and the same of +0 and -0.
fn rank(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    match () {
        _ if score.is_nan() => 0,
        _ if bits >> 31 == 1 => !bits,
        _ => bits | 1 << 31,
    }
}
