//! `Determinism::BatchInvariant` on Hopper, where a few rows and many are computed by different kernels: the bits are the same.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_mla::ops::Determinism::BatchInvariant;
use burn_mla::ops::{
    ExpertsMlpArgs, ExpertsMlpOptions, LinearProblem, MlaDecodeArgs, MlaDecodeOptions, MlaQuery, Path, Residual,
    RopeQuery, RopeWriteArgs, Routing, SharedExperts, Splits, StackedWeight, Weight, experts_mlp, explain_path, linear,
    linear_by_head, linear_each, mla_decode, rope_write, swiglu,
};
use rstest::rstest;

use crate::devices::{for_each_dtype, is_hopper, is_simulated, skip};
use crate::ops_fixture::{bits, floats, ints, random, rng};

/// The most rows, and others: those of one tile or several, full or not, of both kernels.
const ROWS: usize = 200;
const OTHERS: [usize; 7] = [1, 2, 7, 16, 17, 64, 65];

/// Numbers in -1 .. 1, scaled so that products with them stay of that size.
fn matrix<const D: usize>(seed: u64, shape: [usize; D], scale: f64, dtype: DType, device: &Device) -> Tensor<D> {
    let values: Vec<f64> = random(&mut rng(seed), shape.iter().product(), dtype).iter().map(|x| x * scale).collect();
    floats(&values, shape, dtype, device)
}

fn for_each_half_on_hopper(test: impl Fn(&Device, DType)) {
    for_each_dtype(|device, dtype| match is_hopper(device) && dtype != DType::F32 {
        true => test(device, dtype),
        false => skip(device, format_args!("{dtype:?} here has one kernel")),
    });
}

/// Bits of each row `[n, ..]`.
fn rows<const D: usize>(out: &Tensor<D>) -> Vec<Vec<u8>> {
    let (n, bits) = (out.dims()[0], bits(out));
    bits.chunks(bits.len() / n).map(<[u8]>::to_vec).collect()
}

/// What is computed of rows `first .. first + n`, for all of them and for parts: the same bits. `path` says what computes so many.
fn check<const D: usize>(
    what: &str,
    path: impl Fn(usize) -> Path,
    dtype: DType,
    compute: impl Fn(usize, usize) -> Tensor<D>,
) {
    assert_eq!([1, ROWS].map(&path), [Path::PortableMma, Path::Sm90], "{what}");
    let all = rows(&compute(0, ROWS));
    assert_ne!(all[0], all[ROWS - 1], "{what}: rows that have nothing in common come out alike");
    for (n, first) in OTHERS.into_iter().zip([0, 198, 40, 3, 60, 130, 11]).chain([(1, 199), (1, 77)]) {
        let part = rows(&compute(first, n));
        let off = (0..n).filter(|&row| part[row] != all[first + row]).count();
        assert_eq!(off, 0, "{what}: of {n} rows from {first} by {}, {dtype:?}", path(n));
    }
}

/// Channels that end within a block, or leave parts without any; tiles of outputs that are not full.
#[rstest]
fn ops_batch_invariant_hopper_products(
    #[values([576, 2816], [1408, 576], [1440, 72], [2048, 2048], [96, 48])] widths: [usize; 2],
) {
    for_each_half_on_hopper(|device, dtype| {
        let [inputs, mut outputs] = widths;
        if is_simulated(device) {
            if inputs == 2048 {
                skip(device, "the odd widths are enough on a simulated GPU");
                return;
            }
            outputs = outputs.min(88);
        }
        let scale = 1.0 / (inputs as f64).sqrt();
        let x = matrix(1, [ROWS, inputs], 1.0, dtype, device);
        let x = |first, n| x.clone().narrow(0, first, n);
        let weight = |seed, outputs| Weight::from(matrix(seed, [outputs, inputs], scale, dtype, device));
        let sizes = |n| [n, inputs, outputs];
        let path = |problem: LinearProblem| explain_path(&problem.with_determinism(BatchInvariant), device).path;
        let dense = |n| path(LinearProblem::dense(sizes(n), dtype));
        check("linear", dense, dtype, |first, n| {
            linear(x(first, n), &weight(2, outputs), BatchInvariant).expect("legal")
        });
        let pair = |first, n| {
            let (one, other) = (weight(2, outputs), weight(3, outputs / 2 + outputs / 2 % 8));
            let [one, other] = linear_each(x(first, n), [&one, &other], BatchInvariant).expect("legal");
            Tensor::cat(vec![one, other], 1)
        };
        check("linear_each", dense, dtype, pair);
        let gated = |n| path(LinearProblem::gated(sizes(n), dtype));
        let gate_up = weight(4, 2 * outputs);
        check("swiglu", gated, dtype, |first, n| swiglu(x(first, n), &gate_up, None, BatchInvariant).expect("legal"));
        let limited = |first, n| swiglu(x(first, n), &gate_up, Some(0.3), BatchInvariant).expect("legal");
        check("swiglu with a limit", gated, dtype, limited);
    });
}

