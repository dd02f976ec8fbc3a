//! Sequences for `compress_kv`, their calls in chunks, and the entries in plain loops in f64.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::cache::{Pool, new_pool};
use mla_ops::{CompressKvArgs, CompressKvOptions, CompressedKv, EntryCache, compress_kv};
use rand::RngExt;
use rand::seq::{IndexedRandom, SliceRandom};

use crate::ops_fixture::{bits, floats, ints, lens_i32, random, rng, rounded, tolerance, values};

const EPS: f64 = 1e-6;

/// What rounding does to the mean of the tokens, which are below 1: a gate of up to 10 below the highest has an exponential with
/// so great an error. Where all channels of the mean are small, the norm makes this large.
const MEAN_ERROR: f64 = 5e-7;

/// The bits of entries, by sequence and window.
pub type EntryBits = BTreeMap<(usize, usize), Vec<u32>>;

/// Sequences to be compressed.
#[derive(Debug, Clone)]
pub struct Case {
    overlap: bool,
    /// m.
    window: usize,
    /// d.
    width: usize,
    /// dr / 2.
    pairs: usize,
    /// Tokens of each sequence, `[tokens, 2 C]`.
    sequences: Vec<Vec<f64>>,
    /// `[m, C]`.
    bias: Vec<f64>,
    /// `[d]`.
    norm: Vec<f64>,
    /// The block of the state of each sequence; the others are no sequence's.
    blocks: Vec<usize>,
}

/// The new tokens of a sequence in a call.
#[derive(Debug, Clone, Copy)]
pub struct Chunk {
    pub sequence: usize,
    pub start: usize,
    pub len: usize,
}

impl Case {
    pub fn new(overlap: bool, window: usize, [width, pairs]: [usize; 2], lens: &[usize]) -> Self {
        let mut rng = rng(81);
        let channels = if overlap { 2 * width } else { width };
        // Gates of a size at which some tokens weigh much more than others: a wrong token then shows.
        let token = |rng: &mut _| -> Vec<f64> {
            let mut row = random(rng, 2 * channels, DType::F32);
            row[channels..].iter_mut().for_each(|gate| *gate *= 4.0);
            row
        };
        let sequences = lens.iter().map(|&len| (0..len).flat_map(|_| token(&mut rng)).collect()).collect();
        let mut blocks: Vec<usize> = (0..lens.len() + 2).collect();
        blocks.shuffle(&mut rng);
        let bias = random(&mut rng, window * channels, DType::F32);
        let norm = random(&mut rng, width, DType::F32);
        Self { overlap, window, width, pairs, sequences, bias, norm, blocks }
    }

    /// 2 C.
    pub fn row(&self) -> usize {
        2 * self.bias.len() / self.window
    }

    /// L.
    pub fn carried(&self) -> usize {
        if self.overlap { 2 * self.window } else { self.window }
    }

    fn len(&self, sequence: usize) -> usize {
        self.sequences[sequence].len() / self.row()
    }

    pub fn state_shape(&self) -> [usize; 3] {
        [self.blocks.len(), self.carried(), self.row()]
    }

    pub fn options(&self, dtype: DType) -> CompressKvOptions {
        CompressKvOptions { overlap: self.overlap, norm_eps: EPS as f32, dtype: FloatDType::from(dtype) }
    }

    /// The slot of a position.
    fn slot(&self, sequence: usize, position: usize) -> usize {
        self.blocks[sequence] * self.carried() + position % self.carried()
    }

    /// Cosine and sine of a pair at the first position of a window.
    fn angle(&self, window: usize, pair: usize) -> [f64; 2] {
        let (sin, cos) = ((window * self.window) as f64 * 50.0_f64.powf(-(pair as f64) / self.pairs as f64)).sin_cos();
        [cos, sin].map(|value| rounded(value, DType::F32))
    }

    /// The entry of a window, and what the mean of its tokens is divided by in the norm.
    fn entry(&self, sequence: usize, window: usize) -> (Vec<f64>, f64) {
        let channels = self.row() / 2;
        let pooled: Vec<f64> = (0..self.width)
            .map(|channel| {
                let mut pairs = Vec::new();
                for place in 0..self.window {
                    let mut add = |window: usize, channel: usize| {
                        let row =
                            &self.sequences[sequence][(window * self.window + place) * self.row()..][..self.row()];
                        pairs.push((row[channels + channel] + self.bias[place * channels + channel], row[channel]));
                    };
                    add(window, if self.overlap { self.width + channel } else { channel });
                    if self.overlap && window > 0 {
                        add(window - 1, channel);
                    }
                }
                let sum: f64 = pairs.iter().map(|(gate, _)| gate.exp()).sum();
                pairs.iter().map(|(gate, key)| gate.exp() / sum * key).sum()
            })
            .collect();
        let root = (pooled.iter().map(|value| value * value).sum::<f64>() / self.width as f64 + EPS).sqrt();
        let mut entry: Vec<f64> = pooled.iter().zip(&self.norm).map(|(value, weight)| value / root * weight).collect();
        let straight = self.width - 2 * self.pairs;
        for pair in 0..self.pairs {
            let [cos, sin] = self.angle(window, pair);
            let at = straight + 2 * pair;
            let (u, v) = (entry[at], entry[at + 1]);
            (entry[at], entry[at + 1]) = (u * cos - v * sin, v * cos + u * sin);
        }
        (entry, root)
    }

