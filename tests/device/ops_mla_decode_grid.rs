//! The grid of `mla_decode` that the peers of this library test: batches, query lengths, lengths and heads, at the widths
//! of DeepSeek-V3 and pages of 64. See [`runs`] for the part of it that a CPU computes.

use burn::tensor::{DType, Device, Tensor, TensorData};
use mla_ops::{MlaDecodeArgs, MlaQuery, Path, mla_decode};
use rand::RngExt;
use rand::seq::{SliceRandom, index};
use rstest::rstest;

use crate::devices::{FLOATS, for_each_device, is_cuda, is_simulated, is_wgpu, skip, supports};
use crate::ops_fixture::{DecodeCase, UNUSED_PAGE, assert_rows, ints, lens_i32, pick_rows, rng, rounded, values};
use crate::oracle::{self, State};

const BATCHES: [usize; 4] = [1, 2, 6, 64];
const QUERY_LENS: [usize; 3] = [1, 2, 4];
const HEADS: [usize; 7] = [1, 3, 9, 63, 64, 126, 128];
const WIDTHS: (usize, usize) = (576, 512);
const PAGE_SIZE: usize = 64;

/// Rows of each case that are compared with the oracle.
const ORACLE_ROWS: usize = 64;
/// Rows times keys of a case up to which all rows are compared with Flex.
const FLEX_WORK: usize = 1 << 22;

/// Whether a device runs a case. CUDA runs all of them. The others run the short lengths in full in f32, and small cases of
/// the long one and of f16; wgpu, which may be the CPU too, runs large batches of many heads at the shortest length only
/// (otherwise four minutes on two cores).
/// A simulated GPU runs the short lengths in small batches, in 16 bits with all heads.
fn runs(device: &Device, dtype: DType, len: usize, batch: usize, heads: usize) -> bool {
    let small = batch <= 2 && heads <= 9;
    if is_simulated(device) {
        return len < 4096 && batch <= 2 && (dtype != DType::F32 || small);
    }
    is_cuda(device)
        || match dtype {
            DType::F32 if len < 4096 => !is_wgpu(device) || len <= 20 || batch <= 6 || heads <= 9,
            DType::F32 => small,
            DType::F16 => len < 4096 && small,
            _ => false,
        }
}

#[rstest]
fn ops_decode_grid(
    #[values(20, 140, 4096)] len: usize,
    #[values(false, true)] fixed: bool,
    #[values(false, true)] causal: bool,
) {
    for_each_device(|device| {
        for dtype in FLOATS {
            let run = |batch, heads| runs(device, dtype, len, batch, heads);
            let largest = |batch: &usize| HEADS.into_iter().filter(|heads| run(*batch, *heads)).max();
            let batches: Vec<usize> = BATCHES.into_iter().filter(|batch| largest(batch).is_some()).collect();
            let Some(&batch) = batches.last().filter(|_| supports(device, dtype)) else {
                skip(device, format_args!("all cases, {dtype:?}"));
                continue;
            };
            let rows = batches.iter().map(|b| b * QUERY_LENS[2] * largest(b).unwrap_or(0)).max().unwrap_or(0);
            let pool = Pool::new(batch, rows, len, fixed, dtype);
            let caches = Caches::new(&pool, device);
            let mut cases = 0;
            for batch in batches {
                for query_len in QUERY_LENS {
                    for heads in HEADS.into_iter().filter(|&heads| run(batch, heads)) {
                        pool.check(&pool.case(batch, query_len, heads, causal), &caches, device);
                        cases += 1;
                    }
                }
            }
            let all = BATCHES.len() * QUERY_LENS.len() * HEADS.len();
            if cases < all {
                skip(device, format_args!("{} of {all} cases, {dtype:?}", all - cases));
            }
        }
    });
}

/// The values that all cases of a length share: a smaller case is the beginning of a larger one.
struct Pool {
    dtype: DType,
    lens: Vec<usize>,
    /// `[rows, D]`.
    q: Vec<f32>,
    /// `[pages, S, D]`, NaN in every row that belongs to no token.
    cache: Vec<f32>,
    pages: usize,
    /// `[batch, max_pages]`.
    page_table: Vec<i32>,
    max_pages: usize,
}

impl Pool {
    fn new(batch: usize, rows: usize, len: usize, fixed: bool, dtype: DType) -> Self {
        let mut rng = rng(41);
        let lens: Vec<usize> = (0..batch)
            .map(|b| match b {
                _ if fixed => len,
                // A batch of one sequence has a long one, and larger batches an empty one.
                0 => rng.random_range(len / 2..len),
                1 => 0,
                _ => rng.random_range(0..=len),
            })
            .collect();
        let max_pages = len.div_ceil(PAGE_SIZE) + 1;
        let pages = lens.iter().map(|len| len.div_ceil(PAGE_SIZE)).sum::<usize>() + 2;
        let mut ids: Vec<usize> = (0..pages).collect();
        ids.shuffle(&mut rng);
        let mut random = |n: usize| -> Vec<f32> {
            (0..n).map(|_| rounded(f64::from(rng.random_range(-1.0_f32..1.0)), dtype) as f32).collect()
        };
        let mut page_table = vec![UNUSED_PAGE; batch * max_pages];
        let mut cache = vec![f32::NAN; pages * PAGE_SIZE * WIDTHS.0];
        for (b, len) in lens.iter().enumerate() {
            for first in (0..*len).step_by(PAGE_SIZE) {
                let id = ids.pop().expect("enough pages");
                page_table[b * max_pages + first / PAGE_SIZE] = id as i32;
                let tokens = random(PAGE_SIZE.min(len - first) * WIDTHS.0);
                let at = id * PAGE_SIZE * WIDTHS.0;
                cache[at..at + tokens.len()].copy_from_slice(&tokens);
            }
        }
        let q = random(rows * WIDTHS.0);
        Self { dtype, lens, q, cache, pages, page_table, max_pages }
    }

