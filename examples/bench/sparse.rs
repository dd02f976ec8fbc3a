//! `sparse_mla` over the shapes that FlashMLA's sparse decode (its cache is FP8, ours is not) and prefill are measured with, and
//! `lightning_index` in the sizes of DeepSeek-V3.2.

use std::collections::HashSet;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_mla::ops::cache::{Pool, RowFormat};
use burn_mla::ops::{
    IndexForm, LightningIndexArgs, LightningIndexOptions, LightningIndexProblem, Path, SparseMlaArgs, SparseMlaOptions,
    SparseScope, explain_path, lightning_index, sparse_mla,
};
use rand::RngExt;
use rand::seq::index::sample;
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};

pub const DV: usize = 512;
pub const CHECKED_HEADS: usize = 3;

/// Keys of a scope: pages of a sequence of `s_k` tokens, of which each query sees `topk`.
#[derive(Debug, Clone, Copy)]
pub struct Scope {
    pub s_k: usize,
    pub page: usize,
    pub topk: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Of the peer's cache in a decode step; none for a prompt.
    pub format: Option<&'static str>,
    pub b: usize,
    pub s_q: usize,
    pub h_q: usize,
    pub d: usize,
    pub scope: Scope,
    pub extra: Option<Scope>,
    /// Whether each query sees the keys of the first scope that lie behind one another, one further than the query before.
    pub window: bool,
}

impl Shape {
    fn op(&self) -> &'static str {
        if self.format.is_some() { "sparse_decode" } else { "sparse_prefill" }
    }
}

fn shapes(bench: &Bench) -> Vec<Shape> {
    let mut full = Vec::new();
    let long = Scope { s_k: 32768, page: 64, topk: 2048 };
    for h_q in [128, 64] {
        for s_q in [1, 2] {
            let format = Some("v32");
            let v32 = |b| Shape { format, b, s_q, h_q, d: 576, scope: long, extra: None, window: false };
            full.extend([1, 8, 16, 32, 64, 128].map(v32));
            for topk in [512, 1024] {
                full.extend([1, 16, 64, 128].map(|b| Shape { scope: Scope { topk, ..long }, ..v32(b) }));
            }
        }
    }
    for s_q in [1, 2] {
        full.extend([1, 8, 64, 128].map(|b| Shape {
            format: Some("model1"),
            b,
            s_q,
            h_q: 128,
            d: 512,
            scope: long,
            extra: None,
            window: false,
        }));
    }
    for (h_q, topk) in [(64, 512), (128, 1024)] {
        let scope = Scope { s_k: 16384, page: 256, topk: 128 };
        let extra = Some(Scope { s_k: 16384, page: 64, topk });
        let format = Some("model1+extra");
        for s_q in [1, 2] {
            let v4 = |b| Shape { format, b, s_q, h_q, d: 512, scope, extra, window: false };
            full.extend([1, 2, 16, 64, 128].map(v4));
        }
    }
    full.extend(prompts());
    let (near, far) = (Scope { s_k: 64, page: 16, topk: 12 }, Scope { s_k: 32, page: 8, topk: 5 });
    let smoke = [
        Shape { format: Some("v32"), b: 2, s_q: 1, h_q: 3, d: 576, scope: near, extra: None, window: false },
        Shape {
            format: Some("model1+extra"),
            b: 2,
            s_q: 2,
            h_q: 5,
            d: 512,
            scope: near,
            extra: Some(far),
            window: false,
        },
        Shape { format: None, b: 1, s_q: 9, h_q: 3, d: 512, scope: near, extra: Some(far), window: true },
    ];
    bench.pick(&full, 4, &smoke)
}

/// Prompts: those that FlashMLA's prefill is measured with, and DeepSeek-V4's form, a window and entries.
fn prompts() -> Vec<Shape> {
    let one = |d, h_q, topk, s_k| {
        let scope = Scope { s_k, page: 64, topk };
        Shape { format: None, b: 1, s_q: 4096, h_q, d, scope, extra: None, window: false }
    };
    let v4 = |s_q| {
        let (scope, entries) =
            (Scope { s_k: s_q + 128, page: 64, topk: 128 }, Scope { s_k: 4096, page: 64, topk: 512 });
        Shape { format: None, b: 1, s_q, h_q: 64, d: 512, scope, extra: Some(entries), window: true }
    };
    let mut prompts = [8192, 16384, 32768].map(|s_k| one(576, 128, 2048, s_k)).to_vec();
    for (h_q, topk) in [(128, 2048), (64, 512), (128, 1024)] {
        prompts.extend([8192, 32768].map(|s_k| one(512, h_q, topk, s_k)));
    }
    prompts.extend([4096, 16384].map(v4));
    prompts
}

