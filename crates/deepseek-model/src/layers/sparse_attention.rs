//! Attention of a sequence to listed rows, and the choice of the rows, in tensor operations.

use burn::tensor::{Bool, DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData, activation};
use mla_ops::matmul;

use crate::{ModelError, Result};

/// Rows that are keys and values at once, and which of them each query sees.
#[derive(Debug, Clone)]
pub(super) struct Scope {
    /// `[M, d]`.
    pub(super) rows: Tensor<2>,
    /// i32 `[n, K]`: row numbers, each at most once; -1 is none.
    pub(super) indices: Tensor<2, Int>,
}

/// q `[n, H, d]` over the rows of all scopes, with a sink f32 `[H]` that takes its share and gives nothing:
/// `[n, H, d]`. The softmax is in f32.
pub(super) fn sparse_attention(q: Tensor<3>, scopes: Vec<Scope>, sink: &Tensor<1>, scale: f32) -> Tensor<3> {
    let dtype = FloatDType::from(q.dtype());
    let [tokens, heads, width] = q.dims();
    let q = q.reshape([tokens * heads, width]);
    let mut logits = Vec::new();
    let mut rows = Vec::new();
    for scope in scopes {
        let [count, _] = scope.rows.dims();
        let scores = matmul(q.clone(), scope.rows.clone().transpose()).cast(FloatDType::F32) * scale;
        let hidden = seen(&scope.indices, count).bool_not().unsqueeze_dim::<3>(1).expand([tokens, heads, count]);
        logits.push(scores.reshape([tokens, heads, count]).mask_fill(hidden, f32::NEG_INFINITY));
        rows.push(scope.rows);
    }
    let rows = Tensor::cat(rows, 0);
    let [count, _] = rows.dims();
    logits.push(sink.clone().reshape([1, heads, 1]).expand([tokens, heads, 1]));
    let shares = activation::softmax(Tensor::cat(logits, 2), 2).narrow(2, 0, count);
    matmul(shares.cast(dtype).reshape([tokens * heads, count]), rows).reshape([tokens, heads, width])
}

/// i32 `[n, K]` -> bool `[n, count]`: which rows are listed.
fn seen(indices: &Tensor<2, Int>, count: usize) -> Tensor<2, Bool> {
    let [tokens, listed] = indices.dims();
    // "None" goes into a column of its own, which is cut off.
    let indices = indices.clone().mask_fill(indices.clone().lower_elem(0), count as i32);
    let options = (&indices.device(), DType::F32);
    let times = Tensor::<2>::zeros([tokens, count + 1], options).scatter(
        1,
        indices,
        Tensor::ones([tokens, listed], options),
        IndexingUpdateOp::Add,
    );
    times.narrow(1, 0, count).greater_elem(0.5)
}

/// The lightning indexer's choice: i32 `[n, k]`, the best `k` keys of each query in ascending order, then -1.
///
/// q `[n, Hi, di]`, keys `[T, di]`, head weights f32 `[n, Hi]`; query `i` sees the keys `0..visible[i]`. A key scores
/// `scale · Σ_h weight_h · relu(q_h · key)` in f32; of equal ones the earlier counts as better.
pub(super) fn best_keys(
    q: Tensor<3>,
    keys: Tensor<2>,
    head_weights: Tensor<2>,
    visible: &[usize],
    k: usize,
    scale: f32,
) -> Result<Tensor<2, Int>> {
    let [tokens, heads, width] = q.dims();
    let [count, _] = keys.dims();
    let device = q.device();
    let q = q.reshape([tokens * heads, width]).cast(FloatDType::F32);
    let dots = matmul(q, keys.cast(FloatDType::F32).transpose()).reshape([tokens, heads, count]);
    let scores = (activation::relu(dots) * head_weights.unsqueeze_dim::<3>(2)).sum_dim(1) * scale;
    let scores = scores.reshape([tokens * count]).try_into_vec_as::<f32>().map_err(ModelError::device)?;
    let rows = scores.chunks_exact(count).zip(visible).map(|(scores, &visible)| best_of(&scores[..visible], k));
    Ok(index_rows(rows, k, &device))
}

