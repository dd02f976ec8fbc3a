//! What the operations must compute, in f64 and in plain loops: nothing here is shared with the code under test.

use std::collections::BTreeSet;
use std::ops::Range;

/// Results of attention: a row per query token and head.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// `[rows, width]`.
    pub out: Vec<f64>,
    /// `[rows]`.
    pub lse: Vec<f64>,
}

impl State {
    /// Adds a row.
    pub fn push(&mut self, (out, lse): (Vec<f64>, f64)) {
        self.out.extend(out);
        self.lse.push(lse);
    }
}

/// Inputs of [`mla_decode`], as the operation gets them.
pub struct MlaDecode<'a> {
    pub q: &'a [f64],
    pub kv_cache: &'a [f64],
    pub page_table: &'a [i32],
    pub seq_lens: &'a [i32],
    pub query_len: usize,
    pub heads: usize,
    pub page_size: usize,
    pub max_pages: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub scale: f64,
    pub causal: bool,
}

/// Attention over the paged cache, of some rows of `[B, Sq, H]`: out `[rows, Dv]`, lse `[rows]`.
pub fn mla_decode(args: &MlaDecode, rows: impl IntoIterator<Item = usize>) -> State {
    let mut state = State::default();
    for row in rows {
        let (b, token) = (row / args.heads / args.query_len, row / args.heads % args.query_len);
        let len = i64::from(args.seq_lens[b]);
        let visible = if args.causal { (token as i64 + 1 + len - args.query_len as i64).max(0) } else { len };
        let keys = (0..visible as usize).map(|key| {
            let page = args.page_table[b * args.max_pages + key / args.page_size] as usize;
            let at = (page * args.page_size + key % args.page_size) * args.key_width;
            let key = &args.kv_cache[at..at + args.key_width];
            (key, &key[..args.value_width])
        });
        let query = &args.q[row * args.key_width..][..args.key_width];
        state.push(attend(query, keys, |product| args.scale * product, args.value_width));
    }
    state
}

/// Inputs of [`ragged_attention`], as the operation gets them.
pub struct Ragged<'a> {
    pub q: &'a [f64],
    pub k: &'a [f64],
    pub v: &'a [f64],
    pub cu_seqlens: &'a [i32],
    pub cu_seqlens_k: &'a [i32],
    pub heads: usize,
    pub kv_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    pub causal: bool,
    pub window: Option<usize>,
}

/// Attention of packed tokens, each over its own sequence: out `[N, H, dv]`, lse `[N, H]`.
pub fn ragged_attention(args: &Ragged) -> State {
    let mut state = State::default();
    let tokens = args.q.len() / (args.heads * args.key_width);
    let row = |values: &'static str, token: usize, head: usize| -> &[f64] {
        let kv_head = head / (args.heads / args.kv_heads);
        let (values, at, width) = match values {
            "q" => (args.q, token * args.heads + head, args.key_width),
            "k" => (args.k, token * args.kv_heads + kv_head, args.key_width),
            _ => (args.v, token * args.kv_heads + kv_head, args.value_width),
        };
        &values[at * width..][..width]
    };
    for token in 0..tokens {
        // The sequence that the token is in; none for a token past the last one.
        let home = args.cu_seqlens.windows(2).position(|ends| (ends[0]..ends[1]).contains(&(token as i32)));
        let (first, end) = home.map_or((0, 0), |b| {
            let (first, end) = (args.cu_seqlens_k[b], args.cu_seqlens_k[b + 1]);
            // The last query is at the position of the last key.
            let own = end - (args.cu_seqlens[b + 1] - token as i32);
            let end = if args.causal { end.min(own + 1).max(first) } else { end } as usize;
            let first = args.window.map_or(first as usize, |window| end.saturating_sub(window).max(first as usize));
            (first, end)
        });
        for head in 0..args.heads {
            let keys = (first..end).map(|key| (row("k", key, head), row("v", key, head)));
            let score =
                |product: f64| args.softcap.map_or(args.scale * product, |c| c * (args.scale * product / c).tanh());
            state.push(attend(row("q", token, head), keys, score, args.value_width));
        }
    }
    state
}

/// The vertical-slash pattern of one head in one sequence.
pub struct VerticalSlash<'a> {
    pub q_len: i32,
    pub kv_len: i32,
    pub vertical: &'a [i32],
    pub slash: &'a [i32],
    /// M and N.
    pub block_size: [i32; 2],
    pub causal: bool,
}

