//! What the operations must compute, in f64 and in plain loops: nothing here is shared with the code under test.

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

/// Attention over the paged cache: out `[B, Sq, H, Dv]`, lse `[B, Sq, H]`.
pub fn mla_decode(args: &MlaDecode) -> State {
    let mut state = State::default();
    let mut queries = args.q.chunks_exact(args.key_width);
    for (b, &len) in args.seq_lens.iter().enumerate() {
        let row_of = |token: usize| {
            let page = args.page_table[b * args.max_pages + token / args.page_size] as usize;
            let row = (page * args.page_size + token % args.page_size) * args.key_width;
            &args.kv_cache[row..row + args.key_width]
        };
        let rows: Vec<&[f64]> = (0..len as usize).map(row_of).collect();
        for i in 0..args.query_len {
            let visible = if args.causal {
                (i as i64 + 1 + i64::from(len) - args.query_len as i64).max(0)
            } else {
                i64::from(len)
            };
            for _ in 0..args.heads {
                let query = queries.next().expect("a query per token and head");
                let keys = rows[..visible as usize].iter().map(|row| (*row, &row[..args.value_width]));
                state.push(attend(query, keys, args.scale, args.value_width));
            }
        }
    }
    state
}

/// Inputs of [`ragged_attention`], as the operation gets them.
pub struct Ragged<'a> {
    pub q: &'a [f64],
    pub k: &'a [f64],
    pub v: &'a [f64],
    pub cu_seqlens: &'a [i32],
    pub heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub scale: f64,
    pub causal: bool,
}

/// Attention of packed tokens, each over its own sequence: out `[N, H, dv]`, lse `[N, H]`.
pub fn ragged_attention(args: &Ragged) -> State {
    let mut state = State::default();
    let tokens = args.q.len() / (args.heads * args.key_width);
    let row = |values: &'static str, token: usize, head: usize| -> &[f64] {
        let (values, width) = match values {
            "q" => (args.q, args.key_width),
            "k" => (args.k, args.key_width),
            _ => (args.v, args.value_width),
        };
        &values[(token * args.heads + head) * width..][..width]
    };
    for token in 0..tokens {
        // The sequence that the token is in; none for a token past the last one.
        let home = args.cu_seqlens.windows(2).find(|ends| (ends[0]..ends[1]).contains(&(token as i32)));
        let (first, end) = home.map_or((0, 0), |ends| (ends[0] as usize, ends[1] as usize));
        let end = if args.causal { end.min(token + 1) } else { end };
        for head in 0..args.heads {
            let keys = (first..end).map(|key| (row("k", key, head), row("v", key, head)));
            state.push(attend(row("q", token, head), keys, args.scale, args.value_width));
        }
    }
    state
}

/// One query over its keys and values.
pub fn attend<'a>(
    query: &[f64],
    keys: impl Iterator<Item = (&'a [f64], &'a [f64])> + Clone,
    scale: f64,
    value_width: usize,
) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = keys.clone().map(|(key, _)| scale * dot(query, key)).collect();
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