/// Positions of the best `k` scores, ascending.
fn best_of(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(k);
    order.sort_unstable();
    order
}

/// Lists of row numbers as i32 `[n, k]`, each filled up with -1.
pub(crate) fn index_rows(
    rows: impl Iterator<Item = impl IntoIterator<Item = usize>>,
    k: usize,
    device: &Device,
) -> Tensor<2, Int> {
    let mut values = Vec::new();
    let mut count = 0;
    for row in rows {
        count += 1;
        values.extend(row.into_iter().map(|index| index as i32));
        values.resize(count * k, -1);
    }
    Tensor::from_data(TensorData::new(values, [count, k]), (device, DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| f64::from(((i as f64 * 0.7368 + seed).sin() * 3.1).sin() as f32)).collect()
    }

    fn tensor<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
        let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    fn list(rows: &[&[i32]]) -> Tensor<2, Int> {
        let values = rows.concat();
        Tensor::from_data(TensorData::new(values, [rows.len(), rows[0].len()]), (&Device::flex(), DType::I32))
    }

    #[test]
    fn attention_is_that_of_plain_loops() {
        let (tokens, heads, width) = (3, 2, 5);
        let (q, sink) = (values(tokens * heads * width, 0.1), values(heads, 5.0));
        let rows = [values(4 * width, 1.0), values(2 * width, 2.0)];
        // The middle token sees nothing but the sink; -1 stands anywhere.
        let lists: [[&[i32]; 3]; 2] = [[&[3, -1, 0], &[-1, -1, -1], &[0, 1, 2]], [&[-1, 1], &[-1, -1], &[-1, -1]]];
        let scopes = [4, 2].into_iter().zip(&rows).zip(&lists);
        let scopes = scopes.map(|((n, rows), lists)| Scope { rows: tensor(rows, [n, width]), indices: list(lists) });
        let out = sparse_attention(tensor(&q, [tokens, heads, width]), scopes.collect(), &tensor(&sink, [heads]), 0.7);
        let out = out.into_data().try_to_vec::<f32>().unwrap();
        for token in 0..tokens {
            for (head, sink) in sink.iter().enumerate() {
                let at = (token * heads + head) * width;
                let listed = lists.iter().zip(&rows).flat_map(|(lists, rows)| {
                    lists[token].iter().filter(|&&i| i >= 0).map(move |&i| &rows[i as usize * width..][..width])
                });
                let keys: Vec<&[f64]> = listed.collect();
                let share = |key: &&[f64]| (0.7 * (0..width).map(|c| q[at + c] * key[c]).sum::<f64>()).exp();
                let total = keys.iter().map(share).sum::<f64>() + sink.exp();
                for c in 0..width {
                    let expected: f64 = keys.iter().map(|key| share(key) / total * key[c]).sum();
                    assert!((f64::from(out[at + c]) - expected).abs() < 1e-6, "{} is not {expected}", out[at + c]);
                }
            }
        }
    }

    #[test]
    fn the_best_keys_come_in_ascending_order_and_ties_go_to_the_earlier() {
        // One channel and one head: the score is weight * relu(q * key).
        let keys = tensor(&[1.0, 3.0, 2.0, 3.0, -5.0, 2.0], [6, 1]);
        let weights = tensor(&[1.0, -1.0, 1.0, 1.0], [4, 1]);
        let q = tensor(&[1.0; 4], [4, 1, 1]);
        let chosen = best_keys(q, keys, weights, &[6, 6, 2, 0], 3, 1.0).unwrap();
        let chosen = chosen.into_data().try_to_vec::<i32>().unwrap();
        // By weight -1: key 4 scores 0, then key 0, then the earlier of the equal keys 2 and 5.
        assert_eq!(chosen, [1, 2, 3, 0, 2, 4, 0, 1, -1, -1, -1, -1]);
    }
}