/// Absorbed projections, and with them the rotation of a query: that of a few tokens is in their launch.
#[rstest]
fn ops_batch_invariant_hopper_heads(#[values([2, 128, 512], [3, 96, 40], [2, 512, 128])] sizes: [usize; 3]) {
    for_each_half_on_hopper(|device, dtype| {
        let [heads, inputs, outputs] = sizes;
        let (turned, cache_width) = (16, 64);
        let x = matrix(1, [ROWS, heads, inputs + turned], 1.0, dtype, device);
        let weight = StackedWeight::from(matrix(2, [heads, outputs, inputs], 0.1, dtype, device));
        let path = |n| {
            let problem = LinearProblem::by_head([n, heads, inputs, outputs, turned], dtype);
            explain_path(&problem.with_determinism(BatchInvariant), device).path
        };
        let part = |first, n| x.clone().narrow(0, first, n);
        let by_head = |first, n| linear_by_head(part(first, n), &weight, BatchInvariant).expect("legal");
        check("linear_by_head", path, dtype, by_head);
        let latents = matrix(3, [ROWS, cache_width], 1.0, dtype, device);
        let tables = [4, 5].map(|seed| matrix(seed, [ROWS, turned / 2], 1.0, DType::F32, device));
        let write = |first, n| {
            let [cos, sin] = tables.clone().map(|table| table.narrow(0, first, n));
            let query = RopeQuery::Absorbed { q: part(first, n), weight: weight.clone(), determinism: BatchInvariant };
            let args = RopeWriteArgs {
                query,
                latent: latents.clone().narrow(0, first, n),
                norm_weight: matrix(6, [cache_width - turned], 1.0, DType::F32, device),
                norm_eps: 1e-6,
                q_norm_eps: None,
                index_q: None,
                cos,
                sin,
                cache: Tensor::<3>::zeros([ROWS, 1, cache_width], (device, dtype)).into(),
                slots: ints(&(0..n as i32).collect::<Vec<_>>(), [n], device),
                compressors: vec![],
            };
            let written = rope_write(args).expect("legal");
            let cached = written.cache.dense().reshape([ROWS, cache_width]).narrow(0, 0, n);
            Tensor::cat(vec![written.q.flatten::<2>(1, 2), cached], 1)
        };
        check("rope_write", path, dtype, write);
    });
}

