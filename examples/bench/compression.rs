//! What DeepSeek-V4 does around its attention: `norm_rope`, and `compress_kv` when all sequences of a batch fill a window.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_mla::ops::{CompressKvArgs, CompressKvOptions, NormRopeArgs, NormRopeOptions, compress_kv, norm_rope};
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::report::Volume;

const EPS: f32 = 1e-6;

/// The section.
pub fn run(bench: &mut Bench) {
    // Queries of a decode step of 64 sequences, and their keys.
    for (tokens, heads, width) in bench.pick(&[(64, 128, 512), (64, 1, 512), (4096, 128, 512)], 2, &[(3, 2, 32)]) {
        bench.case(&format!("norm_rope {tokens} x {heads}"), |bench| norm_rope_case(bench, [tokens, heads, width]));
    }
    for (b, window, overlap, width) in
        bench.pick(&[(64, 4, true, 512), (64, 4, true, 128), (64, 128, false, 512)], 2, &[(2, 2, true, 32)])
    {
        bench.case(&format!("compress_kv {window}"), |bench| compress_case(bench, b, window, overlap, width));
    }
}

/// The operation, and what it is made of as tensor operations.
fn norm_rope_case(bench: &mut Bench, [tokens, heads, width]: [usize; 3]) -> Result<(), String> {
    let (device, pairs) = (bench.device.clone(), width / 16);
    let angles = || data::normal([tokens, pairs], DType::F32, &device);
    let (cos, sin) = (angles().cos(), angles().sin());
    let x = data::normal([tokens, heads, width], bench.dtype, &device);
    let args = NormRopeArgs { x: x.clone(), weight: None, cos: cos.clone(), sin: sin.clone() };
    let options = NormRopeOptions { norm_eps: Some(EPS), norm_whole_head: true, inverse: false };
    let call = || norm_rope(args.clone(), &options).map_err(|error| error.to_string());
    let composed = || Ok::<_, String>(in_tensor_operations(&x, &cos, &sin));
    let of_last = |x: Tensor<3>| data::floats(x.slice(tokens - 1..tokens));
    let (fused, expected) = (of_last(call()?)?, of_last(composed()?)?);
    let difference = fused.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    if difference.is_nan() || f64::from(difference) > 4.0 * data::tolerance(bench.dtype) {
        return Err(format!("off by {difference}"));
    }
    let bytes = Some((2 * tokens * heads * width * bench.dtype.size()) as f64);
    let shape = [("tokens", json!(tokens)), ("h_q", json!(heads)), ("d", json!(width))];
    for (op, times) in
        [("norm_rope", bench.timer.measure(call)?), ("norm_rope_composed", bench.timer.measure(composed)?)]
    {
        bench.report.row(op, &shape, &times, Volume { flops: None, bytes }, &[]);
    }
    Ok(())
}

fn in_tensor_operations(x: &Tensor<3>, cos: &Tensor<2>, sin: &Tensor<2>) -> Tensor<3> {
    let ([tokens, heads, width], [_, pairs]) = (x.dims(), cos.dims());
    let wide = x.clone().cast(FloatDType::F32);
    let mean = wide.clone().square().mean_dim(2);
    let normed = wide / mean.add_scalar(EPS).sqrt();
    let still = width - 2 * pairs;
    let rotary = normed.clone().narrow(2, still, 2 * pairs).reshape([tokens, heads, pairs, 2]);
    let (u, v) = (rotary.clone().narrow(3, 0, 1), rotary.narrow(3, 1, 1));
    let [cos, sin] = [cos, sin].map(|table| table.clone().reshape([tokens, 1, pairs, 1]));
    let rotated = [u.clone() * cos.clone() - v.clone() * sin.clone(), v * cos + u * sin];
    let rotated = Tensor::cat(rotated.into(), 3).reshape([tokens, heads, 2 * pairs]);
    Tensor::cat(vec![normed.narrow(2, 0, still), rotated], 2).cast(FloatDType::from(x.dtype()))
}

/// One new token of each sequence, which is the last of its window.
fn compress_case(bench: &mut Bench, b: usize, window: usize, overlap: bool, width: usize) -> Result<(), String> {
    let (device, windows) = (bench.device.clone(), if overlap { 2 } else { 1 });
    let (channels, carried) = (windows * width, windows * window);
    let position = 9 * carried - 1;
    let f32s = |shape: [usize; 2]| data::normal(shape, DType::F32, &device);
    let ints = |values: Vec<i32>| {
        let len = values.len();
        data::ints(values, [len], &device)
    };
    let slot = |block: usize| (block * carried + position % carried) as i32;
    let angles = || data::normal([b, 1, width / 16], DType::F32, &device);
    let (kv_gates, bias, weight) =
        (f32s([b, 2 * channels]), f32s([window, channels]), f32s([1, width]).reshape([width]));
    let (rows, slots) = (ints((0..b as i32).collect()), ints((0..b).map(slot).collect()));
    let (ends, starts) = (ints((0..=b as i32).collect()), ints(vec![position as i32; b]));
    let (cos, sin) = (angles().cos(), angles().sin());
    let options = CompressKvOptions { overlap, norm_eps: EPS, dtype: FloatDType::from(bench.dtype) };
    let mut state = Some(data::pool([b, carried, 2 * channels], FloatDType::F32, &device));
    let times = bench.timer.measure(|| {
        let args = CompressKvArgs {
            kv_gates: kv_gates.clone(),
            state: state.take().ok_or("the state is gone")?,
            state_rows: rows.clone(),
            state_slots: slots.clone(),
            cu_seqlens: ends.clone(),
            starts: starts.clone(),
            position_bias: bias.clone(),
            norm_weight: weight.clone(),
            cos: cos.clone(),
            sin: sin.clone(),
            cache: None,
        };
        let written = compress_kv(args, &options).map_err(|refused| refused.error.to_string())?;
        state = Some(written.state);
        Ok(written.entries)
    })?;
    let bytes = Some((b * carried * 2 * channels * 4) as f64);
    let shape = [("b", json!(b)), ("window", json!(window)), ("overlap", json!(overlap)), ("d", json!(width))];
    bench.report.row("compress_kv", &shape, &times, Volume { flops: None, bytes }, &[]);
    Ok(())
}
