//! `vertical_slash_attention` with as many columns and diagonals as the heads of MInference have, and the heads of Llama-3-8B, which
//! are a row of `ragged.rs`, too.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use burn_mla::ops::{
    RaggedAttentionArgs, RaggedAttentionOptions, VerticalSlashAttentionArgs, VerticalSlashAttentionOptions,
    VerticalSlashIndex, VerticalSlashIndexArgs, VerticalSlashIndexOptions, explain_path, ragged_attention,
    vertical_slash_attention, vertical_slash_index,
};
use rand::seq::index::sample;
use serde_json::{Value, json};

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};

/// Queries of a block row, and keys of a key block.
const BLOCK: usize = 64;
/// Neighbouring diagonals: those of a head lie in bands about tokens that matter, the first of them the queries' own.
const RUN: usize = 64;
/// Columns and diagonals of a head: MInference's default, and a sparser pair of those that it searches.
const DENSITIES: [[usize; 2]; 2] = [[1000, 6096], [500, 700]];

/// One sequence, each head of which has its own columns and diagonals.
#[derive(Debug, Clone, Copy)]
struct Shape {
    len: usize,
    heads: usize,
    kv_heads: usize,
    width: usize,
    vertical: usize,
    slash: usize,
}

/// The section.
pub fn run(bench: &mut Bench) {
    let lens = [16_384, 65_536, 131_072];
    let full = DENSITIES
        .map(|[vertical, slash]| lens.map(|len| Shape { len, heads: 32, kv_heads: 8, width: 128, vertical, slash }));
    let smoke = [Shape { len: 300, heads: 4, kv_heads: 2, width: 64, vertical: 5, slash: 70 }];
    for shape in bench.pick(&full.concat(), 2, &smoke) {
        bench.case(&format!("vertical_slash_attention {shape:?}"), |bench| case(bench, shape));
    }
}

impl Shape {
    fn index_args(&self, bench: &Bench) -> VerticalSlashIndexArgs {
        let &Self { len, heads, vertical, slash, .. } = self;
        let (mut rng, runs, device) = (data::rng(7), slash.div_ceil(RUN), &bench.device);
        let (mut columns, mut diagonals) = (Vec::new(), Vec::new());
        for _ in 0..heads {
            columns.extend(sample(&mut rng, len, vertical).into_iter().map(|key| key as i32));
            let others = sample(&mut rng, len / RUN - 1, runs - 1).into_iter().map(|run| (run + 1) * RUN);
            let firsts = std::iter::once(0).chain(others);
            diagonals.extend(firsts.flat_map(|first| first..first + RUN).take(slash).map(|diagonal| diagonal as i32));
        }
        VerticalSlashIndexArgs {
            q_lens: data::ints(vec![len as i32], [1], device),
            kv_lens: data::ints(vec![len as i32], [1], device),
            vertical: data::ints(columns, [1, heads, vertical], device),
            slash: data::ints(diagonals, [1, heads, slash], device),
            vertical_counts: None,
            slash_counts: None,
        }
    }

    fn args(&self, bench: &Bench, index: VerticalSlashIndex) -> VerticalSlashAttentionArgs {
        let &Self { len, heads, kv_heads, width, .. } = self;
        let rows = |heads| data::normal([1, len, heads, width], bench.dtype, &bench.device);
        let lens = data::ints(vec![len as i32], [1], &bench.device);
        let (q, k, v) = (rows(heads), rows(kv_heads), rows(kv_heads));
        VerticalSlashAttentionArgs { q, k, v, q_lens: lens.clone(), kv_lens: lens, index }
    }

    /// The queries of a block row.
    fn queries(&self, row: usize) -> Range<usize> {
        row * BLOCK..self.len.min((row + 1) * BLOCK)
    }

    fn volume(&self, bench: &Bench, pairs: usize) -> Volume {
        let elements = 2 * self.len * (self.heads + self.kv_heads) * self.width;
        let bytes = elements * bench.dtype.size();
        Volume { flops: Some(4.0 * pairs as f64 * self.width as f64), bytes: Some(bytes as f64) }
    }