    fn case(&self, batch: usize, query_len: usize, heads: usize, causal: bool) -> DecodeCase {
        DecodeCase {
            lens: self.lens[..batch].to_vec(),
            query_len,
            heads,
            page_size: PAGE_SIZE,
            widths: WIDTHS,
            causal,
            dtype: self.dtype,
            ..Default::default()
        }
    }

    fn cache(&self, device: &Device, dtype: DType) -> Tensor<3> {
        let data = TensorData::new(self.cache.clone(), [self.pages, PAGE_SIZE, WIDTHS.0]);
        Tensor::from_data(data, (device, dtype))
    }

    /// Values of out and lse.
    fn run(&self, case: &DecodeCase, cache: Tensor<3>) -> (Vec<f32>, Vec<f32>) {
        let device = &cache.device();
        let batch = case.lens.len();
        let shape = [batch, case.query_len, case.heads, WIDTHS.0];
        let q = TensorData::new(self.q[..shape.iter().product()].to_vec(), shape);
        let args = MlaDecodeArgs {
            q: MlaQuery::Whole(Tensor::from_data(q, (device, cache.dtype()))),
            kv_cache: cache.into(),
            page_table: ints(&self.page_table[..batch * self.max_pages], [batch, self.max_pages], device),
            seq_lens: ints(&lens_i32(&case.lens), [batch], device),
        };
        let (out, lse) =
            mla_decode(args, &case.options(), None).unwrap_or_else(|error| panic!("{error} ({case:?})")).materialise();
        assert_eq!(out.dims(), [batch, case.query_len, case.heads, WIDTHS.1], "{case:?}");
        (values(out), values(lse))
    }

    /// Runs a case, in 16 bits on CUDA with each of the kernels that are for that, and compares some rows with the oracle and
    /// all rows with another kernel.
    fn check(&self, case: &DecodeCase, caches: &Caches, device: &Device) {
        let rows = index::sample(&mut rng(42), case.rows(), ORACLE_ROWS.min(case.rows())).into_vec();
        let mut expected = State::default();
        rows.iter().for_each(|&row| expected.push(self.expected(case, row)));
        let small = case.rows() * self.lens[0] <= FLEX_WORK;
        let reference = caches.reference.as_ref().filter(|cache| is_cuda(&cache.device()) || small);
        let reference = reference.map(|cache| {
            let (out, lse) = self.run(case, cache.clone());
            let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
            (cache.device(), State { out: wide(out), lse: wide(lse) })
        });

        let paths: Vec<Option<Path>> = match self.dtype {
            DType::F16 | DType::BF16 if is_cuda(device) => {
                case.paths(device).into_iter().filter(|path| *path != Path::Portable).map(Some).collect()
            }
            _ => vec![None],
        };
        for path in paths {
            let case = DecodeCase { path, ..case.clone() };
            case.assert_path(device);
            let what = format!("mla_decode on {device:?}: {case:?}");
            let (out, lse) = self.run(&case, caches.cache.clone());
            assert!(out.iter().all(|value| value.is_finite()), "{what}: some output is not finite");
            let (some_out, some_lse) = pick_rows(&out, &lse, &rows);
            assert_rows(&format!("rows {rows:?} of {what}"), self.dtype, &some_out, &some_lse, &expected);
            if let Some((device, expected)) = &reference {
                assert_rows(&format!("against f32 on {device:?}: {what}"), self.dtype, &out, &lse, expected);
            }
        }
    }

    /// One row of `[B, Sq, H]`, in f64.
    fn expected(&self, case: &DecodeCase, row: usize) -> (Vec<f64>, f64) {
        let (b, token) = (row / case.heads / case.query_len, row / case.heads % case.query_len);
        let len = case.lens[b];
        let visible = if case.causal { (len + token + 1).saturating_sub(case.query_len) } else { len };
        let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&value| f64::from(value)).collect() };
        let mut keys = Vec::new();
        for key in 0..visible {
            let page = self.page_table[b * self.max_pages + key / PAGE_SIZE] as usize;
            let at = (page * PAGE_SIZE + key % PAGE_SIZE) * WIDTHS.0;
            keys.extend(wide(&self.cache[at..at + WIDTHS.0]));
        }
        let query = wide(&self.q[row * WIDTHS.0..(row + 1) * WIDTHS.0]);
        let keys = keys.chunks_exact(WIDTHS.0).map(|key| (key, &key[..WIDTHS.1]));
        let scale = f64::from(case.options().softmax_scale);
        oracle::attend(&query, keys, |product| scale * product, WIDTHS.1)
    }
}

/// The pool's cache on devices.
struct Caches {
    cache: Tensor<3>,
    /// For another kernel: in f32 on the same GPU where that is another one, and fast, else on the CPU.
    reference: Option<Tensor<3>>,
}

impl Caches {
    fn new(pool: &Pool, device: &Device) -> Self {
        let flex = Device::flex();
        let reference = match is_cuda(device) && !is_simulated(device) && pool.dtype != DType::F32 {
            true => Some(device),
            false => Some(&flex).filter(|flex| *flex != device),
        };
        let reference = reference.map(|device| pool.cache(device, DType::F32));
        Self { cache: pool.cache(device, pool.dtype), reference }
    }
}
