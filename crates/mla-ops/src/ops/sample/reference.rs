//! What the kernels must compute: a row at a time, by sorting it.

use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use super::backend::SampleBackend;
use super::params::WORDS;
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl SampleBackend for Flex {
    fn sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        seen: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>) {
        sample(tensor(logits), tensor(rows), tensor(seen)).into_flex()
    }
}

fn sample(logits: Tensor<2>, rows: Tensor<2, Int>, seen: Tensor<2, Int>) -> (Tensor<1, Int>, Tensor<2, Int>) {
    let ([batch, width], [masks, words], device) = (logits.dims(), seen.dims(), logits.device());
    let mut logits: Vec<f32> = logits.try_into_vec_as().expect("computed on the CPU");
    let rows: Vec<u32> = host(rows).into_iter().map(i32::cast_unsigned).collect();
    let mut bits = host(seen);
    let mut tokens = Vec::with_capacity(batch);
    for (logits, params) in logits.chunks_mut(width).zip(rows.chunks(WORDS)) {
        let params = Params::read(params);
        let seen = Some(params.seen_row).filter(|&row| row < masks).map(|row| &mut bits[row * words..][..words]);
        if let Some(seen) = &seen {
            penalise(logits, seen, params.repetition_penalty);
        }
        let token = choose(logits, &params);
        if let (Some(seen), Some(token)) = (seen, token) {
            seen[token / 32] |= (1u32 << (token % 32)).cast_signed();
        }
        tokens.push(token.map_or(-1, |token| token as i32));
    }
    (device_i32(tokens, [batch], &device), device_i32(bits, [masks, words], &device))
}

/// The parameters of a row.
struct Params {
    temperature: f32,
    /// 0 keeps all.
    top_k: usize,
    /// In units of 2^-32; 0 keeps all.
    top_p: u32,
    min_p_logarithm: f32,
    repetition_penalty: f32,
    seed: [u32; 2],
    position: u32,
    seen_row: usize,
}

impl Params {
    fn read(words: &[u32]) -> Self {
        Self {
            temperature: f32::from_bits(words[0]),
            top_k: words[1] as usize,
            top_p: words[2],
            min_p_logarithm: f32::from_bits(words[3]),
            repetition_penalty: f32::from_bits(words[4]),
            seed: [words[5], words[6]],
            position: words[7],
            seen_row: words[8] as usize,
        }
    }
}

fn penalise(logits: &mut [f32], seen: &[i32], penalty: f32) {
    if penalty == 1.0 {
        return;
    }
    for (token, logit) in logits.iter_mut().enumerate() {
        if (seen[token / 32] >> (token % 32)) & 1 == 1 {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// The token of a row whose logits have their penalties; none if all are NaN or minus infinity.
fn choose(logits: &[f32], params: &Params) -> Option<usize> {
    let is_token = |logit: f32| !logit.is_nan() && logit > f32::NEG_INFINITY;
    let finite = |token: usize| logits[token].min(f32::MAX);
    let mut tokens: Vec<usize> = (0..logits.len()).filter(|&token| is_token(logits[token])).collect();
    // The sort is stable: of equal logits the lowest id comes first, and -0 is equal to 0.
    tokens.sort_by(|&a, &b| finite(b).partial_cmp(&finite(a)).expect("no NaN"));
    let &best = tokens.first()?;
    if params.temperature < 1e-37 {
        return Some(best);
    }
    let scale = Scale::new(finite(best), params.temperature, logits.len());
    let weight = |token: &usize| scale.weight(finite(*token));
    if params.top_k > 0 && params.top_k < tokens.len() {
        let last = finite(tokens[params.top_k - 1]);
        tokens.truncate(tokens.partition_point(|&token| finite(token) >= last));
    }
    if params.top_p > 0 {
        let total: u64 = tokens.iter().map(weight).sum();
        let enough = (u128::from(total) * u128::from(params.top_p)).div_ceil(1 << 32) as u64;
        let mut sum = 0;
        let is_last = |token: &usize| {
            sum += weight(token);
            sum >= enough
        };
        if let Some(last) = tokens.iter().position(is_last) {
            let last = finite(tokens[last]);
            tokens.truncate(tokens.partition_point(|&token| finite(token) >= last));
        }
    }
    let least = scale.logit_at(params.min_p_logarithm);
    tokens.truncate(tokens.partition_point(|&token| finite(token) >= least));
    let total: u64 = tokens.iter().map(weight).sum();
    let [first, second, ..] = philox([params.position, 0, 0, 0], params.seed);
    let random = u64::from(first) << 32 | u64::from(second);
    let mut left = ((u128::from(total) * u128::from(random)) >> 64) as u64;
    tokens.into_iter().find(|token| {
        let weight = weight(token);
        let is_here = left < weight;
        left = left.wrapping_sub(weight);
        is_here
    })
}

/// What logits of a row weigh.
struct Scale {
    half_largest: f32,
    half_temperature: f32,
    /// The upper word of the largest weight.
    one: f32,
}

impl Scale {
    fn new(largest: f32, temperature: f32, tokens: usize) -> Self {
        let one = (1u32 << (31 - tokens.next_power_of_two().ilog2())) as f32;
        Self { half_largest: largest * 0.5, half_temperature: temperature.min(1e37) * 0.5, one }
    }

    /// `e^((logit - largest) / temperature)`, in units of which the largest has `one * 2^32`.
    fn weight(&self, logit: f32) -> u64 {
        // Halves: the difference of two finite numbers may not be finite.
        let below = logit * 0.5 - self.half_largest;
        // The logarithm of 2^64 is 44.4.
        let farthest = self.half_temperature * -44.5;
        if below < farthest {
            return 0;
        }
        let weight = (below / self.half_temperature).exp() * self.one;
        (f64::from(weight) * 2f64.powi(32)) as u64
    }

    /// The largest logit plus a logarithm at this temperature.
    fn logit_at(&self, logarithm: f32) -> f32 {
        (self.half_largest + logarithm * self.half_temperature).max(f32::MIN * 0.5) * 2.0
    }
}

/// Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011, section 3.3.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let product = u64::from(a) * u64::from(b);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = product(0xd251_1f53, counter[0]);
        let (high1, low1) = product(0xcd9e_8d57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}
