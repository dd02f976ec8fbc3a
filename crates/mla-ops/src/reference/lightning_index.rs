use burn::tensor::activation::relu;
use burn::tensor::{FloatDType, Int, Tensor};

use super::mla_decode::PagedRows;
use super::{QUERY_TILE, SCORES, device_i32, host};
use crate::backend::LightningIndexSpec;
use crate::independent::map_independent;

/// Positions or slots of the best keys, i32 `[B, Sq, k]`.
pub(crate) fn lightning_index(
    q: Tensor<4>,
    keys: PagedRows,
    head_weights: Tensor<3>,
    visible: Tensor<2, Int>,
    spec: &LightningIndexSpec,
) -> Tensor<3, Int> {
    let ([batch, query_len, heads, width], device) = (q.dims(), q.device());
    let visible: Vec<usize> = host(visible).into_iter().map(|keys| keys.max(0) as usize).collect();
    let work = visible.iter().sum::<usize>() * heads * width;
    // Without query tokens there is nothing to slice.
    let sequences = if query_len == 0 { Vec::new() } else { (0..batch).collect() };
    let q = q.cast(FloatDType::F32);
    let indices = map_independent(&device, work, sequences, |sequence| {
        let query = Queries {
            q: q.clone().narrow(0, sequence, 1).reshape([query_len, heads, width]),
            head_weights: head_weights.clone().narrow(0, sequence, 1).reshape([query_len, 1, heads]),
            visible: &visible[sequence * query_len..][..query_len],
        };
        let best = query.best(&keys, sequence, spec);
        best.into_iter().flat_map(|keys_of_token| padded(keys_of_token, &keys, sequence, spec)).collect::<Vec<i32>>()
    });
    device_i32(indices.concat(), [batch, query_len, spec.k], &device)
}

/// The query tokens of one sequence.
struct Queries<'a> {
    /// f32 `[Sq, Hi, di]`.
    q: Tensor<3>,
    /// `[Sq, 1, Hi]`.
    head_weights: Tensor<3>,
    /// `[Sq]`.
    visible: &'a [usize],
}

impl Queries<'_> {
    /// The positions of each token's best keys.
    fn best(&self, keys: &PagedRows, sequence: usize, spec: &LightningIndexSpec) -> Vec<Vec<usize>> {
        let ([query_len, heads, width], device) = (self.q.dims(), self.q.device());
        let longest = self.visible.iter().copied().max().unwrap_or(0);
        if longest <= spec.k {
            return self.visible.iter().map(|&visible| (0..visible).collect()).collect();
        }
        let keys = keys.gather(sequence, 0, longest).transpose();
        let tile = (SCORES / (heads * longest)).clamp(1, QUERY_TILE);
        let tiles = (0..query_len).step_by(tile).collect();
        let best = map_independent(&device, query_len * heads * longest * width, tiles, |first| {
            let tokens = tile.min(query_len - first);
            let scores = self.scores(first, tokens, keys.clone(), spec.scale);
            let rows = scores.chunks_exact(longest).zip(&self.visible[first..]);
            rows.map(|(scores, &visible)| best(&scores[..visible], spec.k)).collect::<Vec<_>>()
        });
        best.concat()
    }

    /// The scores of some tokens with all keys `[di, keys]`, on the host.
    fn scores(&self, first: usize, tokens: usize, keys: Tensor<2>, scale: f32) -> Vec<f32> {
        let ([_, heads, width], [_, count]) = (self.q.dims(), keys.dims());
        let query = self.q.clone().narrow(0, first, tokens).reshape([tokens * heads, width]);
        let products = relu(query.matmul(keys)).reshape([tokens, heads, count]);
        let scores = self.head_weights.clone().narrow(0, first, tokens).matmul(products) * scale;
        scores.try_into_vec_as().expect("computed on the CPU")
    }
}

/// The positions of the `k` greatest scores, ascending; of equal ones the first.
fn best(scores: &[f32], k: usize) -> Vec<usize> {
    let mut positions: Vec<usize> = (0..scores.len()).collect();
    if k < scores.len() {
        // In the total order of floats a negative NaN is the lowest; the sum makes +0 of -0.
        let rank = |&position: &usize| match scores[position] {
            score if score.is_nan() => f32::NAN.copysign(-1.0),
            score => score + 0.0,
        };
        positions.select_nth_unstable_by(k, |a, b| rank(b).total_cmp(&rank(a)).then(a.cmp(b)));
        positions.truncate(k);
        positions.sort_unstable();
    }
    positions
}

/// A row of the result.
fn padded(positions: Vec<usize>, keys: &PagedRows, sequence: usize, spec: &LightningIndexSpec) -> Vec<i32> {
    let name = |position| if spec.slots { keys.slot(sequence, position) } else { position };
    let mut row: Vec<i32> = positions.into_iter().map(|position| name(position) as i32).collect();
    row.resize(spec.k, -1);
    row
}