    /// The windows that a chunk fills.
    fn full(&self, chunk: &Chunk) -> std::ops::Range<usize> {
        chunk.start / self.window..(chunk.start + chunk.len) / self.window
    }

    /// The arguments of a call with room for so many entries, and what the state holds after it.
    pub fn args(&self, chunks: &[Chunk], entries: usize, state: &[f64], device: &Device) -> (CompressKvArgs, Vec<f64>) {
        let (batch, row) = (chunks.len(), self.row());
        let (mut kv_gates, mut slots, mut after) = (Vec::new(), Vec::new(), state.to_vec());
        let (mut ends, mut cos, mut sin) = (vec![0], Vec::new(), Vec::new());
        for chunk in chunks {
            let new = &self.sequences[chunk.sequence][chunk.start * row..][..chunk.len * row];
            kv_gates.extend_from_slice(new);
            for (i, token) in new.chunks_exact(row).enumerate() {
                let slot = self.slot(chunk.sequence, chunk.start + i);
                let stays = chunk.len - i <= self.carried();
                slots.push(if stays { slot as i32 } else { -1 });
                after[slot * row..][..row].copy_from_slice(token);
            }
            ends.push(slots.len() as i32);
            let full = self.full(chunk);
            for (window, pair) in (0..entries).flat_map(|j| (0..self.pairs).map(move |pair| (full.start + j, pair))) {
                let [c, s] = if full.contains(&window) { self.angle(window, pair) } else { [f64::NAN; 2] };
                cos.push(c);
                sin.push(s);
            }
        }
        let numbers = |number: fn(&Self, &Chunk) -> usize| -> Vec<i32> {
            lens_i32(&chunks.iter().map(|chunk| number(self, chunk)).collect::<Vec<_>>())
        };
        let f32s = |values: &[f64], shape: [usize; 2]| floats(values, shape, DType::F32, device);
        let angles = |values: &[f64]| floats(values, [batch, entries, self.pairs], DType::F32, device);
        let args = CompressKvArgs {
            kv_gates: f32s(&kv_gates, [slots.len(), row]),
            state: pool(state, self.state_shape(), device),
            state_rows: ints(&numbers(|case, chunk| case.blocks[chunk.sequence]), [batch], device),
            state_slots: ints(&slots, [slots.len()], device),
            cu_seqlens: ints(&ends, [batch + 1], device),
            starts: ints(&numbers(|_, chunk| chunk.start), [batch], device),
            position_bias: f32s(&self.bias, [self.window, row / 2]),
            norm_weight: floats(&self.norm, [self.width], DType::F32, device),
            cos: angles(&cos),
            sin: angles(&sin),
            cache: None,
        };
        (args, after)
    }

    /// Entries of a call: those of full windows are the oracle's, the others 0. Adds the bits of the former, by sequence and window.
    #[track_caller]
    pub fn assert_entries(&self, what: &str, chunks: &[Chunk], actual: Tensor<3>, all: &mut EntryBits) {
        let ([batch, entries, width], dtype) = (actual.dims(), actual.dtype());
        assert_eq!((batch, width), (chunks.len(), self.width), "{what}");
        let actual = values(actual);
        for (b, chunk) in chunks.iter().enumerate() {
            let full = self.full(chunk);
            for j in 0..entries {
                let entry = &actual[(b * entries + j) * width..][..width];
                if j >= full.len() {
                    assert!(entry.iter().all(|&value| value == 0.0), "{what}: entry {j} of {chunk:?} is {entry:?}");
                    continue;
                }
                let bits = entry.iter().map(|value| value.to_bits()).collect();
                all.insert((chunk.sequence, full.start + j), bits);
                let (expected, root) = self.entry(chunk.sequence, full.start + j);
                let largest = expected.iter().fold(0.0_f64, |max, value| max.max(value.abs()));
                let bound = tolerance(dtype) * largest + MEAN_ERROR / root;
                for (channel, (&value, expected)) in entry.iter().zip(expected).enumerate() {
                    let close = (f64::from(value) - expected).abs() <= bound;
                    let what = format!("{what}: entry {j} of {chunk:?}, channel {channel}");
                    assert!(close, "{what} is {value}, expected {expected} +- {bound:.1e}");
                }
            }
        }
    }