    fn fields(&self) -> [(&'static str, Value); 6] {
        [
            ("s_q", json!(self.len)),
            ("h_q", json!(self.heads)),
            ("h_kv", json!(self.kv_heads)),
            ("d", json!(self.width)),
            ("vertical", json!(self.vertical)),
            ("slash", json!(self.slash)),
        ]
    }
}

fn case(bench: &mut Bench, shape: Shape) -> Result<(), String> {
    let index_args = shape.index_args(bench);
    let index_options =
        VerticalSlashIndexOptions { max_query_len: shape.len, block_size_m: BLOCK, block_size_n: BLOCK, causal: true };
    let call_index = || vertical_slash_index(index_args.clone(), &index_options).map_err(|error| error.to_string());
    let index = call_index()?;
    let (mut seen, mut of_last) = (0, Vec::new());
    for head in 0..shape.heads {
        let rows = key_lists(&index, head)?;
        let of_row = |(row, keys): (usize, &Vec<Range<usize>>)| -> usize {
            let queries = shape.queries(row);
            keys.iter().map(|keys| pairs(keys, &queries)).sum()
        };
        seen += rows.iter().enumerate().map(of_row).sum::<usize>();
        of_last.push(rows.into_iter().next_back().unwrap_or_default());
    }
    let args = shape.args(bench, index);
    let path = explain_path(&args.problem(), &bench.device).path.to_string();
    let softmax_scale = (shape.width as f32).powf(-0.5);
    let options = VerticalSlashAttentionOptions { softmax_scale, softcap: None, causal: true };
    let call = || vertical_slash_attention(args.clone(), &options).map_err(|error| error.to_string());
    let (out, lse) = call()?;
    let difference = check(bench, &args, softmax_scale, &of_last, (out, lse))?;
    let times = bench.timer.measure(call)?;
    let dense = bench.timer.measure(ragged(bench, &args, softmax_scale))?;

    let square = shape.heads * shape.len * (shape.len + 1) / 2;
    let extra = [
        ("path", json!(path)),
        ("of_square", rounded(seen as f64 / square as f64, 4)),
        ("ragged_us", rounded(dense.us, 3)),
        ("rel_rms", rounded(difference, 8)),
    ];
    let volume = shape.volume(bench, seen);
    bench.report.row("vertical_slash_attention", &shape.fields(), &times, volume, &extra);
    let times = bench.timer.measure(call_index)?;
    bench.report.row("vertical_slash_index", &shape.fields(), &times, Volume { flops: None, bytes: None }, &[]);
    Ok(())
}

/// All keys of the same queries.
fn ragged(
    bench: &Bench,
    args: &VerticalSlashAttentionArgs,
    softmax_scale: f32,
) -> impl FnMut() -> Result<(Tensor<3>, Tensor<2>), String> + Send + use<> {
    let [q, k, v] = [&args.q, &args.k, &args.v].map(|rows| rows.clone().squeeze_dim::<3>(0));
    let cu_seqlens = data::ints(vec![0, q.dims()[0] as i32], [2], &bench.device);
    let args = RaggedAttentionArgs { q, k, k_pe: None, v, cu_seqlens, cu_seqlens_k: None };
    let options = RaggedAttentionOptions { softmax_scale, softcap: None, causal: true, window: None };
    move || ragged_attention(args.clone(), &options).map_err(|error| error.to_string())
}

/// The keys that each block row of a head lists. Some may be past what a query sees.
fn key_lists(index: &VerticalSlashIndex, head: usize) -> Result<Vec<Vec<Range<usize>>>, String> {
    let read = |counts: &Tensor<3, Int>, lists: &Tensor<4, Int>, len: usize| -> Result<Vec<_>, String> {
        let [_, _, rows] = counts.dims();
        let counts = data::read_ints(counts.clone().slice([0..1, head..head + 1, 0..rows]))?;
        // Of as many as the longest list has: there is room for far more.
        let most = counts.iter().copied().max().unwrap_or(0).max(1) as usize;
        let lists = data::read_ints(lists.clone().slice([0..1, head..head + 1, 0..rows, 0..most]))?;
        let range = move |&first: &i32| first as usize..first as usize + len;
        let rows = lists.chunks_exact(most).zip(counts);
        Ok(rows.map(|(list, count)| list[..count as usize].iter().map(range).collect::<Vec<_>>()).collect())
    };
    let mut rows = read(&index.block_count, &index.block_offset, index.block_size_n)?;
    let columns = read(&index.column_count, &index.column_index, 1)?;
    rows.iter_mut().zip(columns).for_each(|(row, columns)| row.extend(columns));
    Ok(rows)
}

/// Pairs of one of the queries and a key that it sees: none behind its own position.
fn pairs(keys: &Range<usize>, queries: &Range<usize>) -> usize {
    let before = keys.end.min(queries.start).saturating_sub(keys.start) * queries.len();
    let beside = keys.start.max(queries.start)..keys.end.min(queries.end);
    before + beside.map(|key| queries.end - key).sum::<usize>()
}

/// The last query, in the first and the last head. `lists` are the keys of its block row, of each head.
fn check(
    bench: &Bench,
    args: &VerticalSlashAttentionArgs,
    scale: f32,
    lists: &[Vec<Range<usize>>],
    (out, lse): (Tensor<4>, Tensor<3>),
) -> Result<f64, String> {
    let ([_, len, heads, width], kv_heads) = (args.q.dims(), args.k.dims()[2]);
    let mut difference = data::Difference::default();
    for h in [0, heads - 1] {
        let of_head = |tensor: &Tensor<4>, h: usize, first: usize| {
            data::floats(tensor.clone().slice([0..1, first..len, h..h + 1, 0..width]))
        };
        let kv_head = h / (heads / kv_heads);
        let keys = lists[h].iter().flat_map(|keys| keys.start..keys.end.min(len));
        let keys: Vec<usize> = keys.collect();
        let seen = |rows: Vec<f32>| -> Vec<f32> {
            keys.iter().flat_map(|&key| rows[key * width..][..width].iter().copied()).collect()
        };
        let (k, v) = (seen(of_head(&args.k, kv_head, 0)?), seen(of_head(&args.v, kv_head, 0)?));
        let rows = data::Rows { keys: &k, values: &v, stride: width, width };
        let expected = data::attend(&of_head(&args.q, h, len - 1)?, &rows, f64::from(scale));
        let lse = data::floats(lse.clone().slice([0..1, len - 1..len, h..h + 1]))?;
        difference.add(&of_head(&out, h, len - 1)?, lse[0], &expected);
    }
    difference.check(bench.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_that_a_query_sees() {
        for (first, end) in [(0, 4), (0, 9), (3, 7), (5, 6), (5, 12), (8, 9), (9, 12)] {
            for queries in [0..3, 4..8, 5..6] {
                let seen = queries.clone().flat_map(|query| (first..end).filter(move |&key| key <= query)).count();
                assert_eq!(pairs(&(first..end), &queries), seen, "keys {first}..{end}, queries {queries:?}");
            }
        }
    }
}
