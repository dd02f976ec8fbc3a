//! Attention to listed rows. The lists are short and differ from token to token: loops over the values in memory, where tensor
//! operations would be many small ones.

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{DType, Tensor, TensorData};

use super::backend::{BackendPlan, BackendScope, BackendSecond, BackendSink, SparseMlaBackend};
use super::{SparseMlaArgs, SparseMlaOptions, SparseParts, SparseScope};
use crate::independent::{map_independent, piece_len};
use crate::reference::rows::{LANES, Rows, dot, primitive, row_by_row, values};
use crate::reference::{IntoFlex, host, tensor};

/// Rows that are added to the output together, so that it is loaded and stored less often.
const ROWS: usize = 4;

impl SparseMlaBackend for Flex {
    fn sparse_mla(
        q: FloatTensor<Self>,
        scope: BackendScope<Self>,
        second: BackendSecond<Self>,
        sink: BackendSink<Self>,
        // Each token is computed in one piece.
        _plan: BackendPlan<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let second = second.into_scope();
        let sink = match sink {
            BackendSink::None => None,
            BackendSink::Sink(sink) => Some(tensor(sink)),
        };
        let args = SparseMlaArgs { q: tensor(q), scope: scope.into_scope(), second, sink, plan: None };
        sparse_mla(args, &options).into_flex()
    }

    fn sparse_mla_parts(
        q: FloatTensor<Self>,
        scope: BackendScope<Self>,
        second: BackendSecond<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let scopes = [Some(scope.into_scope()), second.into_scope()].into_iter().flatten().collect();
        let SparseParts { acc, max, row_sum } = sparse_mla_parts(tensor(q), scopes, &options);
        (acc, max, row_sum).into_flex()
    }
}

impl BackendScope<Flex> {
    fn into_scope(self) -> SparseScope {
        match self {
            Self::Whole(rows, indices) => SparseScope { rows: rows.pool(), indices: tensor(indices), lengths: None },
            Self::Lengths(rows, indices, lengths) => {
                SparseScope { rows: rows.pool(), indices: tensor(indices), lengths: Some(tensor(lengths)) }
            }
        }
    }
}

impl BackendSecond<Flex> {
    fn into_scope(self) -> Option<SparseScope> {
        match self {
            Self::None => None,
            Self::Scope(scope) => Some(scope.into_scope()),
        }
    }
}

/// out `[B, Sq, H, Dv]` in the dtype of q, lse f32 `[B, Sq, H]`.
fn sparse_mla(args: SparseMlaArgs, options: &SparseMlaOptions) -> (Tensor<4>, Tensor<3>) {
    let ([batch, query_len, heads, _], dtype, device) = (args.q.dims(), args.q.dtype(), args.q.device());
    let sink: Option<Vec<f32>> = args.sink.map(|sink| sink.try_into_vec_as().expect("computed on the CPU"));
    let scopes = [Some(args.scope), args.second].into_iter().flatten().collect();
    let Parts { acc: mut out, max: mut lse, row_sum } = Parts::new(args.q, scopes, options);
    for (row, out) in out.chunks_exact_mut(options.value_width).enumerate() {
        // Without rows the output is zero already.
        if row_sum[row] == 0.0 {
            continue;
        }
        lse[row] += row_sum[row].ln();
        let sink = sink.as_ref().map_or(f32::NEG_INFINITY, |sink| sink[row % heads]);
        let share = 1.0 / (1.0 + (sink - lse[row]).exp()) / row_sum[row];
        out.iter_mut().for_each(|value| *value *= share);
    }
    let out = TensorData::new(out, [batch, query_len, heads, options.value_width]);
    let lse = TensorData::new(lse, [batch, query_len, heads]);
    (Tensor::from_data(out, (&device, dtype)), Tensor::from_data(lse, (&device, DType::F32)))
}

/// Of all scopes together.
pub(super) fn sparse_mla_parts(q: Tensor<4>, scopes: Vec<SparseScope>, options: &SparseMlaOptions) -> SparseParts {
    let ([batch, query_len, heads, _], device) = (q.dims(), q.device());
    let Parts { acc, max, row_sum } = Parts::new(q, scopes, options);
    let number =
        |numbers| Tensor::from_data(TensorData::new(numbers, [batch, query_len, heads]), (&device, DType::F32));
    let acc = TensorData::new(acc, [batch, query_len, heads, options.value_width]);
    SparseParts { acc: Tensor::from_data(acc, (&device, DType::F32)), max: number(max), row_sum: number(row_sum) }
}

/// [`SparseParts`] on the host.
struct Parts {
    /// `[N, H, Dv]`: the sum of `exp(score - max) * value`.
    acc: Vec<f32>,
    /// `[N, H]`: the largest score; -inf without rows.
    max: Vec<f32>,
    /// `[N, H]`: the sum of `exp(score - max)`.
    row_sum: Vec<f32>,
}