/// Experts of a token: a single one's are not sorted, and read by launches that have the shared experts, the sum behind them and
/// the projections of its norm, too.
#[rstest]
fn ops_batch_invariant_hopper_experts(#[values([96, 96, 64], [576, 160, 320])] widths: [usize; 3]) {
    for_each_half_on_hopper(|device, dtype| {
        let ([hidden, width, shared_width], [experts, top_k]) = (widths, [5, 2]);
        let x = matrix(1, [ROWS, hidden], 1.0, dtype, device);
        let scale = 2.0 / (hidden as f64).sqrt();
        let stack = |seed, shape: [usize; 3]| StackedWeight::from(matrix(seed, shape, scale, dtype, device));
        let dense = |seed, shape: [usize; 2]| Weight::from(matrix(seed, shape, scale, dtype, device));
        let (gate_up, down) = (stack(2, [experts, 2 * width, hidden]), stack(3, [experts, hidden, width]));
        let shared =
            SharedExperts { gate_up: dense(4, [2 * shared_width, hidden]), down: dense(5, [hidden, shared_width]) };
        let chosen: Vec<i32> =
            (0..ROWS * top_k).map(|pair| (pair * pair * 7 + pair / 3) as i32 % experts as i32).collect();
        let chosen: Tensor<2, Int> = ints(&chosen, [ROWS, top_k], device);
        let weights = matrix(6, [ROWS, top_k], 1.0, DType::F32, device);
        let norm = matrix(7, [hidden], 1.0, DType::F32, device);
        let path = |n| {
            let [up, down] = LinearProblem::experts([n, top_k, experts, hidden, width], dtype)
                .map(|problem| explain_path(&problem.with_determinism(BatchInvariant), device).path);
            assert_eq!(up, down, "{n} tokens");
            up
        };
        let sum = |first, n| {
            let rows = |all: Tensor<2>| all.narrow(0, first, n);
            let routing = Routing::given(chosen.clone().narrow(0, first, n), rows(weights.clone()));
            let (gate_up, down, shared) = (gate_up.clone(), down.clone(), Some(shared.clone()));
            let args = ExpertsMlpArgs { x: rows(x.clone()), routing, gate_up, down, shared };
            experts_mlp(args, &ExpertsMlpOptions { limit: None, determinism: BatchInvariant }).expect("legal")
        };
        check("experts_mlp", path, dtype, |first, n| sum(first, n).materialise());
        let project = |first, n| {
            let mut residual = Residual::new(x.clone().narrow(0, first, n));
            residual.add(sum(first, n)).expect("legal");
            let mut h = residual.norm(&norm, 1e-6).expect("legal");
            let [one, other] = [(8, 96), (9, 64)].map(|(seed, outputs)| dense(seed, [outputs, hidden]));
            let [one, other] = linear_each(&mut h, [&one, &other], BatchInvariant).expect("legal");
            Tensor::cat(vec![h.tensor(), one, other], 1)
        };
        check("linear_each behind experts", path, dtype, project);
    });
}

/// Attention of the tokens of a prompt, up to the end of a split, and of each of them alone: heads, and the first and last token.
#[rstest]
fn ops_batch_invariant_hopper_attention(
    #[values((3, 0, 70), (16, 200, 256), (5, 256, 290))] piece: (usize, usize, usize),
) {
    const SPLIT: usize = 128;
    let ((heads, first, end), [pages, page, width]) = (piece, [6, 64, 576]);
    for_each_half_on_hopper(|device, dtype| {
        let q = matrix(1, [end - first, heads, width], 1.0, dtype, device);
        let kv_cache: Tensor<3> = matrix(2, [pages, page, width], 1.0, dtype, device);
        let attend = |token: usize, n: usize| {
            let args = MlaDecodeArgs {
                q: MlaQuery::Whole(q.clone().narrow(0, token, n).unsqueeze_dim(0)),
                kv_cache: kv_cache.clone().into(),
                page_table: ints(&[4, 2, 5, 0, 1, 3], [1, pages], device),
                seq_lens: ints(&[(first + token + n) as i32], [1], device),
            };
            let splits = Splits::Tokens(SPLIT);
            let options = MlaDecodeOptions {
                value_width: 512,
                softmax_scale: 0.05,
                causal: true,
                splits,
                path: Some(Path::Sm90),
            };
            let (out, lse) = mla_decode(args, &options, None).expect("Hopper has it").materialise();
            let [out, lse] = [out.cast(FloatDType::F32), lse.unsqueeze_dim(3)];
            rows(&Tensor::cat(vec![out, lse], 3).squeeze_dim::<3>(0))
        };
        let all = attend(0, end - first);
        let tokens = if is_simulated(device) { vec![0, 1, 33, end - first - 1] } else { (0..end - first).collect() };
        for token in tokens {
            assert_eq!(attend(token, 1)[0], all[token], "{piece:?}: token {token}, {dtype:?}");
        }
    });
}
