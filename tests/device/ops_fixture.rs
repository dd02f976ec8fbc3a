//! Inputs of the operations, and the comparison with the oracle.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use half::{bf16, f16};
use mla_ops::cache::RowFormat;
use mla_ops::{MlaDecodeArgs, MlaDecodeOptions, MlaDecodeProblem, MlaPlan, MlaPlanArgs, MlaQuery, Path, Splits};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::devices::{is_blackwell, is_cuda, is_hopper};
use crate::hashes;
use crate::oracle::{self, State};

/// What a page table may hold past the end of a sequence.
pub const UNUSED_PAGE: i32 = 2_147_480_000;

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Numbers in -1 .. 1 that the dtype can hold, so that oracle and operation see the same ones.
pub fn random(rng: &mut ChaCha8Rng, n: usize, dtype: DType) -> Vec<f64> {
    (0..n).map(|_| rounded(rng.random_range(-1.0..1.0), dtype)).collect()
}

/// The nearest number that the dtype can hold.
pub fn rounded(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => f64::from(value as f32),
    }
}

pub fn floats<const D: usize>(values: &[f64], shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

pub fn ints<const D: usize>(values: &[i32], shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::I32))
}

pub fn lens_i32(lens: &[usize]) -> Vec<i32> {
    lens.iter().map(|&len| len as i32).collect()
}

/// The same tensor with two dimensions swapped in memory.
pub fn restrided<const D: usize>(tensor: Tensor<D>, a: usize, b: usize) -> Tensor<D> {
    let options = (&tensor.device(), tensor.dtype());
    Tensor::<D>::from_data(tensor.swap_dims(a, b).into_data(), options).swap_dims(a, b)
}

/// The bytes of the values: what "bit for bit" compares.
pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
    let bytes = tensor.to_data().as_bytes().to_vec();
    hashes::record(&bytes);
    bytes
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data();
    hashes::record(data.as_bytes());
    data.try_into_vec_as().expect("floats")
}

pub fn int_values<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    assert_eq!(tensor.dtype(), DType::I32);
    let data = tensor.into_data();
    hashes::record(data.as_bytes());
    data.try_into_vec_as().expect("i32")
}

/// The greatest error of `out`, relative to the greatest element of it.
///
/// f32: scores are sums of at most 576 products and outputs of at most 4096; with random signs their rounding errors
/// grow with the root of the length, to about 24 and 64 units of 6e-8, and an error of a score is a relative error of
/// its weight. f16 and bf16 round the result (4.9e-4 and 3.9e-3 between neighbours), and kernels that feed
/// matrix units round the weights too.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => 1e-5,
    }
}

/// The lse is f32 whatever the inputs are, and below about 10 in these tests.
const LSE_TOLERANCE: f64 = 1e-4;

/// Compares states. A row that sees nothing must be exactly 0 and -inf.
pub fn assert_state<const D: usize, const L: usize>(what: &str, actual: (Tensor<D>, Tensor<L>), expected: &State) {
    let (out, lse) = actual;
    let dtype = out.dtype();
    assert_eq!(lse.dtype(), DType::F32, "{what}: lse");
    assert_eq!(out.dims()[..L], lse.dims(), "{what}: rows of out and lse");
    assert_rows(what, dtype, &values(out), &values(lse), expected);
}

