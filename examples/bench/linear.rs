//! `linear`: products of rows with dense weights of published sizes, and with routers in f32.

use burn::tensor::{DType, Tensor};
use burn_mla::ops::{Determinism, Weight, linear};
use rand::RngExt;
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::data;
use crate::report::Volume;

/// Model, and `[out, in]` of its weights, each once; the gate and up rows of V2-Lite's dense layer are one weight.
const WEIGHTS: [(&str, [usize; 2]); 15] = [
    ("v2-lite", [2048, 2048]),
    ("v2-lite", [3072, 2048]),
    ("v2-lite", [576, 2048]),
    ("v2-lite", [21888, 2048]),
    ("v2-lite", [2048, 10944]),
    ("v2-lite", [102_400, 2048]),
    ("v3", [1536, 7168]),
    ("v3", [24576, 1536]),
    ("v3", [576, 7168]),
    ("v3", [7168, 16384]),
    ("v3", [18432, 7168]),
    ("v3", [7168, 18432]),
    ("v4-flash", [1024, 4096]),
    ("v4-flash", [32768, 1024]),
    ("v4-flash", [4096, 8192]),
];
/// Their routers, whose weights are in f32.
const ROUTERS: [(&str, [usize; 2]); 3] = [("v2-lite", [64, 2048]), ("v3", [256, 7168]), ("v4-flash", [256, 4096])];
const ROWS: [usize; 8] = [1, 8, 16, 64, 256, 1024, 4096, 16384];
/// Logits are computed of the last token of each request alone.
const LOGIT_ROWS: usize = 64;
/// Outputs of the last row that are checked.
const CHECKED: usize = 32;

/// Model and `[out, in]` of each weight.
pub fn weights(size: Size) -> Vec<(&'static str, [usize; 2])> {
    if size == Size::Smoke { vec![("tiny", [40, 24])] } else { WEIGHTS.to_vec() }
}

/// Whether a weight with so many outputs is that of the logits.
pub fn is_head(outputs: usize) -> bool {
    outputs > 100_000
}

/// The section.
pub fn run(bench: &mut Bench) {
    let routers = if bench.size == Size::Smoke { vec![("tiny", [8, 24])] } else { ROUTERS.to_vec() };
    let dtype = bench.dtype;
    let weights = weights(bench.size).into_iter().map(|weight| (weight, dtype));
    for ((model, [n, k]), dtype) in weights.chain(routers.into_iter().map(|router| (router, DType::F32))) {
        bench.case(&format!("linear {model} {n} x {k} {dtype:?}: the weight"), |bench| {
            let weight = weight(bench, [n, k], dtype)?;
            for m in bench.rows(&ROWS) {
                if !is_head(n) || m <= LOGIT_ROWS {
                    bench.case(&format!("linear {model} {m} x {n} x {k} {dtype:?}"), |bench| {
                        case(bench, model, m, &weight)
                    });
                }
            }
            Ok(())
        });
    }
}

/// Of `[out, in]`: numbers, or `--blocks`, but for a router's.
pub fn weight(bench: &Bench, [n, k]: [usize; 2], dtype: DType) -> Result<Weight, String> {
    let Some(blocks) = bench.blocks.filter(|_| dtype == bench.dtype) else {
        return Ok(data::weights([n, k], dtype, &bench.device).into());
    };
    Weight::from_blocks(blocks.draw([1, n, k], dtype, &bench.device), [n, k]).map_err(|error| error.to_string())
}

fn case(bench: &mut Bench, model: &str, m: usize, weight: &Weight) -> Result<(), String> {
    let w = &weight.dense();
    let [n, k] = w.dims();
    let x = data::normal([m, k], bench.dtype, &bench.device);
    let call = || linear(x.clone(), weight, Determinism::Fast).map_err(|error| error.to_string());
    let difference = check(bench, &x, w, call()?)?;
    let times = bench.timer.measure(call)?;
    let flops = Some(2.0 * m as f64 * n as f64 * k as f64);
    let bytes = Some((m * k * bench.dtype.size() + m * n * w.dtype().size()) as f64 + weight.bytes() as f64);
    let blocks = bench.blocks.filter(|_| w.dtype() == bench.dtype).map(|blocks| format!("{blocks:?}"));
    let weight_dtype = json!(blocks.unwrap_or_else(|| format!("{:?}", w.dtype())).to_lowercase());
    let shape =
        [("model", json!(model)), ("m", json!(m)), ("out", json!(n)), ("in", json!(k)), ("weight", weight_dtype)];
    let extra = [("rel_rms", crate::report::rounded(difference, 8))];
    bench.report.row("linear", &shape, &times, Volume { flops, bytes }, &extra);
    Ok(())
}

/// Some outputs of the last row against f64.
fn check(bench: &Bench, x: &Tensor<2>, w: &Tensor<2>, out: Tensor<2>) -> Result<f64, String> {
    let ([m, k], [n, _]) = (x.dims(), w.dims());
    let mut rng = data::rng(n as u64);
    let columns: Vec<i32> = (0..CHECKED).map(|_| rng.random_range(0..n as i32)).collect();
    let x = data::floats(x.clone().slice(m - 1..m))?;
    let out = data::floats(out.slice(m - 1..m))?;
    let rows = data::floats(w.clone().select(0, data::ints(columns.clone(), [CHECKED], &bench.device)))?;
    let actual: Vec<f32> = columns.iter().map(|&column| out[column as usize]).collect();
    let mut difference = data::Difference::default();
    difference.add_numbers(&actual, rows.chunks_exact(k).map(|row| data::dot(&x, row)).collect());
    difference.check(w.dtype())
}
