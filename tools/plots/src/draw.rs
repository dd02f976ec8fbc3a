//! The pictures. What is drawn can be read on a white page and on a dark one: of both the contrast (WCAG 2.1) is 3 or more, of text 4.

use crate::Measurement;
use crate::pick::OURS;

const GREY: &str = "#6e7781";
/// Of the programs, ours first.
const COLORS: [&str; 4] = ["#d9570f", "#2f81f7", "#a371f7", "#2da44e"];
const BOLD: &str = " font-weight=\"bold\"";
const END: &str = " text-anchor=\"end\"";
const MIDDLE: &str = " text-anchor=\"middle\"";
const BAR: f64 = 10.0;

struct Svg(String);

impl Svg {
    fn text(&mut self, [x, y]: [f64; 2], more: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.0 += &format!("<text x=\"{}\" y=\"{}\"{more}>{text}</text>\n", short(x), short(y));
    }

    fn path(&mut self, paint: &str, d: &str) {
        self.0 += &format!("<path {paint} d=\"{d}\"/>\n");
    }

    fn rule(&mut self, more: &str, d: &str) {
        self.path(&format!("fill=\"none\" stroke=\"{GREY}\"{more}"), d);
    }

    fn legend(&mut self, [mut x, y]: [f64; 2], peers: &[&str]) {
        for (peer, color) in peers.iter().zip(COLORS) {
            self.path(&format!("fill=\"{color}\""), &format!("M{} {}h9v9h-9z", short(x), short(y - 9.0)));
            self.text([x + 13.0, y], "", peer);
            x += 30.0 + 6.3 * peer.len() as f64;
        }
    }