/// As [`assert_state`], of values that were read back; `dtype` is what `out` was computed in.
pub fn assert_rows(what: &str, dtype: DType, out: &[f32], lse: &[f32], expected: &State) {
    assert_eq!((out.len(), lse.len()), (expected.out.len(), expected.lse.len()), "{what}: sizes");
    let Some(width) = out.len().checked_div(lse.len()).filter(|&width| width > 0) else { return };
    let largest = expected.out.iter().fold(0.0_f64, |max, value| max.max(value.abs()));
    let bound = tolerance(dtype) * largest;
    let rows = out.chunks_exact(width).zip(expected.out.chunks_exact(width));
    for (row, ((out, expected_out), (&lse, &expected_lse))) in rows.zip(lse.iter().zip(&expected.lse)).enumerate() {
        if expected_lse == f64::NEG_INFINITY {
            assert_eq!(lse, f32::NEG_INFINITY, "{what}: lse of row {row}, which sees nothing");
            assert!(out.iter().all(|&value| value == 0.0), "{what}: row {row} sees nothing, but is {:?}", &out[..1]);
            continue;
        }
        // Magnitudes far above 10 occur in the tests of merge_state only; f32 holds them to 6e-8 of their size.
        let lse_bound = LSE_TOLERANCE.max(expected_lse.abs() * 2e-7);
        let close = (f64::from(lse) - expected_lse).abs() <= lse_bound;
        assert!(close, "{what}: lse of row {row} is {lse}, expected {expected_lse}");
        for (channel, (&value, &expected)) in out.iter().zip(expected_out).enumerate() {
            let close = (f64::from(value) - expected).abs() <= bound;
            assert!(close, "{what}: row {row}, channel {channel} is {value}, expected {expected} +- {bound:.1e}");
        }
    }
}

/// Each number within the tolerance of its size, or of 1 where it is smaller.
pub fn assert_close(what: &str, dtype: DType, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let off = (f64::from(*actual) - expected).abs();
        assert!(off <= tolerance(dtype) * expected.abs().max(1.0), "{what}: {actual} at {i}, expected {expected}");
    }
}

/// A problem for `mla_decode`.
#[derive(Debug, Clone)]
pub struct DecodeCase {
    pub lens: Vec<usize>,
    pub query_len: usize,
    pub heads: usize,
    pub page_size: usize,
    /// D and Dv.
    pub widths: (usize, usize),
    pub causal: bool,
    pub splits: Splits,
    pub dtype: DType,
    /// The query in two parts.
    pub parts: bool,
    /// With a plan that was made before.
    pub planned: bool,
    /// The factor of the scores, times the root of D.
    pub sharpness: f32,
    /// The implementation that is asked for.
    pub path: Option<Path>,
    /// Columns of the page table that no sequence needs.
    pub spare_pages: usize,
}

impl Default for DecodeCase {
    fn default() -> Self {
        Self {
            lens: vec![20, 0, 140],
            query_len: 1,
            heads: 3,
            page_size: 16,
            widths: (80, 64),
            causal: true,
            splits: Splits::Auto,
            dtype: DType::F32,
            parts: false,
            planned: false,
            // Scores of a size at which some keys weigh much more than others: a wrong key then shows.
            sharpness: 4.0,
            path: None,
            spare_pages: 1,
        }
    }
}

/// The values of a problem.
#[derive(Debug, Clone)]
pub struct DecodeInputs {
    pub case: DecodeCase,
    /// `[B, Sq, H, D]`.
    pub q: Vec<f64>,
    /// `[P, S, D]`; NaN in every row that belongs to no token.
    pub kv_cache: Vec<f64>,
    pub pages: usize,
    /// `[B, max_pages]`.
    pub page_table: Vec<i32>,
    pub max_pages: usize,
}

impl DecodeCase {
    /// Random values, on pages in random order. Some pages are never used.
    pub fn inputs(&self, seed: u64) -> DecodeInputs {
        self.inputs_of(seed, |rng| rng.random_range(-1.0..1.0))
    }