/// The section.
pub fn run(bench: &mut Bench) {
    for shape in shapes(bench) {
        bench.case(&format!("{} {shape:?}", shape.op()), |bench| attention(bench, shape));
    }
    // Query heads and width of the indexer, and the keys that it keeps, in V3.2.
    let index = |b, s_q, s_k| IndexShape { b, s_q, heads: 64, width: 128, s_k, k: 2048, keys: RowFormat::Dense };
    let decode = [(1, 32768), (8, 32768), (64, 32768), (1, 131_072)].map(|(b, s_k)| index(b, 1, s_k));
    // Prompts: one chunk after a long past, the first chunk, several, and a few tokens.
    let prompts = [(1, 4096, 32768), (1, 4096, 4096), (8, 512, 32768), (1, 16, 32768)];
    let full = [&decode[..], &prompts.map(|(b, s_q, s_k)| index(b, s_q, s_k))].concat();
    let smoke = [(1, 3), (9, 16)].map(|(s_q, heads)| IndexShape { heads, width: 64, k: 9, ..index(2, s_q, 70) });
    for shape in bench.pick(&full, 2, &smoke) {
        let IndexShape { b, s_q, s_k, .. } = shape;
        // Keys in FP8 beside those of the dtype.
        for keys in [RowFormat::Dense, RowFormat::Fp8IndexKeys] {
            let (shape, fp8) = (IndexShape { keys, ..shape }, if keys == RowFormat::Dense { "" } else { " fp8 keys" });
            bench.case(&format!("lightning_index b {b} s_q {s_q} s_k {s_k}{fp8}"), |bench| index_case(bench, shape));
        }
    }
}

/// Rows of a scope, and the slots that each query sees, in random order.
pub struct Keys {
    rows: Pool,
    slots: Vec<i32>,
    topk: usize,
}

impl Keys {
    pub fn new(bench: &Bench, shape: &Shape, scope: Scope, window: bool, seed: u64) -> Result<Self, String> {
        let (per, mut rng) = (scope.s_k / scope.page, data::rng(seed));
        let pages = data::permutation(shape.b * per, &mut rng);
        let mut slots = Vec::with_capacity(shape.b * shape.s_q * scope.topk);
        for query in 0..shape.b * shape.s_q {
            let own = &pages[query / shape.s_q * per..][..per];
            let first = query % shape.s_q;
            let tokens = match window {
                true => (first..first + scope.topk).collect(),
                false => sample(&mut rng, scope.s_k, scope.topk).into_vec(),
            };
            let slot = |t: usize| own[t / scope.page] * scope.page as i32 + (t % scope.page) as i32;
            slots.extend(tokens.into_iter().map(slot));
        }
        let rows = data::rows([shape.b * per, scope.page, shape.d], bench)?;
        Ok(Self { rows, slots, topk: scope.topk })
    }

    pub fn scope(&self, shape: &Shape) -> SparseScope {
        let indices = data::ints(self.slots.clone(), [shape.b, shape.s_q, self.topk], &self.rows.device());
        SparseScope::new(self.rows.clone(), indices)
    }

    /// The rows that a query sees, f32.
    pub fn of(&self, query: usize) -> Result<Vec<f32>, String> {
        let own = self.slots[query * self.topk..][..self.topk].to_vec();
        let ids: Tensor<1, Int> = data::ints(own, [self.topk], &self.rows.device());
        data::floats(self.rows.read(ids))
    }

    fn distinct(&self) -> usize {
        let mut slots = self.slots.clone();
        slots.sort_unstable();
        slots.dedup();
        slots.len()
    }
}

