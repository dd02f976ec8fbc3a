//! Entries of windows that begin in the state and end in the new tokens, against sums in f64. What is not needed holds NaN.

use cubecl::prelude::*;
use mla_kernels::compress_kv::{CompressKvArgs, CompressKvSizes, launch};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, upload};

const EPS: f32 = 1e-6;
/// New tokens of each sequence and the position of the first.
const LENS: [usize; 4] = [9, 0, 1, 14];
const STARTS: [usize; 4] = [0, 5, 7, 6];
/// Blocks of the state, and who has which.
const BLOCKS: usize = 6;
const ROWS: [i32; 4] = [4, 0, 5, 2];
/// Entries of a sequence.
const ENTRIES: usize = 4;

struct Inputs {
    sizes: CompressKvSizes,
    /// Of each sequence all tokens up to the last new one, `[tokens, 2 C]`.
    tokens: Vec<Vec<f32>>,
    bias: Vec<f32>,
    norm: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Inputs {
    fn new(window: usize, width: usize, pairs: usize, overlap: bool) -> Self {
        let (tokens, batch) = (LENS.iter().sum(), LENS.len());
        let elem = f32::cube_type();
        let sizes = CompressKvSizes {
            tokens,
            batch,
            entries: ENTRIES,
            blocks: BLOCKS,
            window,
            width,
            pairs,
            overlap,
            gates_elem: elem,
            elem,
        };
        let channels = width * if overlap { 2 } else { 1 };
        let tokens = |b: usize| random(b as u32 + 1, (STARTS[b] + LENS[b]) * 2 * channels);
        let angles = random(7, batch * ENTRIES * pairs);
        Self {
            sizes,
            tokens: (0..batch).map(tokens).collect(),
            bias: random(8, window * channels),
            norm: random(9, width),
            cos: angles.iter().map(|angle| (3.0 * angle).cos()).collect(),
            sin: angles.iter().map(|angle| (3.0 * angle).sin()).collect(),
        }
    }

    /// C.
    fn channels(&self) -> usize {
        self.bias.len() / self.sizes.window
    }

    /// The new tokens, and the state with those before them that a window needs.
    fn rows(&self) -> (Vec<f32>, Vec<f32>) {
        let (m, row) = (self.sizes.window, 2 * self.channels());
        let carried = self.channels() / self.sizes.width * m;
        let mut state = vec![f32::NAN; BLOCKS * carried * row];
        let mut new = Vec::new();
        for (b, tokens) in self.tokens.iter().enumerate() {
            let window = (STARTS[b] / m).saturating_sub(usize::from(self.sizes.overlap));
            for position in window * m..STARTS[b] {
                let at = (ROWS[b] as usize * carried + position % carried) * row;
                state[at..at + row].copy_from_slice(&tokens[position * row..][..row]);
            }
            new.extend_from_slice(&tokens[STARTS[b] * row..]);
        }
        (new, state)
    }

    fn run(&self, client: &Client) -> Vec<f32> {
        let (kv_gates, state) = self.rows();
        let mut ends = vec![0];
        LENS.iter().for_each(|len| ends.push(ends[ends.len() - 1] + *len as i32));
        let floats = |values: &[f32]| arg(&upload(client, values), values.len());
        let ints = |values: &[i32]| arg(&upload(client, values), values.len());
        let unwritten = vec![f32::NAN; LENS.len() * ENTRIES * self.sizes.width];
        let entries = upload(client, &unwritten);
        let args = CompressKvArgs {
            kv_gates: floats(&kv_gates),
            state: floats(&state),
            state_rows: ints(&ROWS),
            cu_seqlens: ints(&ends),
            starts: ints(&STARTS.map(|start| start as i32)),
            position_bias: floats(&self.bias),
            norm_weight: floats(&self.norm),
            cos: floats(&self.cos),
            sin: floats(&self.sin),
            entries: arg(&entries, unwritten.len()),
            writes: None,
            sizes: self.sizes,
            norm_eps: EPS,
        };
        launch(client, args).expect("launches");
        read(client, entries)
    }

    /// The entry of a window of sequence `b`, which is the `j`-th of the call.
    fn expected(&self, b: usize, window: usize, j: usize) -> Vec<f64> {
        let (m, width, channels) = (self.sizes.window, self.sizes.width, self.channels());
        let before = usize::from(self.sizes.overlap && window > 0);
        let pooled: Vec<f64> = (0..width)
            .map(|channel| {
                let (mut sum, mut total) = (0.0, 0.0);
                for position in (window - before) * m..(window + 1) * m {
                    let own = self.sizes.overlap && position >= window * m;
                    let channel = if own { width + channel } else { channel };
                    let token = &self.tokens[b][position * 2 * channels..][..2 * channels];
                    let gate = token[channels + channel] + self.bias[position % m * channels + channel];
                    total += f64::from(gate).exp();
                    sum += f64::from(gate).exp() * f64::from(token[channel]);
                }
                sum / total
            })
            .collect();
        let mean = pooled.iter().map(|value| value * value).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
        let mut entry: Vec<f64> = pooled.iter().zip(&self.norm).map(|(v, w)| v * scale * f64::from(*w)).collect();
        for pair in 0..self.sizes.pairs {
            let angle = (b * ENTRIES + j) * self.sizes.pairs + pair;
            let (cos, sin) = (f64::from(self.cos[angle]), f64::from(self.sin[angle]));
            let at = width - 2 * self.sizes.pairs + 2 * pair;
            let (u, v) = (entry[at], entry[at + 1]);
            (entry[at], entry[at + 1]) = (u * cos - v * sin, v * cos + u * sin);
        }
        entry
    }
}

#[rstest]
fn windows_of_state_and_new_tokens(
    #[values(1, 3, 4)] window: usize,
    #[values((8, 2), (33, 16), (300, 7))] (width, pairs): (usize, usize),
    #[values(false, true)] overlap: bool,
) {
    let inputs = Inputs::new(window, width, pairs, overlap);
    for_each_client(|client| {
        let actual = inputs.run(client);
        for (at, entry) in actual.chunks_exact(width).enumerate() {
            let (b, j) = (at / ENTRIES, at % ENTRIES);
            let number = STARTS[b] / window + j;
            let expected = match number < (STARTS[b] + LENS[b]) / window {
                true => inputs.expected(b, number, j),
                false => vec![0.0; width],
            };
            for (channel, (value, expected)) in entry.iter().zip(expected).enumerate() {
                let what = format!("window {number} of sequence {b}, channel {channel} of {width}");
                assert!((f64::from(*value) - expected).abs() <= 2e-5, "{what}: {value}, expected {expected}");
            }
        }
    });
}
