//! `mla_decode` over the shapes that FlashMLA and FlashInfer are measured with.

use burn::tensor::Tensor;
use burn_mla::ops::cache::Pool;
use burn_mla::ops::{
    MlaDecodeArgs, MlaDecodeOptions, MlaDecodeProblem, MlaPlan, MlaPlanArgs, MlaQuery, Splits, available_paths,
    explain_path, mla_decode, mla_plan,
};
use rand::RngExt;
use serde_json::{Value, json};

use crate::cases::{Bench, Size};
use crate::report::{Volume, rounded};
use crate::{data, tables, varlen};

const D: usize = 576;
const DV: usize = 512;
const PAGE: usize = 64;
/// Heads of one query token whose results are checked.
const CHECKED_HEADS: usize = 3;
/// Planning is timed for the shapes with this length.
const PLANNED: usize = 16384;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lens {
    Fixed,
    Var,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    b: usize,
    s_q: usize,
    h_q: usize,
    s_k: usize,
    lens: Lens,
}

impl Shape {
    fn lens(&self) -> Vec<usize> {
        match self.lens {
            Lens::Fixed => vec![self.s_k; self.b],
            Lens::Var => varlen::lengths(self.s_k, self.s_q).into_iter().cycle().take(self.b).collect(),
        }
    }

    fn pages(&self) -> usize {
        self.lens().iter().map(|len| len.div_ceil(PAGE)).sum()
    }

    fn mean_len(&self) -> f64 {
        self.lens().iter().sum::<usize>() as f64 / self.b as f64
    }

    /// As FlashMLA's tests count: a causal mask is not subtracted.
    fn volume(&self, bytes: usize, row_bytes: usize) -> Volume {
        let (b, s_q, h_q, mean) = (self.b as f64, self.s_q as f64, self.h_q as f64, self.mean_len());
        let flops = b * h_q * s_q * (2 * D + 2 * DV) as f64 * mean;
        let bytes = b * (s_q * h_q * ((D + DV) * bytes) as f64 + mean * row_bytes as f64);
        Volume { flops: Some(flops), bytes: Some(bytes) }
    }