fn attention(bench: &mut Bench, shape: Shape) -> Result<(), String> {
    let Shape { format, b, s_q, h_q, d, scope, extra, window } = shape;
    let q = data::normal([b, s_q, h_q, d], bench.dtype, &bench.device);
    let keys = Keys::new(bench, &shape, scope, window, 1)?;
    let more = extra.map(|extra| Keys::new(bench, &shape, extra, false, 2)).transpose()?;
    let args = SparseMlaArgs {
        q: q.clone(),
        scope: keys.scope(&shape),
        second: more.as_ref().map(|more| more.scope(&shape)),
        sink: None,
        plan: None,
    };
    let (softmax_scale, determinism) = ((d as f32).powf(-0.5), Default::default());
    let options = SparseMlaOptions { value_width: DV, softmax_scale, determinism };
    let call = || sparse_mla(args.clone(), &options).map_err(|error| error.to_string());
    let (out, lse) = call()?;

    let mut rng = data::rng(b as u64);
    let query = rng.random_range(0..b * s_q);
    let mut rows = keys.of(query)?;
    if let Some(more) = &more {
        rows.extend(more.of(query)?);
    }
    let of_query = |x: Tensor<4>| data::floats(x.slice([query / s_q..query / s_q + 1, query % s_q..query % s_q + 1]));
    let (q, out, lse) = (of_query(q)?, of_query(out)?, of_query(lse.unsqueeze_dim(3))?);
    let mut difference = data::Difference::default();
    for _ in 0..CHECKED_HEADS {
        let h = rng.random_range(0..h_q);
        let rows = data::Rows { keys: &rows, values: &rows, stride: d, width: DV };
        let expected = data::attend(&q[h * d..][..d], &rows, f64::from(options.softmax_scale));
        difference.add(&out[h * DV..][..DV], lse[h], &expected);
    }
    let difference = difference.check(bench.dtype)?;

    let times = bench.timer.measure(call)?;
    let topk = scope.topk + extra.map_or(0, |extra| extra.topk);
    let distinct = keys.distinct() + more.as_ref().map_or(0, Keys::distinct);
    let [pages, page_size, _] = keys.rows.dims();
    let row_bytes = keys.rows.bytes() as usize / (pages * page_size);
    let bytes = b * s_q * h_q * (d + DV) * bench.dtype.size() + distinct * row_bytes;
    let flops = 2.0 * (h_q * b * s_q * topk) as f64 * (d + DV) as f64;
    let volume = Volume { flops: Some(flops), bytes: Some(bytes as f64) };
    let mut fields = match format {
        Some(format) => vec![("format", json!(format)), ("b", json!(b))],
        None => Vec::new(),
    };
    fields.extend([
        ("s_q", json!(s_q)),
        ("h_q", json!(h_q)),
        ("d", json!(d)),
        ("s_k", json!(scope.s_k)),
        ("topk", json!(scope.topk)),
    ]);
    fields.extend(extra.map(|extra| ("extra_topk", json!(extra.topk))));
    bench.report.row(shape.op(), &fields, &times, volume, &[("rel_rms", rounded(difference, 8))]);
    Ok(())
}

/// The last `s_q` tokens of sequences with `s_k`.
#[derive(Debug, Clone, Copy)]
struct IndexShape {
    b: usize,
    s_q: usize,
    heads: usize,
    width: usize,
    s_k: usize,
    k: usize,
    keys: RowFormat,
}

impl IndexShape {
    const PAGE: usize = 64;

    fn args(&self, bench: &Bench) -> Result<LightningIndexArgs, String> {
        let &Self { b, s_q, heads, width, s_k, .. } = self;
        let (device, per) = (&bench.device, s_k.div_ceil(Self::PAGE));
        let pages = data::permutation(b * per, &mut data::rng(3));
        let shape = [b * per, Self::PAGE, width];
        let visible: Vec<i32> = (s_k + 1 - s_q..=s_k).map(|keys| keys as i32).collect();
        Ok(LightningIndexArgs {
            q: data::normal([b, s_q, heads, width], bench.dtype, device),
            keys: match self.keys {
                RowFormat::Dense => data::pool(shape, FloatDType::from(bench.dtype), device).into(),
                format => data::in_fp8(shape, format, bench)?,
            },
            page_table: data::ints(pages, [b, per], device),
            head_weights: data::normal([b, s_q, heads], DType::F32, device),
            visible: data::ints(visible.repeat(b), [b, s_q], device),
        })
    }

    fn path(&self, bench: &Bench) -> Path {
        let &Self { b: batch, s_q: query_len, heads, width, keys, .. } = self;
        let (page_size, dtype) = (Self::PAGE, bench.dtype);
        let problem = LightningIndexProblem { batch, query_len, heads, width, page_size, dtype, keys };
        explain_path(&problem, &bench.device).path
    }

    /// Of the scores. A token that sees at most `k` keys has none.
    fn flops(&self) -> f64 {
        let seen: usize = (self.s_k + 1 - self.s_q..=self.s_k).filter(|&keys| keys > self.k).sum();
        2.0 * (self.b * self.heads * self.width) as f64 * seen as f64
    }
}

