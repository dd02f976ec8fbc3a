//! Whether the tables choose what is the fastest: on both sides of each number of rows at which a table's choice changes, all that
//! could be chosen is measured.

use burn::tensor::Device;
use burn_mla::ops::measure::{ForcedChoice, LinearChoice, linear_choice, linear_choices};
use burn_mla::ops::{Determinism, LinearProblem, StackedWeight, linear, linear_by_head};
use serde_json::json;

use crate::cases::{Bench, Size};
use crate::report::rounded;
use crate::{data, decode, experts, linear as products};

/// How much slower than the best a choice may be.
const TOLERATED: f64 = 1.1;
/// Times the best one from which a choice is not measured in detail, and microseconds of launches that the host's clock sees, too.
const FAR_OFF: f64 = 3.0;
const LAUNCH: f64 = 200.0;
/// Rows up to which tables are read. Beyond the second number borders follow each other at the same distance.
const MOST_ROWS: usize = 16384;
const MOST_BORDER_ROWS: usize = 4096;
/// Those of heads, of which a batch of requests has so many.
const MOST_HEAD_ROWS: usize = 256;
/// Those of logits, which a step has for each request.
const MOST_LOGIT_ROWS: usize = 256;

/// What could be chosen, and the microseconds that it takes; none where it fails.
pub type Measured = Vec<(String, Option<f64>)>;

/// All tables; with weights in blocks of codes that of dense products. `--batches` are rows that take the place of the borders. A choice
/// that is off is an error, so that the program says so when it ends.
pub fn run(bench: &mut Bench) {
    if bench.blocks.is_none() {
        heads(bench);
    }
    for (model, [n, k]) in products::weights(bench.size) {
        bench.case(&format!("linear {model} {n} x {k}: the weight"), |bench| {
            let weight = products::weight(bench, [n, k], bench.dtype)?;
            let dtype = bench.dtype;
            let problem = |rows| LinearProblem::dense([rows, k, n], dtype).with_weight_format(weight.format());
            let most = if products::is_head(n) { MOST_LOGIT_ROWS } else { most_rows(bench.size) };
            let rows =
                if bench.batches.is_empty() { borders(problem, most, &bench.device) } else { bench.batches.clone() };
            for rows in rows {
                bench.case(&format!("linear {model} {rows} x {n} x {k}"), |bench| {
                    let x = data::normal([rows, k], dtype, &bench.device);
                    let call = || linear(x.clone(), &weight, Determinism::Fast).map_err(|error| error.to_string());
                    let measured = forced(bench, linear_choices(&problem(rows), &bench.device), call);
                    judge(bench, &format!("linear {model} {rows} x {n} x {k}"), measured)
                });
            }
            Ok(())
        });
    }
    if bench.blocks.is_none() {
        experts::tables(bench);
        decode::tables(bench);
    }
}

/// The absorbed query and the values of attended latents, in the sizes of V2-Lite and V3.
fn heads(bench: &mut Bench) {
    let (dtype, device) = (bench.dtype, bench.device.clone());
    for (heads, inputs, outputs, carried) in
        [(16, 128, 512, 64), (16, 512, 128, 0), (128, 128, 512, 64), (128, 512, 128, 0)]
    {
        let problem = |rows| LinearProblem::by_head([rows, heads, inputs, outputs, carried], dtype);
        let weight: StackedWeight =
            data::weights([heads * outputs, inputs], dtype, &device).reshape([heads, outputs, inputs]).into();
        for rows in borders(problem, most_rows(bench.size).min(MOST_HEAD_ROWS), &device) {
            let name = format!("heads {heads}, {rows} x {outputs} x {inputs}");
            bench.case(&name, |bench| {
                let x = data::normal([rows, heads, inputs + carried], dtype, &device);
                let call = || linear_by_head(x.clone(), &weight, Determinism::Fast).map_err(|error| error.to_string());
                let measured = forced(bench, linear_choices(&problem(rows), &device), call);
                judge(bench, &name, measured)
            });
        }
    }
}

/// Rows up to which tables are read.
pub fn most_rows(size: Size) -> usize {
    if size == Size::Smoke { 8 } else { MOST_ROWS }
}

/// Numbers of rows on both sides of those at which a table chooses other tiles, and the first and the last.
pub fn borders(problem: impl Fn(usize) -> LinearProblem, most: usize, device: &Device) -> Vec<usize> {
    let choice = |rows| linear_choice(&problem(rows), device);
    let changes = (2..=most.min(MOST_BORDER_ROWS)).filter(|&rows| !choice(rows).has_tiles_of(&choice(rows - 1)));
    let mut rows: Vec<usize> = changes.flat_map(|rows| [rows - 1, rows]).chain([1, most]).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// A call with each of these choices. Those that take far longer than another are called once, by the host's clock.
pub fn forced<T>(
    bench: &mut Bench,
    choices: Vec<LinearChoice>,
    mut call: impl FnMut() -> Result<T, String> + Send,
) -> Measured {
    let mut best = f64::INFINITY;
    let measure = |choice| {
        let _forced = ForcedChoice::new(choice);
        let us = bench.timer.measure_once(&mut call).and_then(|once| {
            let is_far_off = once - LAUNCH > FAR_OFF * best;
            if is_far_off { Ok(once) } else { bench.timer.measure(&mut call).map(|times| times.us) }
        });
        best = us.iter().copied().fold(best, f64::min);
        (choice.to_string(), us.ok())
    };
    choices.into_iter().map(measure).collect()
}

/// Reports what was measured, of which the first is what the table chooses.
pub fn judge(bench: &mut Bench, name: &str, measured: Measured) -> Result<(), String> {
    let times = measured.iter().filter_map(|(choice, us)| Some((choice, (*us)?)));
    let best = times.min_by(|(_, one), (_, other)| one.total_cmp(other));
    let (Some((own, Some(own_us))), Some((best, us))) = (measured.first(), best) else {
        return Err("what the table chooses could not be measured".into());
    };
    let of_best = own_us / us;
    let all: Vec<String> = measured
        .iter()
        .map(|(choice, us)| format!("{choice}: {}", us.map_or("failed".into(), |us| format!("{us:.1}"))))
        .collect();
    let shape = [("case", json!(name))];
    let numbers = [
        ("chosen", json!(own)),
        ("us", rounded(*own_us, 2)),
        ("best", json!(best)),
        ("us_best", rounded(us, 2)),
        ("of_best", rounded(of_best, 3)),
        ("all", json!(all.join(", "))),
    ];
    bench.report.rate("table", &shape, &numbers);
    if of_best <= TOLERATED || bench.size == Size::Smoke {
        return Ok(());
    }
    Err(format!("the table chooses {own}, {own_us:.1} us, and {best} takes {us:.1} us"))
}
