//! Bars of all programs for each case.

use crate::measurement::Measurement;
use crate::svg::{Anchor, Svg, color, number, short};

const LEFT: f64 = 190.0;
const RIGHT: f64 = 660.0;
const WIDTH: f64 = 720.0;
const BAR: f64 = 10.0;
const TOP: f64 = 62.0;

/// How long bars are.
pub struct Kind {
    axis: &'static str,
    /// Parts of each case's own bound, in per cent.
    of_bound: bool,
    /// Between lines of the grid.
    step: f64,
}

/// All cases have one bound.
pub const TFLOPS: Kind =
    Kind { axis: "TFLOP/s; the dashed line is a bf16 matmul of 8192 x 8192 (cuBLAS)", of_bound: false, step: 100.0 };
/// Each case has its own.
pub const TOKENS: Kind = Kind {
    axis: "% of what memory (decode) or the products with the weights (prefill) allow; numbers are tokens/s",
    of_bound: true,
    step: 10.0,
};

pub fn draw(measurement: &Measurement, title: &str, kind: &Kind) -> String {
    let peers = measurement.peers();
    let bound = if kind.of_bound { 100.0 } else { measurement.matmul_tflops };
    let x = |value: f64| LEFT + (RIGHT - LEFT) * value / bound;
    let (mut y, mut group) = (TOP, "");
    let (mut bars, mut texts) = (vec![String::new(); peers.len()], Vec::new());
    for case in &measurement.cases {
        if case.group != group {
            group = &case.group;
            y += 18.0;
            texts.push(([8.0, y - 4.0], Anchor::Start, " font-weight=\"bold\"", group.to_string()));
        }
        let here = case.values.len() as f64 * BAR;
        texts.push(([LEFT - 6.0, y + 0.5 * here + 4.0], Anchor::End, "", case.name.clone()));
        for (bar, peer) in bars.iter_mut().zip(&peers) {
            let Some(&value) = case.values.get(*peer) else { continue };
            let end = x(if kind.of_bound { 100.0 * value / case.bound } else { value });
            *bar += &format!("M{LEFT} {}H{}v{}H{LEFT}z", short(y), short(end), BAR - 1.0);
            texts.push(([end + 3.0, y + BAR - 2.0], Anchor::Start, " font-size=\"9\"", number(value)));
            y += BAR;
        }
        y += 6.0;
    }
    let mut svg = Svg::new([WIDTH, y + 40.0]);
    svg.text([8.0, 16.0], Anchor::Start, " font-weight=\"bold\"", title);
    svg.text([8.0, 32.0], Anchor::Start, "", &measurement.origin());
    svg.legend([8.0, 52.0], &peers);
    let mut grid = String::new();
    for tick in (0..).map(|i| f64::from(i) * kind.step).take_while(|&tick| tick <= bound) {
        grid += &format!("M{} {TOP}V{}", short(x(tick)), short(y));
        svg.text([x(tick), y + 14.0], Anchor::Middle, "", &format!("{tick}"));
    }
    svg.rule(&grid, " stroke-opacity=\".2\"");
    for (number, bar) in bars.iter().enumerate() {
        svg.area(color(number), bar);
    }
    svg.rule(&format!("M{} {TOP}V{}", short(x(bound)), short(y)), " stroke-dasharray=\"4 3\"");
    for (at, anchor, more, text) in texts {
        svg.text(at, anchor, more, &text);
    }
    svg.text([WIDTH - 8.0, y + 32.0], Anchor::End, "", kind.axis);
    svg.finish(title)
}
