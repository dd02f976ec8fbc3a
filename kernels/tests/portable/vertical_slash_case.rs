//! Sequences with lists of keys, what their attention is by the definition, and the comparison of all kernels with it.

use cubecl::prelude::*;
use cubecl::server::Handle;
use mla_kernels::vertical_slash_attention::{
    AttentionArgs, Layout, VerticalSlashError, VerticalSlashOptions, VerticalSlashSizes, available, launch,
};
use mla_kernels::{DeviceError, Path};

use crate::ragged_attention::{Host, assert_close};
use crate::support::{arg, for_each_client, random, read, skip, upload};

/// What an output holds that was not written.
const UNWRITTEN: f32 = 77.0;

/// Sequences, and rows that belong to none.
pub struct Case<E> {
    pub q: Vec<E>,
    pub k: Vec<E>,
    pub v: Vec<E>,
    lengths: Vec<(usize, usize)>,
    layout: Layout,
    /// Rows of queries and of keys that belong to none: behind each sequence, or behind all where they are packed.
    spare: [usize; 2],
    heads: [usize; 2],
    widths: [usize; 2],
    /// M and N.
    pub block_size: [usize; 2],
    rows: usize,
    /// The keys of each block row, `[B, H, rows]`: first keys of blocks, and columns.
    pub lists: Vec<[Vec<i32>; 2]>,
    pub softcap: f32,
    causal: bool,
    /// Bounds and counts are given as values that are out of range, where there are any that stand for the same.
    pub out_of_range: bool,
}

impl<E: Host> Case<E> {
    pub fn new(lengths: &[(usize, usize)], heads: [usize; 2], widths: [usize; 2], packed: bool, causal: bool) -> Self {
        Self::with_spare(lengths, heads, widths, packed, causal, if packed { [2, 1] } else { [1, 2] })
    }

    /// With so many rows of queries and of keys that belong to no sequence.
    pub fn with_spare(
        lengths: &[(usize, usize)],
        heads: [usize; 2],
        widths: [usize; 2],
        packed: bool,
        causal: bool,
        spare: [usize; 2],
    ) -> Self {
        let longest = |len: fn(&(usize, usize)) -> usize| lengths.iter().map(len).max().unwrap_or(0);
        let (query_stride, key_stride) = (longest(|it| it.0) + spare[0], longest(|it| it.1) + spare[1]);
        let layout = if packed { Layout::Packed } else { Layout::Padded { query_stride, key_stride } };
        let block_size = [64, 64];
        let mut case = Self {
            q: vec![],
            k: vec![],
            v: vec![],
            lengths: lengths.to_vec(),
            layout,
            spare,
            heads,
            widths,
            block_size,
            rows: 0,
            lists: vec![],
            softcap: 0.0,
            causal,
            out_of_range: false,
        };
        case.make_lists();
        let values = |seed: u32, spans: Vec<(usize, usize)>, rows: usize, width: usize, factor: f32| {
            let numbers = random(seed, rows * width);
            let held = |row: usize| spans.iter().any(|&(first, len)| (first..first + len).contains(&row));
            let number = |i: usize| if held(i / width) { numbers[i] * factor } else { f32::NAN };
            (0..rows * width).map(|i| E::from_f32(number(i))).collect::<Vec<E>>()
        };
        let [queries, keys] = case.tokens();
        let (q_spans, kv_spans): (Vec<_>, Vec<_>) = (0..lengths.len()).map(|b| case.spans(b)).unzip();
        case.q = values(1, q_spans, queries, heads[0] * widths[0], 4.0);
        case.k = values(2, kv_spans.clone(), keys, heads[1] * widths[0], 1.0);
        case.v = values(3, kv_spans, keys, heads[1] * widths[1], 1.0);
        case
    }

    /// Random blocks and columns, ascending and disjoint, some past the end of the keys.
    pub fn make_lists(&mut self) {
        let longest = self.lengths.iter().map(|it| it.0).max().unwrap_or(0);
        self.make_lists_of(longest.div_ceil(self.block_size[0]));
    }

    /// The same for so many block rows, which may be more or fewer than there are queries for.
    pub fn make_lists_of(&mut self, rows: usize) {
        let n = self.block_size[1];
        self.rows = rows;
        self.lists = (0..self.lengths.len() * self.heads[0] * self.rows)
            .map(|at| {
                let (mut offsets, mut columns, mut key) = (vec![], vec![], 0);
                for draw in random(90 + at as u32, 8) {
                    if draw > 0.2 {
                        offsets.push(key);
                        key += n as i32;
                    } else if draw > -0.5 {
                        columns.push(key);
                        key += 1;
                    }
                    key += (draw.abs() * 30.0) as i32;
                }
                [offsets, columns]
            })
            .collect();
    }

    /// First row and length of a sequence's queries and keys.
    fn spans(&self, b: usize) -> ((usize, usize), (usize, usize)) {
        let (q_len, kv_len) = self.lengths[b];
        match self.layout {
            Layout::Padded { query_stride, key_stride } => ((b * query_stride, q_len), (b * key_stride, kv_len)),
            Layout::Packed => {
                let before = &self.lengths[..b];
                let sum = |len: fn(&(usize, usize)) -> usize| before.iter().map(len).sum();
                ((sum(|it| it.0), q_len), (sum(|it| it.1), kv_len))
            }
        }
    }

