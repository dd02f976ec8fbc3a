use std::ops::Range;

use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::backend::{AttentionSpec, BackendKeyLists, VerticalSlashAttentionBackend};
use crate::independent::map_independent;
use crate::reference::{IntoFlex, device_i32, host, softmax_values, tensor};

impl VerticalSlashAttentionBackend for Flex {
    fn vertical_slash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        q_bounds: IntTensor<Self>,
        kv_bounds: IntTensor<Self>,
        lists: BackendKeyLists<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let lists = KeyLists::new(lists, spec.block_size_n);
        let qkv = [tensor(q), tensor(k), tensor(v)];
        vertical_slash_attention(qkv, tensor(q_bounds), tensor(kv_bounds), &lists, &spec).into_flex()
    }
}

/// The keys of each block row, on the host.
struct KeyLists {
    blocks: (Vec<i32>, Vec<i32>),
    columns: (Vec<i32>, Vec<i32>),
    /// H, rows, and the capacities of the lists.
    heads: usize,
    rows: usize,
    max_blocks: usize,
    max_columns: usize,
    block_size_n: usize,
}

impl KeyLists {
    fn new(lists: BackendKeyLists<Flex>, block_size_n: usize) -> Self {
        let BackendKeyLists { block_count, block_offset, column_count, column_index } = lists;
        let [block_offset, column_index]: [Tensor<4, Int>; 2] = [tensor(block_offset), tensor(column_index)];
        let ([_, heads, rows, max_blocks], [_, _, _, max_columns]) = (block_offset.dims(), column_index.dims());
        let blocks = (host::<3>(tensor(block_count)), host(block_offset));
        let columns = (host::<3>(tensor(column_count)), host(column_index));
        Self { blocks, columns, heads, rows, max_blocks, max_columns, block_size_n }
    }

    /// The keys of a block row that a sequence of `kv_len` keys has.
    fn keys(&self, b: usize, head: usize, row: usize, kv_len: usize) -> Vec<i32> {
        let at = (b * self.heads + head) * self.rows + row;
        let used = |(counts, values): &(Vec<i32>, Vec<i32>), capacity: usize| {
            let count = (counts[at].max(0) as usize).min(capacity);
            values[at * capacity..][..count].iter().copied().filter(|&key| key >= 0).collect::<Vec<_>>()
        };
        let block = |offset: i32| offset..offset.saturating_add(self.block_size_n as i32);
        let blocks = used(&self.blocks, self.max_blocks).into_iter().flat_map(block);
        let columns = used(&self.columns, self.max_columns).into_iter();
        blocks.chain(columns).filter(|&key| (key as usize) < kv_len).collect()
    }
}

/// The queries of a block row, and the keys that they attend to.
struct Row {
    head: usize,
    /// Rows of q.
    queries: Range<usize>,
    /// The key position of the first query.
    position: i32,
    /// Positions of keys.
    keys: Vec<i32>,
    /// The sequence's first row of k and v.
    first_key: usize,
}

/// out `[Nq, H, dv]` in the dtype of q, lse f32 `[Nq, H]`, of q `[Nq, H, d]`, k `[Nk, G, d]` and v `[Nk, G, dv]`.
fn vertical_slash_attention(
    [q, k, v]: [Tensor<3>; 3],
    q_bounds: Tensor<1, Int>,
    kv_bounds: Tensor<1, Int>,
    index: &KeyLists,
    spec: &AttentionSpec,
) -> (Tensor<3>, Tensor<2>) {
    let ([tokens, heads, key_width], [key_tokens, kv_heads, value_width]) = (q.dims(), v.dims());
    let (dtype, device) = (q.dtype(), q.device());
    let q_spans = spans(q_bounds, spec.strides.map(|[queries, _]| queries), tokens);
    let kv_spans = spans(kv_bounds, spec.strides.map(|[_, keys]| keys), key_tokens);
    let rows = block_rows(&q_spans, &kv_spans, index, spec);

    // Head-major, so that the rows of a head can be selected.
    let by_head = |tensor: Tensor<3>| tensor.swap_dims(0, 1).cast(FloatDType::F32);
    let attention = Attention { q: by_head(q), k: by_head(k), v: by_head(v), group: heads / kv_heads, spec };
    let keys: usize = rows.iter().map(|row| row.keys.len()).sum();
    let work = keys * spec.block_size_m * (key_width + value_width);
    let ends: Vec<(usize, Range<usize>)> = rows.iter().map(|row| (row.head, row.queries.clone())).collect();
    let parts = map_independent(&device, work, rows, |row| attention.attend(&row));

    let mut out = Tensor::<3>::zeros([heads, tokens, value_width], (&device, DType::F32));
    let mut lse = Tensor::<3>::full([heads, tokens, 1], f32::NEG_INFINITY, (&device, DType::F32));
    for ((head, queries), (part_out, part_lse)) in ends.into_iter().zip(parts) {
        // The queries that see nothing are the first ones.
        let rows = queries.end - part_out.dims()[0]..queries.end;
        if rows.is_empty() {
            continue;
        }
        out = out.slice_assign([head..head + 1, rows.clone(), 0..value_width], part_out.unsqueeze());
        lse = lse.slice_assign([head..head + 1, rows, 0..1], part_lse.unsqueeze());
    }
    (out.swap_dims(0, 1).cast(FloatDType::from(dtype)), lse.swap_dims(0, 1).reshape([tokens, heads]))
}

