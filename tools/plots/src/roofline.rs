//! TFLOP/s by FLOPs for each byte, below what memory and matrix products allow.

use crate::measurement::Measurement;
use crate::svg::{Anchor, Svg, color, number, short};

const SIZE: [f64; 2] = [720.0, 400.0];
const LEFT: f64 = 60.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 340.0;
/// Points of different programs for the same case lie beside one another.
const BESIDE: f64 = 7.0;

/// A logarithmic axis, from and to a value at two coordinates.
struct Axis {
    values: [f64; 2],
    at: [f64; 2],
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let part = (value / self.values[0]).ln() / (self.values[1] / self.values[0]).ln();
        self.at[0] + part * (self.at[1] - self.at[0])
    }

    /// 1, 2 and 5 of each decade.
    fn ticks(&self) -> Vec<f64> {
        let decades = (-1..6).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
        decades.filter(|tick| (self.values[0]..=self.values[1]).contains(tick)).collect()
    }
}

pub fn draw(measurement: &Measurement, title: &str) -> String {
    let (memory, matmul) = (measurement.memory_gbps, measurement.matmul_tflops);
    let least = measurement.cases.iter().flat_map(|case| case.values.values()).copied().fold(matmul, f64::min);
    let intensities = measurement.cases.iter().filter_map(|case| case.flop_per_byte);
    let most = intensities.clone().fold(1e3 * matmul / memory, f64::max);
    let x = Axis { values: [0.7 * intensities.fold(most, f64::min), 1.4 * most], at: [LEFT, RIGHT] };
    let y = Axis { values: [0.6 * least, 1.2 * matmul], at: [BOTTOM, TOP] };
    let mut svg = Svg::new(SIZE);
    svg.text([LEFT, 16.0], Anchor::Start, " font-weight=\"bold\"", title);
    svg.text([LEFT, 32.0], Anchor::Start, "", &measurement.origin());
    svg.legend([LEFT, 50.0], &measurement.peers());
    axes(&mut svg, &x, &y);
    roof(&mut svg, &x, &y, [memory, matmul]);
    for (number, &peer) in measurement.peers().iter().enumerate() {
        let mut d = String::new();
        let beside = (number as f64 - 0.5 * (measurement.peers().len() - 1) as f64) * BESIDE;
        for case in &measurement.cases {
            if let (Some(intensity), Some(&tflops)) = (case.flop_per_byte, case.values.get(peer)) {
                d += &format!("M{} {}h0", short(x.at(intensity) + beside), short(y.at(tflops)));
            }
        }
        svg.line(color(number), &d, " stroke-width=\"6\" stroke-linecap=\"round\" stroke-opacity=\".75\"");
    }
    for (group, at) in groups(measurement, &x) {
        svg.text([at, BOTTOM - 6.0], Anchor::Middle, "", &group);
    }
    svg.finish(title)
}

fn axes(svg: &mut Svg, x: &Axis, y: &Axis) {
    let mut grid = String::new();
    for tick in x.ticks() {
        let at = x.at(tick);
        svg.text([at, BOTTOM + 15.0], Anchor::Middle, "", &number(tick));
        grid += &format!("M{} {TOP}V{BOTTOM}", short(at));
    }
    for tick in y.ticks() {
        let at = y.at(tick);
        svg.text([LEFT - 5.0, at + 4.0], Anchor::End, "", &number(tick));
        grid += &format!("M{LEFT} {}H{RIGHT}", short(at));
    }
    svg.rule(&grid, " stroke-opacity=\".2\"");
    svg.text(
        [0.5 * (LEFT + RIGHT), BOTTOM + 34.0],
        Anchor::Middle,
        "",
        "FLOP for each byte of keys, queries and results",
    );
    let middle = 0.5 * (TOP + BOTTOM);
    let turned = format!(" transform=\"rotate(-90 16 {middle})\"");
    svg.text([16.0, middle], Anchor::Middle, &turned, "TFLOP/s");
}

fn roof(svg: &mut Svg, x: &Axis, y: &Axis, [memory, matmul]: [f64; 2]) {
    let (ridge, first) = (1e3 * matmul / memory, x.values[0].max(1e3 * y.values[0] / memory));
    let slope = format!("M{} {}L", short(x.at(first)), short(y.at(first * memory / 1e3)));
    let flat = format!("{} {}H{RIGHT}", short(x.at(ridge)), short(y.at(matmul)));
    svg.rule(&(slope + &flat), " stroke-width=\"1.5\"");
    let (at, up) = ((first * ridge).sqrt(), |y: f64| y - 8.0);
    let place = [x.at(at) - 6.0, up(y.at(at * memory / 1e3))];
    svg.text(place, Anchor::End, "", &format!("memory: {} GB/s", number(memory)));
    svg.text([RIGHT, up(y.at(matmul)) + 3.0], Anchor::End, "", &format!("bf16 matmul: {} TFLOP/s", number(matmul)));
}

/// Each group with the middle of its points, where it is named.
fn groups(measurement: &Measurement, x: &Axis) -> Vec<(String, f64)> {
    let mut groups: Vec<(String, Vec<f64>)> = Vec::new();
    for case in &measurement.cases {
        let Some(at) = case.flop_per_byte.map(|intensity| x.at(intensity)) else { continue };
        match groups.iter_mut().find(|(group, _)| *group == case.group) {
            Some((_, all)) => all.push(at),
            None => groups.push((case.group.clone(), vec![at])),
        }
    }
    groups.into_iter().map(|(group, all)| (group, all.iter().sum::<f64>() / all.len() as f64)).collect()
}