    /// Rows of q, and of k and v.
    fn tokens(&self) -> [usize; 2] {
        match self.layout {
            Layout::Padded { query_stride, key_stride } => {
                [self.lengths.len() * query_stride, self.lengths.len() * key_stride]
            }
            Layout::Packed => [
                self.lengths.iter().map(|it| it.0).sum::<usize>() + self.spare[0],
                self.lengths.iter().map(|it| it.1).sum::<usize>() + self.spare[1],
            ],
        }
    }

    /// Counts and values of blocks or columns, with tails that must not be read. Out of range, the longest list has no tail.
    fn list(&self, i: usize) -> (Vec<i32>, Vec<i32>, usize) {
        let longest = self.lists.iter().map(|lists| lists[i].len()).max().unwrap_or(0);
        let capacity = longest + usize::from(!self.out_of_range);
        let count = |lists: &[Vec<i32>; 2]| match lists[i].len() {
            0 if self.out_of_range => -3,
            count if count == capacity => count as i32 + 2,
            count => count as i32,
        };
        let counts = self.lists.iter().map(count).chain([capacity as i32]).collect();
        let padded = |lists: &[Vec<i32>; 2]| {
            let mut list = lists[i].clone();
            list.resize(capacity, 0);
            list
        };
        (counts, self.lists.iter().flat_map(padded).collect(), capacity)
    }

    /// The bounds of the queries or the keys, and one more that must not be read.
    fn bounds(&self, i: usize) -> Vec<i32> {
        let lengths = self.lengths.iter().map(|it| [it.0, it.1][i] as i32);
        let tokens = self.tokens()[i] as i32;
        let (mut bounds, tail) = match self.layout {
            Layout::Padded { query_stride, key_stride } => {
                let stride = [query_stride, key_stride][i] as i32;
                let bound = |len: i32| match len {
                    0 if self.out_of_range => -3,
                    len if self.out_of_range && len == stride => len + 7,
                    len => len,
                };
                (lengths.map(bound).collect(), stride)
            }
            Layout::Packed => {
                let ends = lengths.scan(0, |end, len| {
                    *end += len;
                    Some(*end)
                });
                let mut bounds: Vec<i32> = std::iter::once(0).chain(ends).collect();
                if self.out_of_range {
                    // Without a row the first sequence may end before it begins, and so may the last one.
                    match &mut bounds[..] {
                        [first @ 0, second @ 0, ..] => (*first, *second) = (40, -5),
                        [first, ..] => *first = -5,
                        [] => {}
                    }
                    match &mut bounds[..] {
                        [.., before, last] if *before == tokens => (*before, *last) = (tokens + 9, 3),
                        [.., last] => *last = tokens + 9,
                        [] => {}
                    }
                }
                (bounds, tokens)
            }
        };
        bounds.push(tail);
        bounds
    }

    fn sizes(&self) -> VerticalSlashSizes {
        let [query_tokens, key_tokens] = self.tokens();
        VerticalSlashSizes {
            layout: self.layout,
            batch: self.lengths.len(),
            query_tokens,
            key_tokens,
            heads: self.heads[0],
            kv_heads: self.heads[1],
            key_width: self.widths[0],
            value_width: self.widths[1],
            rows: self.rows,
            max_blocks: self.list(0).2,
            max_columns: self.list(1).2,
            block_size_m: self.block_size[0],
            block_size_n: self.block_size[1],
            elem: E::elem_type_native(),
        }
    }

    /// Arguments, and the buffers of out and lse.
    pub fn args(&self, client: &Client) -> (AttentionArgs, [Handle; 2]) {
        let buffer = |values: &[E]| arg(&upload(client, values), values.len());
        let ints = |values: &[i32]| arg(&upload(client, values), values.len());
        let rows = self.tokens()[0] * self.heads[0];
        let out = upload(client, &vec![E::from_f32(UNWRITTEN); rows * self.widths[1]]);
        let lse = upload(client, &vec![UNWRITTEN; rows]);
        let ((block_count, block_offset, _), (column_count, column_index, _)) = (self.list(0), self.list(1));
        let args = AttentionArgs {
            q: buffer(&self.q),
            k: buffer(&self.k),
            v: buffer(&self.v),
            q_bounds: ints(&self.bounds(0)),
            kv_bounds: ints(&self.bounds(1)),
            block_count: ints(&block_count),
            block_offset: ints(&block_offset),
            column_count: ints(&column_count),
            column_index: ints(&column_index),
            out: arg(&out, rows * self.widths[1]),
            lse: arg(&lse, rows),
            sizes: self.sizes(),
            options: VerticalSlashOptions { softmax_scale: self.scale(), softcap: self.softcap, causal: self.causal },
        };
        (args, [out, lse])
    }