    fn finish(self, height: f64) -> String {
        let (body, height) = (self.0, short(height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"720\" height=\"{height}\" viewBox=\"0 0 720 {height}\" \
             font-family=\"sans-serif\" font-size=\"11\" fill=\"{GREY}\">\n{body}</svg>\n"
        )
    }
}

/// The picture of this name.
pub fn picture(name: &str, measurement: &Measurement) -> String {
    let [title, axis] = match name {
        "decode" => {
            ["mla_decode: bf16, latents of 576 / 512 channels", "FLOP for each byte of keys, queries and results"]
        }
        "prefill" => ["Attention of prompts: bf16, causal", "TFLOP/s; the dashed line is a bf16 matmul of 8192 x 8192"],
        _ => [
            "Whole models: bf16, random weights",
            "% of what memory (decode) or the products with the weights (prefill) allow; numbers are tokens/s",
        ],
    };
    let mut peers: Vec<&str> =
        measurement.cases.iter().flat_map(|case| case.values.keys().map(String::as_str)).collect();
    peers.sort_by_key(|&peer| (peer != OURS, peer));
    peers.dedup();
    let mut svg = Svg(String::new());
    svg.text([8.0, 16.0], BOLD, title);
    svg.text([8.0, 32.0], "", &measurement.origin);
    svg.legend([8.0, 52.0], &peers);
    match name {
        "decode" => roofline(svg, measurement, &peers, axis),
        _ => bars(svg, measurement, &peers, axis, name == "models"),
    }
}

/// Bars of all programs for each case, in TFLOP/s or in per cent of each case's own bound.
fn bars(mut svg: Svg, measurement: &Measurement, peers: &[&str], axis: &str, of_bound: bool) -> String {
    let (left, top, most) = (190.0, 62.0, if of_bound { 100.0 } else { measurement.matmul_tflops });
    let x = |value: f64| left + 470.0 * value / most;
    let (mut y, mut group) = (top, "");
    let (mut bars, mut names, mut numbers) = (vec![String::new(); peers.len()], String::new(), String::new());
    for case in &measurement.cases {
        if case.group != group {
            (y, group) = (y + 18.0, &case.group);
            svg.text([8.0, y - 4.0], BOLD, group);
        }
        let middle = y + 0.5 * BAR * case.values.len() as f64 + 4.0;
        names += &format!("<tspan x=\"{}\" y=\"{}\">{}</tspan>\n", left - 6.0, short(middle), case.name);
        for (bar, peer) in bars.iter_mut().zip(peers) {
            let Some(&value) = case.values.get(*peer) else { continue };
            let end = x(case.bound.map_or(value, |bound| 100.0 * value / bound));
            *bar += &format!("M{left} {}H{}v9H{left}z", short(y), short(end));
            numbers +=
                &format!("<tspan x=\"{}\" y=\"{}\">{}</tspan>\n", short(end + 3.0), short(y + 8.0), number(value));
            y += BAR;
        }
        y += 6.0;
    }
    let mut grid = String::new();
    for tick in (0..).map(|i| f64::from(i) * if of_bound { 10.0 } else { 100.0 }).take_while(|&tick| tick <= most) {
        grid += &format!("M{} {top}V{}", short(x(tick)), short(y));
        svg.text([x(tick), y + 14.0], MIDDLE, &tick.to_string());
    }
    svg.rule(" stroke-opacity=\".2\"", &grid);
    for (bar, color) in bars.iter().zip(COLORS) {
        svg.path(&format!("fill=\"{color}\""), bar);
    }
    svg.rule(" stroke-dasharray=\"4 3\"", &format!("M{} {top}V{}", short(x(most)), short(y)));
    svg.0 += &format!("<text font-size=\"9\">{numbers}</text>\n<text{END}>{names}</text>\n");
    svg.text([712.0, y + 32.0], END, axis);
    svg.finish(y + 40.0)
}

/// TFLOP/s by FLOPs for each byte, both logarithmic, below what memory and matrix products allow.
fn roofline(mut svg: Svg, measurement: &Measurement, peers: &[&str], axis: &str) -> String {
    let (left, right, top, bottom) = (60.0, 700.0, 60.0, 340.0);
    let (slope, matmul) = (measurement.memory_gbps / 1e3, measurement.matmul_tflops);
    let cases = || measurement.cases.iter().filter_map(|case| Some((case, case.intensity?)));
    let (low, high) = cases().fold((f64::MAX, matmul / slope), |(low, high), (_, x)| (low.min(x), high.max(x)));
    let least = cases().flat_map(|(case, _)| case.values.values()).fold(matmul, |least, &value| least.min(value));
    let (xs, ys) = ([0.7 * low, 1.4 * high], [0.6 * least, 1.2 * matmul]);
    let part = |value: f64, [from, to]: [f64; 2]| (value / from).ln() / (to / from).ln();
    let (x, y) = (|value| left + (right - left) * part(value, xs), |value| bottom + (top - bottom) * part(value, ys));
    let mut grid = String::new();
    for tick in (0..5).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power))) {
        if (xs[0]..xs[1]).contains(&tick) {
            svg.text([x(tick), bottom + 15.0], MIDDLE, &number(tick));
            grid += &format!("M{} {top}V{bottom}", short(x(tick)));
        }
        if (ys[0]..ys[1]).contains(&tick) {
            svg.text([left - 5.0, y(tick) + 4.0], END, &number(tick));
            grid += &format!("M{left} {}H{right}", short(y(tick)));
        }
    }
    svg.rule(" stroke-opacity=\".2\"", &grid);
    svg.text([0.5 * (left + right), bottom + 34.0], MIDDLE, axis);
    svg.text([16.0, 200.0], " text-anchor=\"middle\" transform=\"rotate(-90 16 200)\"", "TFLOP/s");
    let first = xs[0].max(ys[0] / slope);
    let [from, to] = [[x(first), y(first * slope)], [x(matmul / slope), y(matmul)]];
    svg.rule("", &format!("M{} {}L{} {}H{right}", short(from[0]), short(from[1]), short(to[0]), short(to[1])));
    let memory = format!("memory: {} GB/s", number(1e3 * slope));
    svg.text([0.5 * (from[0] + to[0]) - 6.0, 0.5 * (from[1] + to[1]) - 8.0], END, &memory);
    svg.text([right, to[1] - 5.0], END, &format!("bf16 matmul: {} TFLOP/s", number(matmul)));
    for (i, (&peer, color)) in peers.iter().zip(COLORS).enumerate() {
        // Beside one another.
        let shift = 7.0 * (i as f64 - 0.5 * (peers.len() - 1) as f64);
        let point = |(case, intensity): (&crate::Case, f64)| {
            case.values.get(peer).map(|&tflops| format!("M{} {}h0", short(x(intensity) + shift), short(y(tflops))))
        };
        let points: String = cases().filter_map(point).collect();
        svg.path(
            &format!("stroke=\"{color}\" stroke-width=\"6\" stroke-linecap=\"round\" stroke-opacity=\".75\""),
            &points,
        );
    }
    let mut groups: Vec<&str> = cases().map(|(case, _)| case.group.as_str()).collect();
    groups.sort_unstable();
    groups.dedup();
    for group in groups {
        let own = cases().filter(|(case, _)| case.group == group);
        let (sum, count) = own.fold((0.0, 0), |(sum, count), (_, intensity)| (sum + x(intensity), count + 1));
        svg.text([sum / f64::from(count), bottom - 6.0], MIDDLE, group);
    }
    svg.finish(390.0)
}

/// A coordinate to a tenth.
fn short(x: f64) -> String {
    ((10.0 * x).round() / 10.0).to_string()
}

/// At least two digits.
fn number(value: f64) -> String {
    short(if value < 9.95 { value } else { value.round() })
}