    fn fields(&self) -> [(&'static str, Value); 7] {
        let lens = if self.lens == Lens::Fixed { "fixed" } else { "var" };
        [
            ("b", json!(self.b)),
            ("s_q", json!(self.s_q)),
            ("h_q", json!(self.h_q)),
            ("s_k", json!(self.s_k)),
            ("lens", json!(lens)),
            ("mean_len", rounded(self.mean_len(), 2)),
            ("causal", json!(self.s_q > 1)),
        ]
    }
}

/// The shapes of the peers' benchmark, in its order.
fn shapes(bench: &Bench) -> Vec<Shape> {
    let mut full = Vec::new();
    for lens in [Lens::Fixed, Lens::Var] {
        for s_q in [1, 2] {
            full.extend([4096, 8192, 16384, 32768].map(|s_k| Shape { b: 128, s_q, h_q: 128, s_k, lens }));
        }
    }
    for h_q in [128, 64, 16] {
        for b in [1, 4, 8, 16, 32, 64] {
            full.extend([1024, 4096, 16384, 65536].map(|s_k| Shape { b, s_q: 1, h_q, s_k, lens: Lens::Fixed }));
        }
    }
    let smoke = [
        Shape { b: 2, s_q: 1, h_q: 16, s_k: 130, lens: Lens::Fixed },
        Shape { b: 5, s_q: 2, h_q: 3, s_k: 100, lens: Lens::Var },
    ];
    bench.pick(&full, 7, &smoke)
}

/// The section.
pub fn run(bench: &mut Bench) {
    let shapes = shapes(bench);
    let pages = shapes.iter().map(Shape::pages).max().unwrap_or(0) + 64;
    let mut pool = None;
    bench.case("dense: the cache", |bench| {
        let rows = data::rows([pages, PAGE, D], bench)?;
        let gib = rows.bytes() as f64 / f64::from(1 << 30);
        bench.report.say(&format!("dense: a cache of {pages} pages, {gib:.2} GiB"));
        pool = Some(rows);
        bench.device.sync().map_err(|error| error.to_string())
    });
    let Some(pool) = pool else { return };
    for shape in shapes {
        bench.case(&format!("dense {shape:?}"), |bench| Case::new(bench, shape, &pool)?.run(bench));
    }
}

/// Whether the first of the implementations that the device has is the fastest.
pub fn tables(bench: &mut Bench) {
    let shape = |b, h_q, s_k| Shape { b, s_q: 1, h_q, s_k, lens: Lens::Fixed };
    let full = [16, 128].map(|h_q| [shape(1, h_q, 1024), shape(1, h_q, 65536), shape(64, h_q, 4096)]).concat();
    for shape in bench.pick(&full, 1, &[shape(2, 16, 130)]) {
        let name = format!("dense {shape:?}");
        bench.case(&name, |bench| {
            let pool = data::rows([shape.pages() + 64, PAGE, D], bench)?;
            let mut case = Case::new(bench, shape, &pool)?;
            let plan = case.plan()?;
            let mut measured = tables::Measured::new();
            for path in available_paths(&case.problem(bench), &bench.device) {
                case.options.path = Some(path);
                let times = bench.timer.measure(|| case.decode(Some(&plan)));
                measured.push((path.to_string(), times.ok().map(|times| times.us)));
            }
            tables::judge(bench, &name, measured)
        });
    }
}

/// Bytes of a row.
fn row_bytes(pool: &Pool) -> usize {
    let [pages, page_size, _] = pool.dims();
    pool.bytes() as usize / (pages * page_size).max(1)
}

/// One shape with its inputs.
struct Case {
    shape: Shape,
    lens: Vec<usize>,
    /// Page ids `[B, width]` on the host.
    table: Vec<i32>,
    width: usize,
    q: Tensor<4>,
    args: MlaDecodeArgs,
    options: MlaDecodeOptions,
}

impl Case {
    fn new(bench: &Bench, shape: Shape, pool: &Pool) -> Result<Self, String> {
        let device = &bench.device;
        let lens = shape.lens();
        let (table, width) = page_table(&lens, pool.dims()[0]);
        let q = data::normal([shape.b, shape.s_q, shape.h_q, D], bench.dtype, device);
        let args = MlaDecodeArgs {
            q: MlaQuery::Whole(q.clone()),
            kv_cache: pool.clone(),
            page_table: data::ints(table.clone(), [shape.b, width], device),
            seq_lens: data::ints(lens.iter().map(|&len| len as i32).collect(), [shape.b], device),
        };
        let options = MlaDecodeOptions {
            value_width: DV,
            softmax_scale: (D as f32).powf(-0.5),
            causal: shape.s_q > 1,
            splits: Splits::Auto,
            path: bench.path,
        };
        Ok(Self { shape, lens, table, width, q, args, options })
    }

    fn plan(&self) -> Result<MlaPlan, String> {
        mla_plan(MlaPlanArgs {
            seq_lens: self.args.seq_lens.clone(),
            query_len: self.shape.s_q,
            heads: self.shape.h_q,
            page_size: PAGE,
            max_seq_len: self.width * PAGE,
            splits: self.options.splits,
        })
        .map_err(|error| error.to_string())
    }

    fn decode(&self, plan: Option<&MlaPlan>) -> Result<(Tensor<4>, Tensor<3>), String> {
        let step = mla_decode(self.args.clone(), &self.options, plan).map_err(|error| error.to_string())?;
        Ok(step.materialise())
    }

