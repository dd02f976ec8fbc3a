//! What the device can do, as a measure of what the operations reach.

use burn::tensor::{DType, Distribution, Tensor};
use serde_json::{Map, Value, json};

use crate::cases::{Bench, Size};
use crate::data;
use crate::meta::dtype_name;
use crate::report::rounded;
use crate::timing::caught;

type Ceilings = Map<String, Value>;
type Part = fn(&mut Bench, &mut Ceilings) -> Result<(), String>;

/// The section; `key` says when it ran.
pub fn run(bench: &mut Bench, key: &str) {
    let mut found = Ceilings::new();
    let parts: [(&str, Part); 3] = [("memory", memory), ("matmul", matmul), ("small", small)];
    for (name, part) in parts {
        bench.case(&format!("ceilings, {key}: {name}"), |bench| part(bench, &mut found));
    }
    bench.report.ceilings(key, found);
}

/// GB/s of copies (read and written bytes counted) and of reading. Burn has no copy that is known to be the best one,
/// so several are tried.
fn memory(bench: &mut Bench, found: &mut Ceilings) -> Result<(), String> {
    let len: usize = match bench.size {
        Size::Full => 1 << 30,
        Size::Quick => 1 << 28,
        Size::Smoke => 1 << 16,
    };
    let bytes = (len * 4) as f64;
    let a: Tensor<1> = Tensor::random([len], Distribution::Normal(0.0, 1.0), (&bench.device, DType::F32));
    let mut b = Some(a.zeros_like());
    let mut copies = Ceilings::new();
    let mut best: f64 = 0.0;
    let mut note = |name: &str, us: Result<f64, String>| match us {
        Ok(us) => {
            best = best.max(2.0 * bytes / us / 1e3);
            copies.insert(name.into(), rounded(2.0 * bytes / us / 1e3, 1));
        }
        Err(error) => drop(copies.insert(name.into(), json!(error))),
    };
    note("add_scalar", caught(|| bench.timer.measure_stream(|| Ok(a.clone().add_scalar(1.0)))));
    let assign = || {
        let target = b.take().ok_or("the target is gone")?;
        b = Some(target.slice_assign(0..len, a.clone()));
        Ok(())
    };
    note("slice_assign", caught(|| bench.timer.measure_stream(assign)));
    drop(b);
    let us = bench.timer.measure_stream(|| Ok(a.clone().sum()))?;
    bench.copy_gbps = bench.copy_gbps.or((best > 0.0).then_some(best));
    found.insert("copy_GBps".into(), rounded(best, 1));
    found.insert("copies_GBps".into(), Value::Object(copies));
    found.insert("read_GBps".into(), rounded(bytes / us / 1e3, 1));
    Ok(())
}

/// TFLOP/s of a square matmul by Burn.
fn matmul(bench: &mut Bench, found: &mut Ceilings) -> Result<(), String> {
    let m: usize = if bench.size == Size::Smoke { 64 } else { 8192 };
    let [x, y] = [0, 1].map(|_| data::normal([m, m], bench.dtype, &bench.device));
    let us = bench.timer.measure_stream(|| Ok(x.clone().matmul(y.clone())))?;
    found.insert(
        format!("{}_matmul_{m}_TFLOPs", dtype_name(bench.dtype)),
        rounded(2.0 * (m as f64).powi(3) / us / 1e6, 1),
    );
    Ok(())
}

/// The least that the method reads, and the time of the flush.
fn small(bench: &mut Bench, found: &mut Ceilings) -> Result<(), String> {
    let mut tiny: Option<Tensor<1>> = Some(Tensor::zeros([1], (&bench.device, DType::F32)));
    let times = bench.timer.measure(|| {
        tiny = tiny.take().map(|tiny| tiny.add_scalar(1.0));
        Ok(())
    })?;
    let mut empty = json!({
        "us": rounded(times.us, 3),
        "us_stream": rounded(times.us_stream, 3),
        "us_host": rounded(times.us_host, 3),
        "us_stream_host": rounded(times.us_stream_host, 3),
        "timing": times.timing,
    });
    if let Some(reason) = times.graph_error {
        empty["graph_error"] = json!(reason);
    }
    found.insert("empty_kernel_us".into(), empty);
    found.insert("flush_us".into(), rounded(bench.timer.measure_flush()?, 1));
    Ok(())
}
