//! Inputs, and the same attention on the host in f64.

use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData};
use burn_mla::ops::cache::{Pool, RowFormat, new_pool};
use burn_mla::ops::{WriteLatentArgs, write_latent};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cases::Bench;
use crate::common::KvCacheArg;

/// Random numbers per call: a cache has more than 2^31.
const CHUNK: usize = 1 << 28;

/// What an output may differ from f64, relative in root mean square, for a dtype.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        _ => 2e-3,
    }
}

/// What a log-sum-exp may differ from f64.
pub const LSE_TOLERANCE: f64 = 2e-3;

/// A generator that gives the same numbers in every run.
pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// The numbers below `n` in random order.
pub fn permutation(n: usize, rng: &mut ChaCha8Rng) -> Vec<i32> {
    let mut numbers: Vec<i32> = (0..n as i32).collect();
    numbers.shuffle(rng);
    numbers
}

/// Normal numbers with deviation 1, row after row in memory.
pub fn normal<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    // Burn pads the rows of some tensors, but not of those of one dimension.
    random(shape.iter().product(), dtype, device).reshape(shape)
}

/// A cache as the operations want it, of normal numbers.
pub fn pool(shape: [usize; 3], dtype: FloatDType, device: &Device) -> Tensor<3> {
    let len = shape.iter().product();
    let pool = new_pool(shape, dtype, device).unwrap_or_else(|error| panic!("a cache of {shape:?}: {error}"));
    let mut pool = pool.reshape([len]);
    for start in (0..len).step_by(CHUNK) {
        let end = len.min(start + CHUNK);
        pool = pool.slice_assign(start..end, random(end - start, dtype.into(), device));
    }
    pool.reshape(shape)
}

/// The same, stored as `--kv-cache` says, with 64 rotary channels.
pub fn rows(shape: [usize; 3], bench: &Bench) -> Result<Pool, String> {
    if bench.kv_cache != Some(KvCacheArg::Fp8) {
        return Ok(pool(shape, FloatDType::from(bench.dtype), &bench.device).into());
    }
    // DeepSeek-V3's rows, and DeepSeek-V4's.
    let format = if shape[2] == 576 { RowFormat::Fp8 { rope: 64 } } else { RowFormat::Fp8E8m0 { rope: 64 } };
    in_fp8(shape, format, bench)
}

/// The same in a format of FP8.
pub fn in_fp8(shape: [usize; 3], format: RowFormat, bench: &Bench) -> Result<Pool, String> {
    let dense = pool(shape, FloatDType::from(bench.dtype), &bench.device);
    let [pages, page_size, width] = shape;
    let slots = pages * page_size;
    let cache = Pool::new(shape, FloatDType::from(bench.dtype), format, &bench.device);
    let mut cache = cache.map_err(|error| error.to_string())?;
    let rows = dense.reshape([slots, width]);
    for start in (0..slots).step_by(CHUNK / width) {
        let end = slots.min(start + CHUNK / width);
        let latent = rows.clone().slice(start..end);
        let slots = ints((start as i32..end as i32).collect(), [end - start], &bench.device);
        let written = write_latent(WriteLatentArgs { cache, slots, latent, rope: None });
        cache = written.map_err(|refused| refused.error.to_string())?;
    }
    Ok(cache)
}

/// Weights: normal numbers with deviation 0.02, row after row in memory.
pub fn weights<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let len = shape.iter().product();
    let draw = |len: usize| Tensor::<1>::random([len], Distribution::Normal(0.0, 0.02), (device, dtype));
    if len <= CHUNK {
        return draw(len).reshape(shape);
    }
    let mut all = Tensor::<1>::empty([len], (device, dtype));
    for start in (0..len).step_by(CHUNK) {
        let end = len.min(start + CHUNK);
        all = all.slice_assign(start..end, draw(end - start));
    }
    all.reshape(shape)
}

/// So many token ids of a vocabulary.
pub fn token_ids(len: usize, vocab: usize, rng: &mut ChaCha8Rng) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(0..vocab as u32)).collect()
}

fn random(len: usize, dtype: DType, device: &Device) -> Tensor<1> {
    Tensor::random([len], Distribution::Normal(0.0, 1.0), (device, dtype))
}

/// Integers, row after row in memory.
pub fn ints<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    let len = values.len();
    Tensor::<1, Int>::from_data(TensorData::new(values, [len]), (device, DType::I32)).reshape(shape)
}

/// The numbers of a tensor.
pub fn floats<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, String> {
    tensor.into_data().convert::<f32>().try_to_vec().map_err(|error| format!("{error:?}"))
}

/// The numbers of a tensor.
pub fn read_ints<const D: usize>(tensor: Tensor<D, Int>) -> Result<Vec<i32>, String> {
    tensor.into_data().convert::<i32>().try_to_vec().map_err(|error| format!("{error:?}"))
}

/// Keys `[n, q.len()]` and values `[n, stride]`, of which the first `width` channels count.
pub struct Rows<'a> {
    pub keys: &'a [f32],
    pub values: &'a [f32],
    pub stride: usize,
    pub width: usize,
}

/// One query over all keys: its output, and the log-sum-exp.
pub fn attend(q: &[f32], rows: &Rows, scale: f64) -> (Vec<f64>, f64) {
    let scores: Vec<f64> = rows.keys.chunks_exact(q.len()).map(|key| scale * dot(q, key)).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
    let mut out = vec![0.0; rows.width];
    for (score, value) in scores.iter().zip(rows.values.chunks_exact(rows.stride)) {
        let weight = (score - most).exp() / sum;
        out.iter_mut().zip(value).for_each(|(out, &value)| *out += weight * f64::from(value));
    }
    (out, most + sum.ln())
}

/// The product of a row with a row of a matrix.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// How far the device's results are from those of the host.
#[derive(Debug, Default)]
pub struct Difference {
    error: f64,
    norm: f64,
    lse: f64,
}

impl Difference {
    /// Adds a row of output and its log-sum-exp.
    pub fn add(&mut self, out: &[f32], lse: f32, expected: &(Vec<f64>, f64)) {
        for (&actual, expected) in out.iter().zip(&expected.0) {
            self.error += (f64::from(actual) - expected).powi(2);
            self.norm += expected.powi(2);
        }
        // Not `max`, which drops NaN.
        let lse = (f64::from(lse) - expected.1).abs();
        if lse.is_nan() || lse > self.lse {
            self.lse = lse;
        }
    }

    /// Adds numbers that have no log-sum-exp.
    pub fn add_numbers(&mut self, actual: &[f32], expected: Vec<f64>) {
        self.add(actual, 0.0, &(expected, 0.0));
    }

    /// The relative difference in root mean square, if both are small.
    pub fn check(&self, dtype: DType) -> Result<f64, String> {
        let relative = (self.error / self.norm).sqrt();
        if relative < tolerance(dtype) && self.lse < LSE_TOLERANCE {
            return Ok(relative);
        }
        Err(format!("wrong result: the output differs by {relative:.1e} (relative), the lse by {:.1e}", self.lse))
    }
}