/// The rows of a tensor of `tokens` rows that belong to each sequence.
fn spans(bounds: Tensor<1, Int>, stride: Option<usize>, tokens: usize) -> Vec<Range<usize>> {
    let within = |entry: i32, most: usize| (entry.max(0) as usize).min(most);
    let bounds = host(bounds);
    match stride {
        Some(stride) => {
            let spans = bounds.iter().enumerate();
            spans.map(|(b, &len)| b * stride..b * stride + within(len, stride)).collect()
        }
        None => bounds.windows(2).map(|ends| within(ends[0], tokens)..within(ends[1], tokens)).collect(),
    }
}

fn block_rows(q_spans: &[Range<usize>], kv_spans: &[Range<usize>], index: &KeyLists, spec: &AttentionSpec) -> Vec<Row> {
    let mut rows = Vec::new();
    for (b, (queries, keys)) in q_spans.iter().zip(kv_spans).enumerate() {
        let starts = queries.clone().step_by(spec.block_size_m).take(index.rows);
        for (row, first) in starts.enumerate() {
            let end = (first + spec.block_size_m).min(queries.end);
            let position = (first - queries.start + keys.len()) as i32 - queries.len() as i32;
            rows.extend((0..index.heads).map(|head| {
                let list = index.keys(b, head, row, keys.len());
                Row { head, queries: first..end, position, keys: list, first_key: keys.start }
            }));
        }
    }
    rows
}

/// q, k and v head-major, in f32.
struct Attention<'a> {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    /// Heads of q for each head of k and v.
    group: usize,
    spec: &'a AttentionSpec,
}

impl Attention<'_> {
    /// out `[rows, dv]` and lse `[rows, 1]` of the last queries of a block row: those that see a key.
    fn attend(&self, row: &Row) -> (Tensor<2>, Tensor<2>) {
        let device = self.q.device();
        let count = row.queries.len();
        let unseeing = match row.keys.iter().min() {
            None => count,
            Some(least) if self.spec.causal => ((least - row.position).max(0) as usize).min(count),
            Some(_) => 0,
        };
        if unseeing == count {
            let none = |width: usize| Tensor::<2>::zeros([0, width], (&device, DType::F32));
            return (none(self.v.dims()[2]), none(1));
        }
        let places = row.keys.iter().map(|key| row.first_key as i32 + key).collect();
        let places = device_i32(places, [row.keys.len()], &device);
        let gather = |tensor: &Tensor<3>| {
            let head = tensor.clone().narrow(0, row.head / self.group, 1).squeeze_dim::<2>(0);
            head.select(0, places.clone())
        };
        let first = row.queries.start + unseeing;
        let q = self.q.clone().narrow(0, row.head, 1).squeeze_dim::<2>(0).narrow(0, first, count - unseeing);
        let mut scores = q.matmul(gather(&self.k).transpose()) * self.spec.softmax_scale;
        if self.spec.softcap != 0.0 {
            scores = (scores / self.spec.softcap).tanh() * self.spec.softcap;
        }
        if self.spec.causal {
            scores = hide_future(scores, &row.keys, row.position + unseeing as i32);
        }
        softmax_values(scores, gather(&self.v))
    }
}

/// -inf where the key's position is past the query's; the first of the queries `[rows, keys]` is at `position`.
fn hide_future(scores: Tensor<2>, keys: &[i32], position: i32) -> Tensor<2> {
    let ([rows, columns], device) = (scores.dims(), scores.device());
    let own = device_i32((0..rows as i32).map(|row| position + row).collect(), [rows, 1], &device);
    let keys = device_i32(keys.to_vec(), [1, columns], &device);
    scores.mask_fill(keys.expand([rows, columns]).greater(own.expand([rows, columns])), f32::NEG_INFINITY)
}