impl VerticalSlash<'_> {
    /// The keys before this one are those that some query of a block row sees.
    pub fn seen_end(&self, row: i32) -> i32 {
        let last = (row + 1) * self.block_size[0] - 1;
        if self.causal { self.kv_len.min(last + self.kv_len - self.q_len + 1) } else { self.kv_len }
    }

    /// The keys that a block row attends to.
    pub fn keys(&self, row: i32) -> BTreeSet<i32> {
        let ([m, n], queries) = (self.block_size, row * self.block_size[0]..(row + 1) * self.block_size[0]);
        if queries.start >= self.q_len {
            return BTreeSet::new();
        }
        let main_diagonal = if self.causal { self.kv_len - self.q_len } else { self.kv_len };
        let mut diagonals: Vec<i32> = self.slash.iter().copied().filter(|&diagonal| diagonal >= 0).collect();
        diagonals.sort_unstable();
        let mut keys = BTreeSet::new();
        // The lowest band is that of the greatest diagonal.
        for diagonal in diagonals.into_iter().rev() {
            let mut band = queries.clone().map(|query| query + main_diagonal - diagonal);
            if let Some(first) = band.find(|&key| key >= 0 && !keys.contains(&key)) {
                keys.extend(first..first + (m + n - 1) / n * n);
            }
        }
        keys.extend(self.vertical.iter().copied().filter(|&column| column >= 0));
        keys.retain(|&key| key < self.seen_end(row));
        keys
    }
}

/// Attention of each query to some keys of its sequence.
pub struct Sparse<'a> {
    /// `[Nq, H, d]`, `[Nk, Hkv, d]`, `[Nk, Hkv, dv]`.
    pub q: &'a [f64],
    pub k: &'a [f64],
    pub v: &'a [f64],
    /// The rows of each sequence's queries and keys.
    pub spans: Vec<[Range<usize>; 2]>,
    /// H and Hkv.
    pub heads: [usize; 2],
    /// d and dv.
    pub widths: [usize; 2],
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
    pub causal: bool,
}

impl Sparse<'_> {
    /// out `[Nq, H, dv]`, lse `[Nq, H]`. `keys` says to which positions the row of a query attends, of which sequence,
    /// head and query.
    pub fn attention<'k>(&self, keys: impl Fn(usize, usize, usize) -> &'k [i32]) -> State {
        let ([heads, kv_heads], [width, value_width]) = (self.heads, self.widths);
        let rows = self.q.len() / width;
        let mut state = State { out: vec![0.0; rows * value_width], lse: vec![f64::NEG_INFINITY; rows] };
        let score = |product: f64| match self.softcap {
            0.0 => self.scale * product,
            cap => cap * (self.scale * product / cap).tanh(),
        };
        for (b, [queries, kv]) in self.spans.iter().enumerate() {
            for (i, head) in (0..queries.len()).flat_map(|i| (0..heads).map(move |head| (i, head))) {
                let own = (i + kv.len()) as i64 - queries.len() as i64;
                let seen = |key: &&i32| (0..kv.len() as i32).contains(*key) && !(self.causal && i64::from(**key) > own);
                let row_of = |key: &i32| (kv.start + *key as usize) * kv_heads + head / (heads / kv_heads);
                let pair = |row: usize| (&self.k[row * width..][..width], &self.v[row * value_width..][..value_width]);
                let pairs = keys(b, head, i).iter().filter(seen).map(row_of).map(pair);
                let at = (queries.start + i) * heads + head;
                let (out, lse) = attend(&self.q[at * width..][..width], pairs, score, value_width);
                state.out[at * value_width..][..value_width].copy_from_slice(&out);
                state.lse[at] = lse;
            }
        }
        state
    }
}

/// One query over its keys and values; `score` makes a score of a product.
pub fn attend<'a>(
    query: &[f64],
    keys: impl Iterator<Item = (&'a [f64], &'a [f64])> + Clone,
    score: impl Fn(f64) -> f64,
    value_width: usize,
) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = keys.clone().map(|(key, _)| score(dot(query, key))).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; value_width];
    if scores.is_empty() {
        return (out, max);
    }
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    for (score, (_, value)) in scores.iter().zip(keys) {
        let p = (score - max).exp() / sum;
        out.iter_mut().zip(value).for_each(|(out, value)| *out += p * value);
    }
    (out, max + sum.ln())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Eight sums at a time: the largest cases would take minutes otherwise.
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// Merges the states of one row, each (out, lse). A lse of +inf or -inf marks a state that holds nothing.
pub fn merge(parts: &[(&[f64], f64)], width: usize) -> (Vec<f64>, f64) {
    let full: Vec<_> = parts.iter().filter(|(_, lse)| lse.is_finite()).collect();
    let max = full.iter().map(|(_, lse)| *lse).fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; width];
    if full.is_empty() {
        return (out, max);
    }
    let sum: f64 = full.iter().map(|(_, lse)| (lse - max).exp()).sum();
    for (values, lse) in full {
        let weight = (lse - max).exp() / sum;
        out.iter_mut().zip(*values).for_each(|(out, value)| *out += weight * value);
    }
    (out, max + sum.ln())
}

/// Page ids of one sequence: those of the tokens `start .. start + len` of its row of the map.
pub fn pages(row: &[i32], start: usize, len: usize, page_size: usize) -> Vec<i32> {
    let mut pages = Vec::new();
    for token in 0..len {
        let page = row[start + token] / page_size as i32;
        if token % page_size == 0 {
            pages.push(page);
        }
    }
    pages
}
