//! `ragged_attention`: packed causal batches, with the head sizes of DeepSeek-V3 and of other models.

use burn::tensor::Tensor;
use burn_mla::ops::{RaggedAttentionArgs, RaggedAttentionOptions, explain_path, ragged_attention};
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::report::{Volume, rounded};

/// A row.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Sequences of as many tokens each.
    b: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    dqk: usize,
    dv: usize,
    /// Channels of the keys that all heads share, beside those of a projection that keys and values are views of.
    shared: usize,
    causal: bool,
}

/// Heads of queries and keys, dqk, dv, shared.
const MODELS: [[usize; 5]; 6] = [
    [128, 128, 192, 128, 64],
    [128, 128, 192, 128, 0],
    [16, 16, 192, 128, 64],
    [16, 16, 192, 128, 0],
    [16, 16, 128, 128, 0],
    [32, 8, 128, 128, 0],
];
/// Sequences and their length.
const BATCHES: [[usize; 2]; 4] = [[1, 4096], [1, 16384], [1, 32768], [16, 2048]];

/// The section.
pub fn run(bench: &mut Bench) {
    let row = |[heads, kv_heads, dqk, dv, shared]: [usize; 5], [b, len]: [usize; 2], causal| Row {
        b,
        len,
        heads,
        kv_heads,
        dqk,
        dv,
        shared,
        causal,
    };
    let mut full: Vec<Row> =
        MODELS.iter().flat_map(|&model| BATCHES.iter().map(move |&batch| row(model, batch, true))).collect();
    full.push(row(MODELS[0], [1, 1024], true));
    full.push(row(MODELS[0], [16, 1024], true));
    full.push(row([128, 128, 128, 128, 0], [1, 4096], true));
    full.push(row([16, 16, 64, 64, 0], [1, 16384], true));
    full.push(row(MODELS[3], [1, 16384], false));
    full.push(row(MODELS[4], [1, 16384], false));
    let small = [row([4, 2, 128, 128, 0], [2, 70], true), row([3, 3, 192, 128, 64], [2, 70], true)];
    for row in bench.pick(&full, 4, &small) {
        let Row { b, len, heads, kv_heads, dqk, dv, .. } = row;
        bench.case(&format!("ragged {b} x {len}, heads {heads} / {kv_heads}, {dqk} / {dv}"), |bench| case(bench, row));
    }
}

fn case(bench: &mut Bench, row: Row) -> Result<(), String> {
    let Row { b, len, heads, kv_heads, dqk, dv, shared, causal } = row;
    let (args, options) =
        (arguments(bench, row), RaggedAttentionOptions { softmax_scale: (dqk as f32).powf(-0.5), causal });
    let path = explain_path(&args.problem(), &bench.device).path.to_string();
    let call = || ragged_attention(args.clone(), &options).map_err(|error| error.to_string());
    let (out, lse) = call()?;
    let difference = check(bench, &args, &options, len, (out, lse))?;
    let times = bench.timer.measure(call)?;
    // A causal query sees half of the keys, on average.
    let seen = if causal { len as f64 / 2.0 } else { len as f64 };
    let flops = 2.0 * (b * heads * len) as f64 * seen * (dqk + dv) as f64;
    let rows = heads * (dqk + dv) + kv_heads * (dqk - shared + dv) + shared;
    let bytes = (b * len * rows * bench.dtype.size()) as f64;
    let volume = Volume { flops: Some(flops), bytes: Some(bytes) };
    let shape = [
        ("b", json!(b)),
        ("s_q", json!(len)),
        ("h_q", json!(heads)),
        ("h_kv", json!(kv_heads)),
        ("dqk", json!(dqk)),
        ("dv", json!(dv)),
        ("shared", json!(shared)),
        ("causal", json!(causal)),
    ];
    bench.report.row("ragged", &shape, &times, volume, &[("path", json!(path)), ("rel_rms", rounded(difference, 8))]);
    Ok(())
}

fn arguments(bench: &Bench, Row { b, len, heads, kv_heads, dqk, dv, shared, .. }: Row) -> RaggedAttentionArgs {
    let (device, tokens) = (&bench.device, b * len);
    let rows = |heads: usize, width| data::normal([tokens, heads, width], bench.dtype, device);
    let cu_seqlens = data::ints((0..=b).map(|i| (i * len) as i32).collect(), [b + 1], device);
    let (k, k_pe, v) = match shared {
        0 => (rows(kv_heads, dqk), None, rows(kv_heads, dv)),
        shared => {
            let kv = rows(kv_heads, dqk - shared + dv);
            let k_pe = data::normal([tokens, shared], bench.dtype, device);
            (kv.clone().narrow(2, 0, dqk - shared), Some(k_pe), kv.narrow(2, dqk - shared, dv))
        }
    };
    RaggedAttentionArgs { q: rows(heads, dqk), k, k_pe, v, cu_seqlens, cu_seqlens_k: None }
}

/// The last token of the last sequence, which sees all of it, in the first and the last head.
fn check(
    bench: &Bench,
    args: &RaggedAttentionArgs,
    options: &RaggedAttentionOptions,
    len: usize,
    (out, lse): (Tensor<3>, Tensor<2>),
) -> Result<f64, String> {
    let ([tokens, heads, dv], [_, kv_heads, _]) = (out.dims(), args.k.dims());
    let mut difference = data::Difference::default();
    for h in [0, heads - 1] {
        let rows = |tensor: &Tensor<3>, h: usize, n: usize| tensor.clone().slice([tokens - n..tokens, h..h + 1]);
        let kv_head = h / (heads / kv_heads);
        let mut k = rows(&args.k, kv_head, len);
        if let Some(k_pe) = &args.k_pe {
            let k_pe = k_pe.clone().slice(tokens - len..tokens).unsqueeze_dim(1);
            k = Tensor::cat(vec![k, k_pe], 2);
        }
        let (q, k) = (data::floats(rows(&args.q, h, 1))?, data::floats(k)?);
        let v = data::floats(rows(&args.v, kv_head, len))?;
        let keys = data::Rows { keys: &k, values: &v, stride: dv, width: dv };
        let expected = data::attend(&q, &keys, f64::from(options.softmax_scale));
        let lse = data::floats(lse.clone().slice([tokens - 1..tokens, h..h + 1]))?;
        difference.add(&data::floats(rows(&out, h, 1))?, lse[0], &expected);
    }
    difference.check(bench.dtype)
}
