//! `sparse_mla` over lists that differ in length, with a plan and without: what a step of requests gets of which some are short.

use burn::tensor::Tensor;
use burn_mla::ops::{
    ListLengths, SparseMlaArgs, SparseMlaOptions, SparseMlaPlanArgs, SparseScope, sparse_mla, sparse_mla_plan,
};
use rand::RngExt;
use rand::seq::SliceRandom;
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};
use crate::sparse::{CHECKED_HEADS, DV, Keys, Scope, Shape};

/// Rows of a window, in front of DeepSeek-V4's entries.
const WINDOW: usize = 128;

/// How long the lists of a step are, as parts of what there is room for.
#[derive(Debug, Clone, Copy)]
enum Lengths {
    /// All are full.
    Full,
    /// From a sixteenth up to all of it, evenly.
    Even,
    /// One in eight is full, the others have a sixteenth.
    Few,
}

impl Lengths {
    fn of(self, b: usize, most: usize) -> Vec<i32> {
        let mut lengths: Vec<i32> = (0..b)
            .map(|token| match self {
                Self::Full => most,
                Self::Even => most / 16 + (most - most / 16) * token / (b - 1).max(1),
                Self::Few => {
                    if token % 8 == 0 {
                        most
                    } else {
                        most / 16
                    }
                }
            })
            .map(|length| length as i32)
            .collect();
        lengths.shuffle(&mut data::rng(7));
        lengths
    }
}

/// The section.
pub fn run(bench: &mut Bench) {
    let v32 =
        Shape { format: Some("v32"), b: 1, s_q: 1, h_q: 128, d: 576, scope: scope(2048), extra: None, window: false };
    let v4 = Shape { h_q: 64, d: 512, scope: scope(WINDOW), extra: Some(scope(512)), ..v32 };
    let of = |shape: Shape, batches: &[usize]| batches.iter().map(|&b| Shape { b, ..shape }).collect::<Vec<_>>();
    let full = [of(v32, &[4, 16, 32, 64]), of(Shape { h_q: 16, ..v32 }, &[16, 64, 128]), of(v4, &[16, 64])].concat();
    let small = Scope { s_k: 64, page: 16, topk: 30 };
    let smoke =
        [Shape { b: 3, h_q: 5, scope: small, ..v32 }, Shape { b: 2, h_q: 3, scope: small, extra: Some(small), ..v4 }];
    for shape in bench.pick(&full, 1, &smoke) {
        for lengths in [Lengths::Full, Lengths::Even, Lengths::Few] {
            bench.case(&format!("sparse_lists {lengths:?} {shape:?}"), |bench| lists(bench, shape, lengths));
        }
    }
}

fn scope(topk: usize) -> Scope {
    Scope { s_k: 16384, page: 64, topk }
}

fn lists(bench: &mut Bench, shape: Shape, lengths: Lengths) -> Result<(), String> {
    let Shape { b, h_q, d, scope, extra, .. } = shape;
    let q = data::normal([b, 1, h_q, d], bench.dtype, &bench.device);
    let keys = Keys::new(bench, &shape, scope, false, 1)?;
    let more = extra.map(|extra| Keys::new(bench, &shape, extra, false, 2)).transpose()?;
    let most = extra.map_or(scope.topk, |extra| extra.topk);
    let lens = lengths.of(b, most);
    let lengths_of_lists = || Some(data::ints(lens.clone(), [b, 1], &bench.device));
    let with_lengths = |keys: &Keys| SparseScope { lengths: lengths_of_lists(), ..keys.scope(&shape) };
    let (first, second) = match &more {
        None => (with_lengths(&keys), None),
        Some(more) => (keys.scope(&shape), Some(with_lengths(more))),
    };
    let list = |scope: &SparseScope| ListLengths { most: scope.indices.dims()[2], lengths: scope.lengths.clone() };
    let plan_args = SparseMlaPlanArgs { first: list(&first), second: second.as_ref().map(list), heads: h_q };
    let planning = || sparse_mla_plan(plan_args.clone()).map_err(|error| error.to_string());
    let options = SparseMlaOptions::new(DV, (d as f32).powf(-0.5));
    let args = SparseMlaArgs { second, ..SparseMlaArgs::new(q, first) };
    let planned = SparseMlaArgs { plan: Some(planning()?), ..args.clone() };
    let call = |args: &SparseMlaArgs| sparse_mla(args.clone(), &options).map_err(|error| error.to_string());

    let query = data::rng(b as u64).random_range(0..b);
    let mut rows = keys.of(query)?;
    match &more {
        None => rows.truncate(lens[query] as usize * d),
        Some(more) => rows.extend(&more.of(query)?[..lens[query] as usize * d]),
    }
    let of_query = |x: Tensor<4>| data::floats(x.narrow(0, query, 1));
    let own_q = of_query(args.q.clone())?;
    let mut difference = data::Difference::default();
    for args in [&args, &planned] {
        let (out, lse) = call(args)?;
        let (out, lse) = (of_query(out)?, of_query(lse.unsqueeze_dim(3))?);
        for h in (0..h_q).step_by(h_q.div_ceil(CHECKED_HEADS)) {
            let rows = data::Rows { keys: &rows, values: &rows, stride: d, width: DV };
            let expected = data::attend(&own_q[h * d..][..d], &rows, f64::from(options.softmax_scale));
            difference.add(&out[h * DV..][..DV], lse[h], &expected);
        }
    }
    let difference = difference.check(bench.dtype)?;

    let (uniform, times) = (bench.timer.measure(|| call(&args))?, bench.timer.measure(|| call(&planned))?);
    let plan = bench.timer.measure(planning)?;
    let fields = [
        ("b", json!(b)),
        ("h_q", json!(h_q)),
        ("d", json!(d)),
        ("topk", json!(most)),
        ("lengths", json!(format!("{lengths:?}"))),
    ];
    let seen: f64 =
        lens.iter().map(|&len| f64::from(len)).sum::<f64>() + (b * (scope.topk * usize::from(extra.is_some()))) as f64;
    let volume = Volume { flops: Some(2.0 * h_q as f64 * seen * (d + DV) as f64), bytes: None };
    let extra = [
        ("without_plan_us", rounded(uniform.us, 1)),
        ("plan_us", rounded(plan.us, 1)),
        ("rel_rms", rounded(difference, 8)),
    ];
    bench.report.row("sparse_lists", &fields, &times, volume, &extra);
    Ok(())
}