fn index_case(bench: &mut Bench, shape: IndexShape) -> Result<(), String> {
    let IndexShape { b, s_q, heads, width, s_k, k, keys } = shape;
    let args = shape.args(bench)?;
    let options = LightningIndexOptions { k, scale: (width as f32).powf(-0.5), form: IndexForm::Slots };
    let call = || lightning_index(args.clone(), &options).map_err(|error| error.to_string());
    check_index(&args, &options, call()?, [b / 2, s_q / 2])?;
    let times = bench.timer.measure(call)?;
    let row_bytes = args.keys.bytes() / args.keys.dims()[..2].iter().product::<usize>() as u64;
    let bytes = (b * s_k) as f64 * row_bytes as f64;
    let mut extra: Vec<_> =
        bench.copy_gbps.map(|copy| ("of_copy", rounded(bytes / times.us / 1e3 / copy, 3))).into_iter().collect();
    let twice = IndexShape { heads: 2 * heads, ..shape };
    if twice.path(bench) == Path::Sm90 {
        // Twice the heads are twice the products of the same tiles, and the same choice.
        let args = twice.args(bench)?;
        let twice =
            bench.timer.measure(|| lightning_index(args.clone(), &options).map_err(|error| error.to_string()))?;
        let scores = twice.us - times.us;
        extra.push(("scores_us", rounded(scores, 1)));
        extra.push(("scores_TFLOPs", rounded(shape.flops() / scores / 1e6, 1)));
        extra.push(("of_selection", rounded(1.0 - scores / times.us, 3)));
    }
    // Rows of dense keys are named as they have been.
    let mut fields = if keys == RowFormat::Dense { Vec::new() } else { vec![("keys", json!("fp8"))] };
    fields.extend([
        ("b", json!(b)),
        ("s_q", json!(s_q)),
        ("heads", json!(heads)),
        ("width", json!(width)),
        ("s_k", json!(s_k)),
        ("k", json!(k)),
    ]);
    let volume = Volume { flops: Some(shape.flops()), bytes: Some(bytes) };
    bench.report.row("lightning_index", &fields, &times, volume, &extra);
    Ok(())
}

/// All keys of one token of a sequence in f64: no key that was left out is better than one that was chosen.
fn check_index(
    args: &LightningIndexArgs,
    options: &LightningIndexOptions,
    chosen: Tensor<3, Int>,
    [sequence, token]: [usize; 2],
) -> Result<(), String> {
    let query_len = args.q.dims()[1];
    let of = |x: Tensor<4>| data::floats(x.slice([sequence..sequence + 1, token..token + 1]));
    let ([_, _, _, width], [_, max_pages]) = (args.q.dims(), args.page_table.dims());
    let (q, weights) = (of(args.q.clone())?, of(args.head_weights.clone().unsqueeze_dim(3))?);
    let pages = args.page_table.clone().slice(sequence..sequence + 1).reshape([max_pages]);
    let pages = data::read_ints(pages)?;
    let [_, page, _] = args.keys.dims();
    let slots: Vec<i32> = pages.iter().flat_map(|id| id * page as i32..(id + 1) * page as i32).collect();
    let keys = data::floats(args.keys.read(data::ints(slots.clone(), [slots.len()], &args.keys.device())))?;
    let visible = data::read_ints(args.visible.clone())?[sequence * query_len + token] as usize;
    let score = |key: &[f32]| -> f64 {
        let heads = q.chunks_exact(width).zip(&weights).map(|(q, &weight)| {
            let dot: f64 = q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            f64::from(weight) * dot.max(0.0)
        });
        heads.sum::<f64>() * f64::from(options.scale)
    };
    let chosen = data::read_ints(chosen.slice([sequence..sequence + 1, token..token + 1]))?;
    let chosen: HashSet<i32> = chosen.into_iter().filter(|&slot| slot >= 0).collect();
    if chosen.len() != options.k.min(visible) {
        return Err(format!("{} keys chosen, expected {}", chosen.len(), options.k.min(visible)));
    }
    let (mut worst_in, mut best_out) = (f64::INFINITY, f64::NEG_INFINITY);
    for (position, key) in keys.chunks_exact(width).take(visible).enumerate() {
        match chosen.contains(&slots[position]) {
            true => worst_in = worst_in.min(score(key)),
            false => best_out = best_out.max(score(key)),
        }
    }
    // Scores are sums in f32.
    let close = best_out - worst_in <= 1e-5 * best_out.abs().max(1.0);
    if close { Ok(()) } else { Err(format!("a key of score {best_out} left out, one of {worst_in} chosen")) }
}