impl Parts {
    /// q `[B, Sq, H, D]` over the rows of all scopes.
    fn new(q: Tensor<4>, scopes: Vec<SparseScope>, options: &SparseMlaOptions) -> Self {
        let ([batch, query_len, heads, width], device) = (q.dims(), q.device());
        let &SparseMlaOptions { value_width, softmax_scale, .. } = options;
        let (tokens, rows) = (batch * query_len, batch * query_len * heads);
        let mut parts =
            Self { acc: vec![0.0; rows * value_width], max: vec![f32::NEG_INFINITY; rows], row_sum: vec![0.0; rows] };
        let entries: usize = scopes.iter().map(|scope| scope.indices.dims()[2]).sum();
        let work = rows * entries * (width + value_width);
        let q = row_by_row(q);
        let pools: Vec<_> = scopes.iter().map(|scope| scope.rows.dense_rows().cloned().map(primitive)).collect();
        let lists = pools.iter().zip(&scopes).map(|(pool, scope)| List::new(pool.as_ref(), scope)).collect();
        let attention = Attention { q: values(&q), lists, heads, width, value_width, softmax_scale };

        let piece = piece_len(tokens, work);
        let accs = parts.acc.chunks_mut(piece * heads * value_width);
        let states = parts.max.chunks_mut(piece * heads).zip(parts.row_sum.chunks_mut(piece * heads));
        let pieces: Vec<_> = accs.zip(states).enumerate().collect();
        map_independent(&device, work, pieces, |(i, (acc, (max, row_sum)))| {
            attention.attend(i * piece, acc, max, row_sum);
        });
        parts
    }
}

/// The rows that each query token sees.
struct List<'a> {
    rows: Rows<'a>,
    /// `[N, K]`; negative for none.
    slots: Vec<i32>,
    /// `[N]`: only so many entries of a list count.
    lengths: Option<Vec<i32>>,
    /// `K`
    most: usize,
}

impl<'a> List<'a> {
    fn new(pool: Option<&'a FloatTensor<Flex>>, scope: &SparseScope) -> Self {
        let [_, _, most] = scope.indices.dims();
        let (slots, lengths) = (host(scope.indices.clone()), scope.lengths.clone().map(host));
        let tokens = 0..slots.len() / most.max(1);
        let named = tokens.flat_map(|token| named(&slots, &lengths, most, token));
        let rows = match pool {
            Some(pool) => Rows::new(pool, 1, named),
            None => Rows::dequantised(&scope.rows, 1, named),
        };
        Self { rows, slots, lengths, most }
    }

    /// The rows `[D]` of a query token.
    fn of_token(&self, token: usize) -> impl Iterator<Item = &[f32]> {
        named(&self.slots, &self.lengths, self.most, token).map(|slot| self.rows.group(slot))
    }
}

/// The slots in the list of a query token.
fn named(slots: &[i32], lengths: &Option<Vec<i32>>, most: usize, token: usize) -> impl Iterator<Item = i32> {
    let length = lengths.as_ref().map_or(most, |lengths| lengths[token] as usize);
    slots[token * most..][..length].iter().copied().filter(|&slot| slot >= 0)
}

/// Queries and what they see.
struct Attention<'a> {
    /// `[N, H, D]`
    q: &'a [f32],
    lists: Vec<List<'a>>,
    heads: usize,
    width: usize,
    value_width: usize,
    softmax_scale: f32,
}

impl Attention<'_> {
    /// The parts of some query tokens, from `first` on.
    fn attend(&self, first: usize, acc: &mut [f32], max: &mut [f32], row_sum: &mut [f32]) {
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        let states = max.chunks_exact_mut(self.heads).zip(row_sum.chunks_exact_mut(self.heads));
        let accs = acc.chunks_exact_mut(self.heads * self.value_width);
        for (token, (acc, (max, row_sum))) in (first..).zip(accs.zip(states)) {
            rows.clear();
            rows.extend(self.lists.iter().flat_map(|list| list.of_token(token)));
            self.scores(token, &rows, &mut weights);
            for (head, (max, row_sum)) in max.iter_mut().zip(row_sum).enumerate() {
                let weights = &mut weights[head * rows.len()..][..rows.len()];
                *max = largest(weights);
                weights.iter_mut().for_each(|weight| *weight = (*weight - *max).exp());
                *row_sum = weights.iter().sum();
            }
            self.add_values(&rows, &weights, acc);
        }
    }

    /// The scores `[H, rows]` of a query token. A row is read once for all heads.
    fn scores(&self, token: usize, rows: &[&[f32]], scores: &mut Vec<f32>) {
        let queries = &self.q[token * self.heads * self.width..][..self.heads * self.width];
        scores.resize(self.heads * rows.len(), 0.0);
        for (i, row) in rows.iter().enumerate() {
            for (head, query) in queries.chunks_exact(self.width).enumerate() {
                scores[head * rows.len() + i] = self.softmax_scale * dot(query, row);
            }
        }
    }

    /// Adds the values of the rows, times their weights `[H, rows]`, to acc `[H, Dv]`. Again a row is read once.
    fn add_values(&self, rows: &[&[f32]], weights: &[f32], acc: &mut [f32]) {
        for (i, some) in rows.chunks(ROWS).enumerate() {
            for (head, acc) in acc.chunks_exact_mut(self.value_width).enumerate() {
                add_weighted(acc, some, &weights[head * rows.len() + i * ROWS..][..some.len()]);
            }
        }
    }
}

/// The largest number, -inf of none.
fn largest(numbers: &[f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    rest.iter().chain(&most).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Adds the first channels of [`ROWS`] rows at most, each row times its weight.
fn add_weighted(acc: &mut [f32], rows: &[&[f32]], weights: &[f32]) {
    if let (&[a, b, c, d], &[wa, wb, wc, wd]) = (rows, weights) {
        let [a, b, c, d] = [a, b, c, d].map(|row| &row[..acc.len()]);
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc += (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
        }
        return;
    }
    for (row, weight) in rows.iter().zip(weights) {
        acc.iter_mut().zip(*row).for_each(|(acc, value)| *acc += weight * value);
    }
}