    /// Calls with these numbers of new tokens of each sequence, in which the sequences stand in any order. Before each call the
    /// rows of the state that no window needs become NaN. The bits of all entries.
    pub fn check(&self, calls: &[Vec<usize>], device: &Device, dtype: DType) -> EntryBits {
        let mut all = EntryBits::new();
        let (mut rng, mut done) = (rng(82), vec![0; self.sequences.len()]);
        let mut state = vec![f64::NAN; self.state_shape().iter().product()];
        for lens in calls {
            let chunk = |sequence: usize| Chunk { sequence, start: done[sequence], len: lens[sequence] };
            let mut chunks: Vec<Chunk> = (0..lens.len()).map(chunk).collect();
            chunks.shuffle(&mut rng);
            let entries = chunks.iter().map(|chunk| self.full(chunk).len()).max().unwrap_or(0) + rng.random_range(0..2);
            self.forget(&done, &mut state);
            let (args, after) = self.args(&chunks, entries, &state, device);
            let (cache, slots) = self.cache(&chunks, entries, dtype, device);
            let args = CompressKvArgs { cache: Some(cache), ..args };
            let what = format!("{} x {} of {dtype:?} on {device:?}, {chunks:?}", self.window, self.width);
            let compressed = compress_kv(args, &self.options(dtype)).unwrap_or_else(|error| panic!("{error}"));
            let CompressedKv { entries: actual, state: written, cache } = compressed;
            assert_eq!((actual.dims()[1], actual.dtype()), (entries, dtype), "{what}");
            self.assert_cached(&what, &slots, &actual, cache.expect("the one that it was given"));
            self.assert_entries(&what, &chunks, actual, &mut all);
            let expected = floats(&after, self.state_shape(), DType::F32, &Device::flex());
            assert!(bits(&written) == bits(&expected), "{what}: the state");
            state = after;
            done.iter_mut().zip(lens).for_each(|(done, len)| *done += len);
        }
        all
    }

    /// An empty cache of entries, and where those of these chunks go: in any order, those of windows that are not full nowhere.
    fn cache(&self, chunks: &[Chunk], entries: usize, dtype: DType, device: &Device) -> (EntryCache, Vec<i32>) {
        let rows = 4 * (chunks.len() * entries + 1);
        let mut places: Vec<i32> = (0..rows as i32).collect();
        places.shuffle(&mut rng(85));
        let full = chunks.iter().flat_map(|chunk| (0..entries).map(|j| j < self.full(chunk).len()));
        let slots: Vec<i32> = full.zip(places).map(|(is_full, slot)| if is_full { slot } else { -1 }).collect();
        let cache = new_pool([rows / 4, 4, self.width], FloatDType::from(dtype), device).expect("small");
        (EntryCache { cache: cache.into(), slots: ints(&slots, [slots.len()], device) }, slots)
    }

    /// Rows of the cache are the entries that went there, and else as they were.
    #[track_caller]
    fn assert_cached(&self, what: &str, slots: &[i32], entries: &Tensor<3>, cache: Pool) {
        let bytes = self.width * entries.dtype().size();
        let (entries, cache) = (bits(entries), bits(&cache.dense()));
        for (row, cached) in cache.chunks_exact(bytes).enumerate() {
            match slots.iter().position(|&slot| slot == row as i32) {
                Some(entry) => assert!(cached == &entries[entry * bytes..][..bytes], "{what}: row {row}"),
                None => assert!(cached.iter().all(|&bits| bits == 0), "{what}: row {row}"),
            }
        }
    }

    /// NaN in all rows of the state that no entry of these sequences will need.
    fn forget(&self, done: &[usize], state: &mut [f64]) {
        let row = self.row();
        let mut kept = vec![f64::NAN; state.len()];
        for (sequence, &end) in done.iter().enumerate() {
            let window = (end / self.window).saturating_sub(usize::from(self.overlap));
            for position in window * self.window..end {
                let at = self.slot(sequence, position) * row;
                kept[at..at + row].copy_from_slice(&state[at..at + row]);
            }
        }
        state.copy_from_slice(&kept);
    }

    /// Calls that take `len(tokens left)` tokens of each sequence until none is left.
    pub fn calls(&self, mut len: impl FnMut(usize) -> usize) -> Vec<Vec<usize>> {
        let mut left: Vec<usize> = (0..self.sequences.len()).map(|sequence| self.len(sequence)).collect();
        let mut calls = Vec::new();
        while left.iter().any(|left| *left > 0) {
            let lens: Vec<usize> = left.iter().map(|&left| len(left).min(left)).collect();
            left.iter_mut().zip(&lens).for_each(|(left, len)| *left -= len);
            calls.push(lens);
        }
        calls
    }

    /// In chunks of no tokens, of one, of about a window and of several.
    pub fn random_calls(&self, seed: u64) -> Vec<Vec<usize>> {
        let (mut rng, m) = (rng(seed), self.window);
        self.calls(|_| *[0, 1, m - 1, m, m + 1, 3 * m + 2].choose(&mut rng).expect("some"))
    }
}

/// A state that lies in memory row by row: CUDA's allocator pads the rows of tensors that are not made of one dimension.
fn pool(values: &[f64], shape: [usize; 3], device: &Device) -> Tensor<3> {
    floats(values, [values.len()], DType::F32, device).reshape(shape)
}