    fn run(&self, client: &Client, path: Path) -> Result<(Vec<f64>, Vec<f64>), VerticalSlashError> {
        let (args, [out, lse]) = self.args(client);
        launch(client, args, path)?;
        let out = read::<E>(client, out).into_iter().map(E::to_f64).collect();
        let lse = read::<f32>(client, lse).into_iter().map(f64::from).collect();
        Ok((out, lse))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.widths[0] as f32).sqrt()
    }

    /// The keys of a row as positions, none past the last row.
    fn keys(&self, b: usize, head: usize, row: usize) -> Vec<usize> {
        if row >= self.rows {
            return vec![];
        }
        let [offsets, columns] = &self.lists[(b * self.heads[0] + head) * self.rows + row];
        let blocks = offsets
            .iter()
            .filter(|&&offset| offset >= 0)
            .flat_map(|offset| *offset..offset + self.block_size[1] as i32);
        let keys = blocks.chain(columns.iter().copied()).map(|key| key as usize);
        keys.filter(|&key| key < self.lengths[b].1).collect()
    }

    /// Makes NaN of the rows of keys that none of the lists names. The first key becomes one of them, which is what a place without a
    /// key might be taken for.
    pub fn poison_what_is_not_named(&mut self) {
        self.lists.iter_mut().flatten().for_each(|list| list.retain(|&key| key > 0));
        self.poison();
    }

    /// The same, whatever becomes of the first key.
    pub fn poison(&mut self) {
        let ([heads, kv_heads], [width, value_width], mut poisoned) = (self.heads, self.widths, 0);
        for (b, kv_head) in (0..self.lengths.len()).flat_map(|b| (0..kv_heads).map(move |head| (b, head))) {
            let (_, (first_key, keys)) = self.spans(b);
            let group = kv_head * (heads / kv_heads)..(kv_head + 1) * (heads / kv_heads);
            let lists = group.flat_map(|head| (0..self.rows).map(move |row| (head, row)));
            let named: Vec<usize> = lists.flat_map(|(head, row)| self.keys(b, head, row)).collect();
            for key in (0..keys).filter(|key| !named.contains(key)) {
                let row = (first_key + key) * kv_heads + kv_head;
                self.k[row * width..][..width].fill(E::from_f32(f32::NAN));
                self.v[row * value_width..][..value_width].fill(E::from_f32(f32::NAN));
                poisoned += 1;
            }
        }
        assert!(poisoned > 0, "all keys are named");
    }

    /// The definition, in f64.
    pub fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|it| it.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let ([heads, kv_heads], [width, value_width]) = (self.heads, self.widths);
        let mut out = vec![0.0; self.tokens()[0] * heads * value_width];
        let mut lse = vec![f64::NEG_INFINITY; self.tokens()[0] * heads];
        for b in 0..self.lengths.len() {
            let ((first_query, q_len), (first_key, kv_len)) = self.spans(b);
            for (i, head) in (0..q_len).flat_map(|i| (0..heads).map(move |head| (i, head))) {
                let visible = |key: &usize| !self.causal || key + q_len <= i + kv_len;
                let keys: Vec<usize> = self.keys(b, head, i / self.block_size[0]).into_iter().filter(visible).collect();
                let at = (first_query + i) * heads + head;
                let row = |key: usize| (first_key + key) * kv_heads + head / (heads / kv_heads);
                let score = |key: &usize| {
                    let other = &k[row(*key) * width..][..width];
                    let product: f64 = q[at * width..][..width].iter().zip(other).map(|(a, b)| a * b).sum();
                    let (score, cap) = (product * f64::from(self.scale()), f64::from(self.softcap));
                    if cap == 0.0 { score } else { cap * (score / cap).tanh() }
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if keys.is_empty() {
                    continue;
                }
                lse[at] = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                for (key, score) in keys.iter().zip(&scores) {
                    let (weight, value) = ((score - lse[at]).exp(), &v[row(*key) * value_width..][..value_width]);
                    out[at * value_width..][..value_width].iter_mut().zip(value).for_each(|(o, x)| *o += weight * x);
                }
            }
        }
        (out, lse)
    }

    /// On every device that has the type, with all that it has for it.
    #[track_caller]
    pub fn check(&self, tolerance: f64) {
        self.check_against(self, tolerance);
    }

    /// Against what another case should give.
    #[track_caller]
    pub fn check_against(&self, other: &Self, tolerance: f64) {
        for_each_client(|client| {
            let (out, lse) = other.expected();
            let paths = available(client, &self.sizes());
            if paths.is_empty() {
                // Every device has f32; f16 and bf16 are features.
                let elem = E::elem_type_native();
                assert_ne!(elem, f32::elem_type_native(), "refused");
                let refused = self.run(client, Path::Plain).map(drop);
                assert_eq!(refused, Err(DeviceError::Elem(elem).into()));
                skip(format_args!("{} has no {elem}", client.name()));
            }
            for path in paths {
                let (got_out, got_lse) = self.run(client, path.path).expect("launches");
                assert_close(&format!("out, {:?}", path.path), &got_out, &out, tolerance);
                assert_close(&format!("lse, {:?}", path.path), &got_lse, &lse, 2e-5);
            }
        });
    }
}
