//! `ragged_attention` with the head sizes of DeepSeek-V3.

use burn::tensor::Tensor;
use burn_mla::ops::{RaggedAttentionArgs, RaggedAttentionOptions, ragged_attention};
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};

const DQK: usize = 192;
const DV: usize = 128;

/// The section: one sequence, and as many as have 16384 tokens together.
pub fn run(bench: &mut Bench) {
    let full = [(1, 1024), (16, 1024), (1, 4096), (4, 4096), (1, 16384)];
    for (b, len) in bench.pick(&full, 2, &[(2, 70)]) {
        let heads = if len < 1024 { 3 } else { 128 };
        bench.case(&format!("ragged {b} x {len}"), |bench| case(bench, b, len, heads));
    }
}

fn case(bench: &mut Bench, b: usize, len: usize, heads: usize) -> Result<(), String> {
    let (device, tokens) = (&bench.device, b * len);
    let rows = |width| data::normal([tokens, heads, width], bench.dtype, device);
    let cu_seqlens = data::ints((0..=b).map(|i| (i * len) as i32).collect(), [b + 1], device);
    let args = RaggedAttentionArgs { q: rows(DQK), k: rows(DQK), v: rows(DV), cu_seqlens };
    let options = RaggedAttentionOptions { softmax_scale: (DQK as f32).powf(-0.5), causal: true };
    let call = || ragged_attention(args.clone(), &options).map_err(|error| error.to_string());
    let (out, lse) = call()?;
    let difference = check(bench, &args, &options, len, (out, lse))?;
    let times = bench.timer.measure(call)?;
    let flops = (b * heads) as f64 * (len as f64).powi(2) * (DQK + DV) as f64;
    let bytes = (tokens * heads * (2 * DQK + 2 * DV) * bench.dtype.size()) as f64;
    let volume = Volume { flops: Some(flops), bytes: Some(bytes) };
    let shape = [
        ("b", json!(b)),
        ("s_q", json!(len)),
        ("h_q", json!(heads)),
        ("dqk", json!(DQK)),
        ("dv", json!(DV)),
        ("causal", json!(true)),
    ];
    bench.report.row("ragged", &shape, &times, volume, &[("rel_rms", rounded(difference, 8))]);
    Ok(())
}

/// The last token of the last sequence, which sees all of it, in the first and the last head.
fn check(
    bench: &Bench,
    args: &RaggedAttentionArgs,
    options: &RaggedAttentionOptions,
    len: usize,
    (out, lse): (Tensor<3>, Tensor<2>),
) -> Result<f64, String> {
    let [tokens, heads, _] = out.dims();
    let mut difference = data::Difference::default();
    for h in [0, heads - 1] {
        let head = |tensor: &Tensor<3>, n: usize| data::floats(tensor.clone().slice([tokens - n..tokens, h..h + 1]));
        let (q, k, v) = (head(&args.q, 1)?, head(&args.k, len)?, head(&args.v, len)?);
        let rows = data::Rows { keys: &k, values: &v, stride: DV, width: DV };
        let expected = data::attend(&q, &rows, f64::from(options.softmax_scale));
        let lse = data::floats(lse.clone().slice([tokens - 1..tokens, h..h + 1]))?;
        difference.add(&head(&out, 1)?, lse[0], &expected);
    }
    difference.check(bench.dtype)
}