    fn run(&self, bench: &mut Bench) -> Result<(), String> {
        let plan = self.plan()?;
        let call = |plan| self.decode(plan);
        let (out, lse) = call(Some(&plan))?;
        let difference = self.check(bench, out, lse)?;
        let extra = [("path", json!(self.path(bench))), ("rel_rms", rounded(difference, 8))];
        let (fields, volume) =
            (self.shape.fields(), self.shape.volume(bench.dtype.size(), row_bytes(&self.args.kv_cache)));
        let times = bench.timer.measure(|| call(Some(&plan)))?;
        bench.report.row("dense", &fields, &times, volume, &extra);
        let smoke = bench.size == Size::Smoke;
        if smoke || (self.shape.b == 128 && self.shape.s_q == 1 && self.shape.lens == Lens::Fixed) {
            let times = bench.timer.measure(|| call(None))?;
            bench.report.row("dense+schedule", &fields, &times, volume, &extra[..1]);
        }
        if smoke || self.shape.s_k == PLANNED {
            let times = bench.timer.measure(|| self.plan())?;
            bench.report.row("plan", &fields, &times, Volume::default(), &[]);
            let times = bench.timer.measure_host(|| self.plan())?;
            bench.report.row("plan_host", &fields, &times, Volume::default(), &[]);
        }
        Ok(())
    }

    fn problem(&self, bench: &Bench) -> MlaDecodeProblem {
        let Shape { b: batch, s_q: query_len, h_q: heads, .. } = self.shape;
        let (key_width, value_width, page_size, dtype) = (D, DV, PAGE, bench.dtype);
        let rows = self.args.kv_cache.format();
        MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype, rows }
    }

    /// Which kernels run.
    fn path(&self, bench: &Bench) -> String {
        bench.path.unwrap_or_else(|| explain_path(&self.problem(bench), &bench.device).path).to_string()
    }

    /// Some heads of one query token against f64.
    fn check(&self, bench: &Bench, out: Tensor<4>, lse: Tensor<3>) -> Result<f64, String> {
        let Shape { b, s_q, h_q, s_k, .. } = self.shape;
        let mut rng = data::rng(s_k as u64);
        let (b, i) = (rng.random_range(0..b), rng.random_range(0..s_q));
        let visible = if self.options.causal { self.lens[b] - s_q + i + 1 } else { self.lens[b] };
        let pages = &self.table[b * self.width..][..self.lens[b].div_ceil(PAGE)];
        let slots: Vec<i32> =
            pages.iter().flat_map(|&page| (0..PAGE as i32).map(move |i| page * PAGE as i32 + i)).collect();
        let count = slots.len();
        let rows = data::floats(self.args.kv_cache.read(data::ints(slots, [count], &bench.device)))?;
        let rows = &rows[..visible * D];
        let q = data::floats(self.q.clone().slice([b..b + 1, i..i + 1]))?;
        let out = data::floats(out.slice([b..b + 1, i..i + 1]))?;
        let lse = data::floats(lse.slice([b..b + 1, i..i + 1]))?;
        let mut difference = data::Difference::default();
        for _ in 0..CHECKED_HEADS {
            let h = rng.random_range(0..h_q);
            let rows = data::Rows { keys: rows, values: rows, stride: D, width: DV };
            let expected = data::attend(&q[h * D..][..D], &rows, f64::from(self.options.softmax_scale));
            difference.add(&out[h * DV..][..DV], lse[h], &expected);
        }
        difference.check(bench.dtype)
    }
}

/// Randomly placed pages of the pool for each sequence, the rows padded with page 0, and their width: a multiple of 4,
/// as FlashMLA wants it.
fn page_table(lens: &[usize], pool: usize) -> (Vec<i32>, usize) {
    let pages = |len: &usize| len.div_ceil(PAGE);
    let width = lens.iter().map(pages).max().unwrap_or(0).next_multiple_of(4);
    let mut free = data::permutation(pool, &mut data::rng(0)).into_iter();
    let mut table = Vec::with_capacity(lens.len() * width);
    for len in lens {
        table.extend(free.by_ref().take(pages(len)));
        table.resize(table.len().next_multiple_of(width.max(1)), 0);
    }
    (table, width)
}