    /// The same of other values, rounded to what the dtype can hold.
    pub fn inputs_of(&self, seed: u64, value: fn(&mut ChaCha8Rng) -> f64) -> DecodeInputs {
        let mut rng = rng(seed);
        let random =
            |rng: &mut ChaCha8Rng, n| -> Vec<f64> { (0..n).map(|_| rounded(value(rng), self.dtype)).collect() };
        let (page_size, width) = (self.page_size, self.widths.0);
        let used: Vec<usize> = self.lens.iter().map(|len| len.div_ceil(page_size)).collect();
        let max_pages = used.iter().max().map_or(0, |most| most + self.spare_pages);
        let pages = used.iter().sum::<usize>() + 2;
        let mut ids: Vec<i32> = (0..pages as i32).collect();
        ids.shuffle(&mut rng);

        let mut page_table = vec![UNUSED_PAGE; self.lens.len() * max_pages];
        let mut kv_cache = vec![f64::NAN; pages * page_size * width];
        for (b, &len) in self.lens.iter().enumerate() {
            for page in 0..used[b] {
                let id = ids.pop().expect("enough pages");
                page_table[b * max_pages + page] = id;
                let tokens = page_size.min(len - page * page_size);
                let row = id as usize * page_size * width;
                kv_cache[row..row + tokens * width].copy_from_slice(&random(&mut rng, tokens * width));
            }
        }
        let q = random(&mut rng, self.rows() * width);
        DecodeInputs { case: self.clone(), q, kv_cache, pages, page_table, max_pages }
    }

    /// Query rows: the size of `[B, Sq, H]`.
    pub fn rows(&self) -> usize {
        self.lens.len() * self.query_len * self.heads
    }

    /// The implementations that a device should have for this, the fastest first.
    pub fn paths(&self, device: &Device) -> Vec<Path> {
        if *device == Device::flex() {
            return vec![Path::Reference];
        }
        let (width, value_width) = self.widths;
        let half = matches!(self.dtype, DType::F16 | DType::BF16);
        let latents = matches!(self.widths, (576 | 512, 512)) && self.page_size >= 16;
        let whole_fragments = width.is_multiple_of(16) && value_width.is_multiple_of(16);
        let paths = [
            (Path::Sm100, half && latents && is_blackwell(device)),
            (Path::Sm90, half && latents && is_hopper(device)),
            (Path::PortableMma, half && whole_fragments && is_cuda(device)),
            (Path::Portable, true),
        ];
        paths.into_iter().filter(|(_, has)| *has).map(|(path, _)| path).collect()
    }

    /// This, and where the device's generation has a kernel of its own, the same for that one: with latents of both widths.
    pub fn and_specialised(self, device: &Device) -> Vec<Self> {
        let latents = [(576, 512), (512, 512)].map(|widths| Self {
            widths,
            parts: self.parts && widths.0 > widths.1,
            ..self.clone()
        });
        let latents = latents.into_iter().filter_map(|case| {
            let fastest = case.paths(device)[0];
            matches!(fastest, Path::Sm90 | Path::Sm100).then_some(Self { path: Some(fastest), ..case })
        });
        std::iter::once(self).chain(latents.collect::<Vec<_>>()).collect()
    }

    /// The implementation that a test of this device is about is the one that runs.
    pub fn assert_path(&self, device: &Device) {
        let problem = MlaDecodeProblem {
            batch: self.lens.len(),
            query_len: self.query_len,
            heads: self.heads,
            key_width: self.widths.0,
            value_width: self.widths.1,
            page_size: self.page_size,
            dtype: self.dtype,
            rows: RowFormat::Dense,
        };
        let paths = self.paths(device);
        assert_eq!(mla_ops::available_paths(&problem, device), paths, "{self:?}");
        assert_eq!(mla_ops::explain_path(&problem, device).path, paths[0], "{self:?}");
        assert!(self.path.is_none_or(|path| paths.contains(&path)), "{self:?} on {device:?}");
    }

    pub fn options(&self) -> MlaDecodeOptions {
        let (width, value_width) = self.widths;
        let softmax_scale = self.sharpness / (width as f32).sqrt();
        MlaDecodeOptions { value_width, softmax_scale, causal: self.causal, splits: self.splits, path: self.path }
    }
}

impl DecodeInputs {
    /// All queries are the last key of the first sequence, whose score is then by far the highest.
    pub fn with_last_key_as_queries(mut self) -> Self {
        let (width, page_size, last) = (self.case.widths.0, self.case.page_size, self.case.lens[0] - 1);
        let slot = self.page_table[last / page_size] as usize * page_size + last % page_size;
        let key = &self.kv_cache[slot * width..][..width];
        self.q.chunks_exact_mut(width).for_each(|query| query.copy_from_slice(key));
        self
    }

    pub fn args(&self, device: &Device) -> MlaDecodeArgs {
        let case = &self.case;
        let (batch, (width, value_width)) = (case.lens.len(), case.widths);
        let q = floats(&self.q, [batch, case.query_len, case.heads, width], case.dtype, device);
        let q = if case.parts {
            let (nope, pe) = (q.clone().narrow(3, 0, value_width), q.narrow(3, value_width, width - value_width));
            MlaQuery::Parts { nope, pe }
        } else {
            MlaQuery::Whole(q)
        };
        MlaDecodeArgs {
            q,
            kv_cache: floats::<3>(&self.kv_cache, [self.pages, case.page_size, width], case.dtype, device).into(),
            page_table: ints(&self.page_table, [batch, self.max_pages], device),
            seq_lens: ints(&lens_i32(&case.lens), [batch], device),
        }
    }

    pub fn plan(&self, device: &Device) -> MlaPlan {
        mla_ops::mla_plan(MlaPlanArgs {
            seq_lens: ints(&lens_i32(&self.case.lens), [self.case.lens.len()], device),
            query_len: self.case.query_len,
            heads: self.case.heads,
            page_size: self.case.page_size,
            max_seq_len: self.max_pages * self.case.page_size,
            splits: self.case.splits,
        })
        .expect("a legal plan")
    }

    pub fn run(&self, device: &Device) -> (Tensor<4>, Tensor<3>) {
        let plan = self.case.planned.then(|| self.plan(device));
        let result = mla_ops::mla_decode(self.args(device), &self.case.options(), plan.as_ref());
        result.unwrap_or_else(|error| panic!("{error} ({:?})", self.case)).materialise()
    }

    pub fn expected(&self) -> State {
        self.expected_rows(0..self.case.rows())
    }

    /// Of some rows of `[B, Sq, H]`.
    pub fn expected_rows(&self, rows: impl IntoIterator<Item = usize>) -> State {
        let args = oracle::MlaDecode {
            q: &self.q,
            kv_cache: &self.kv_cache,
            page_table: &self.page_table,
            seq_lens: &lens_i32(&self.case.lens),
            query_len: self.case.query_len,
            heads: self.case.heads,
            page_size: self.case.page_size,
            max_pages: self.max_pages,
            key_width: self.case.widths.0,
            value_width: self.case.widths.1,
            scale: f64::from(self.case.options().softmax_scale),
            causal: self.case.causal,
        };
        oracle::mla_decode(&args, rows)
    }

    /// Runs the problem and compares it with the oracle.
    pub fn check(&self, device: &Device) {
        self.case.assert_path(device);
        let what = format!("mla_decode on {device:?}: {:?}", self.case);
        let (out, lse) = self.run(device);
        assert_eq!(out.dtype(), self.case.dtype, "{what}");
        assert_state(&what, (out, lse), &self.expected());
    }

    /// Runs the problem and compares some rows of `[B, Sq, H]` with the oracle; the others are finite.
    pub fn check_rows(&self, device: &Device, rows: &[usize]) {
        self.case.assert_path(device);
        let what = format!("mla_decode on {device:?}: {:?}", self.case);
        let (out, lse) = self.run(device);
        assert_eq!((out.dtype(), lse.shape().num_elements()), (self.case.dtype, self.case.rows()), "{what}");
        let (out, lse) = (values(out), values(lse));
        assert!(out.iter().all(|value| value.is_finite()), "{what}: some output is not finite");
        let (some_out, some_lse) = pick_rows(&out, &lse, rows);
        let expected = self.expected_rows(rows.iter().copied());
        assert_rows(&format!("of rows {rows:?}, {what}"), self.case.dtype, &some_out, &some_lse, &expected);
    }
}

/// Some rows of out and lse.
pub fn pick_rows(out: &[f32], lse: &[f32], rows: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let width = out.len() / lse.len().max(1);
    let outs = rows.iter().flat_map(|row| &out[row * width..][..width]).copied().collect();
    (outs, rows.iter().map(|&row| lse[row]).collect())
}
