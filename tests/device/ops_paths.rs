//! `explain_path` and `available_paths`, for each operation that has more than one implementation on a device.

use std::fmt::Debug;

use burn::tensor::{DType, Device};
use mla_ops::Determinism::BatchInvariant;
use mla_ops::Path::{Matmul, Portable, PortableMma, Reference, Sm90, Sm100};
use mla_ops::cache::RowFormat;
use mla_ops::{
    LightningIndexProblem, LinearProblem, MlaDecodeProblem, Path, Problem, RaggedAttentionProblem, SparseMlaProblem,
    VerticalSlashAttentionProblem, available_paths, explain_path,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, has_tiles, is_blackwell, is_cuda, is_hopper};

const BF16: DType = DType::BF16;

fn decode(dtype: DType) -> MlaDecodeProblem {
    MlaDecodeProblem {
        batch: 2,
        query_len: 1,
        heads: 16,
        key_width: 576,
        value_width: 512,
        page_size: 64,
        dtype,
        rows: RowFormat::Dense,
    }
}

fn sparse(dtype: DType) -> SparseMlaProblem {
    SparseMlaProblem {
        batch: 2,
        query_len: 3,
        heads: 16,
        key_width: 576,
        value_width: 512,
        dtype,
        rows: RowFormat::Dense,
        second_rows: None,
    }
}

/// FP8 rows of more heads than the kernel for few of them takes, of both of DeepSeek's formats.
#[test]
fn ops_paths_of_fp8_rows() {
    for_each_dtype(|device, dtype| {
        let own = [(Sm100, is_blackwell(device)), (Sm90, is_hopper(device))];
        let own = own.into_iter().find_map(|(path, is)| (is && dtype == BF16).then_some(path));
        let is_own = |path| own.is_none_or(|own| own == path) && (own.is_some() || ![Sm90, Sm100].contains(&path));
        for heads in [64, 128] {
            for (key_width, rows) in [(576, RowFormat::Fp8 { rope: 64 }), (512, RowFormat::Fp8E8m0 { rope: 64 })] {
                for second_rows in [None, Some(rows), Some(RowFormat::Dense)] {
                    let problem = SparseMlaProblem { heads, key_width, rows, second_rows, ..sparse(dtype) };
                    let path = explain_path(&problem, device).path;
                    assert!(is_own(path), "{problem:?} on {device:?}: {path}");
                }
                let problem = MlaDecodeProblem { heads, key_width, rows, ..decode(dtype) };
                let path = explain_path(&problem, device).path;
                assert!(is_own(path), "{problem:?} on {device:?}: {path}");
            }
        }
    });
}

fn index(heads: usize, width: usize, dtype: DType) -> LightningIndexProblem {
    LightningIndexProblem { batch: 2, query_len: 3, heads, width, page_size: 16, dtype, keys: RowFormat::Dense }
}

fn ragged([key_width, value_width, shared_width]: [usize; 3], dtype: DType) -> RaggedAttentionProblem {
    RaggedAttentionProblem { heads: 16, kv_heads: 16, key_width, value_width, shared_width, dtype }
}

fn vertical_slash([key_width, value_width]: [usize; 2], dtype: DType) -> VerticalSlashAttentionProblem {
    VerticalSlashAttentionProblem { heads: 16, kv_heads: 4, key_width, value_width, dtype }
}

fn is_half(dtype: DType) -> bool {
    dtype != DType::F32
}

/// The implementations are these, on the CPU the only one that there is; the first of them runs, and the reason names them.
fn assert_paths(problem: &(impl Problem + Debug), device: &Device, on_gpu: &[(Path, bool)]) {
    let on_gpu = on_gpu.iter().filter(|(_, has)| *has).map(|&(path, _)| path).collect();
    let expected: Vec<Path> = if *device == Device::flex() { vec![Reference] } else { on_gpu };
    assert_eq!(available_paths(problem, device), expected, "{problem:?} on {device:?}");
    let choice = explain_path(problem, device);
    assert_eq!(choice.path, expected[0], "{problem:?} on {device:?}");
    let names: Vec<String> = expected.iter().map(Path::to_string).collect();
    let said = if names.len() == 1 { "the only one".into() } else { format!("the fastest of {}", names.join(", ")) };
    for said in [said, format!("{device:?}"), "; it needs ".into()] {
        assert!(choice.reason.contains(&said), "{choice}, without {said:?}");
    }
}

#[test]
fn ops_paths_of_attention() {
    for_each_dtype(|device, dtype| {
        let half = is_half(dtype);
        let generations = [(Sm100, half && is_blackwell(device)), (Sm90, half && is_hopper(device))];
        let hopper = generations[1];
        let general = [(PortableMma, half && is_cuda(device)), (Portable, true)];
        assert_paths(&decode(dtype), device, &[generations, general].concat());
        assert_paths(&sparse(dtype), device, &[generations, general].concat());
        // Tile loads take pages of 16 rows or more.
        assert_paths(&MlaDecodeProblem { page_size: 8, ..decode(dtype) }, device, &general);
        assert_paths(&index(64, 128, dtype), device, &general);
        // As many query tokens as fill a tile, and pages of 8 tokens or more.
        for (query_len, heads, width, page_size, has) in [
            (8, 64, 128, 64, true),
            (7, 64, 128, 64, false),
            (4, 128, 64, 8, true),
            (32, 16, 64, 256, true),
            (31, 16, 64, 256, false),
            (8, 64, 128, 4, false),
            (8, 64, 96, 64, false),
            (64, 48, 128, 64, false),
        ] {
            let problem = LightningIndexProblem { query_len, page_size, ..index(heads, width, dtype) };
            assert_paths(&problem, device, &[&[(Sm90, hopper.1 && has)][..], &general].concat());
        }
        // Codes: 16 of them are copied at a time, from pages that begin with a multiple of 16 bytes.
        for (query_len, width, page_size, has) in
            [(1, 128, 64, true), (64, 64, 4, true), (1, 128, 2, false), (1, 96, 64, false), (64, 128, 1, false)]
        {
            let keys = RowFormat::Fp8IndexKeys;
            let problem = LightningIndexProblem { query_len, page_size, keys, ..index(64, width, dtype) };
            assert_paths(&problem, device, if has { &general } else { &[(Portable, true)] });
        }
        for widths in [[192, 128, 0], [192, 128, 64], [128, 128, 0], [64, 64, 0]] {
            assert_paths(&ragged(widths, dtype), device, &[&[hopper][..], &general].concat());
        }
        for widths in [[192, 128, 32], [64, 64, 64], [96, 96, 0], [128, 192, 0]] {
            assert_paths(&ragged(widths, dtype), device, &[(Portable, true)]);
        }
        for widths in [[192, 128], [128, 128], [64, 64]] {
            assert_paths(&vertical_slash(widths, dtype), device, &[&[hopper][..], &general].concat());
        }
        for widths in [[64, 128], [96, 96], [128, 192]] {
            assert_paths(&vertical_slash(widths, dtype), device, &[(Portable, true)]);
        }
        assert_paths(&index(3, 33, dtype), device, &[(Portable, true)]);
    });
}

/// What multiplies rows where there is no kernel for many of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runs {
    /// A kernel for a small batch.
    SmallBatch,
    /// Burn's product, before the kernels for a small batch.
    Burns,
    /// The same, but for a kernel for many rows of other GPUs than Hopper.
    BurnsOrTiles,
    /// Burn's product alone, for there is nothing to multiply.
    Nothing,
}
use Runs::{Burns, BurnsOrTiles, Nothing, SmallBatch};

/// Of a dtype; what runs, but for Hopper's kernel for many rows; whether that takes them in f16 and bf16. Inputs are a multiple of
/// 32: with matrix instructions there is a kernel for a small batch.
#[rstest]
#[case::a_row(|dtype| LinearProblem::dense([1, 64, 48], dtype), SmallBatch, false)]
#[case::eight_rows(|dtype| LinearProblem::dense([8, 64, 48], dtype), SmallBatch, false)]
#[case::nine_rows(|dtype| LinearProblem::dense([9, 64, 48], dtype), SmallBatch, true)]
#[case::a_small_batch(|dtype| LinearProblem::dense([64, 64, 48], dtype), SmallBatch, true)]
#[case::many_rows(|dtype| LinearProblem::dense([65, 64, 48], dtype), Burns, true)]
#[case::odd_outputs(|dtype| LinearProblem::dense([65, 64, 7], dtype), Burns, false)]
#[case::no_rows(|dtype| LinearProblem::dense([0, 64, 48], dtype), Nothing, false)]
#[case::no_outputs(|dtype| LinearProblem::dense([9, 64, 0], dtype), Nothing, false)]
#[case::gated(|dtype| LinearProblem::gated([8, 64, 48], dtype), SmallBatch, false)]
#[case::many_gated(|dtype| LinearProblem::gated([65, 64, 48], dtype), Burns, true)]
#[case::eight_of_heads(|dtype| LinearProblem::by_head([8, 2, 64, 48, 16], dtype), SmallBatch, false)]
#[case::heads(|dtype| LinearProblem::by_head([64, 2, 64, 48, 16], dtype), SmallBatch, true)]
#[case::many_of_heads(|dtype| LinearProblem::by_head([65, 2, 64, 48, 16], dtype), BurnsOrTiles, true)]
#[case::no_heads(|dtype| LinearProblem::by_head([65, 0, 64, 48, 16], dtype), Nothing, false)]
fn ops_paths_of_products(#[case] problem: fn(DType) -> LinearProblem, #[case] runs: Runs, #[case] many: bool) {
    for_each_dtype(|device, dtype| {
        let (half, problem) = (is_half(dtype), problem(dtype));
        let small_batch = [(PortableMma, half && is_cuda(device)), (Portable, true)];
        let others = match runs {
            SmallBatch => [small_batch.as_slice(), &[(Matmul, true)]].concat(),
            BurnsOrTiles if half && has_tiles(device) => vec![(PortableMma, true), (Matmul, true), (Portable, true)],
            Burns | BurnsOrTiles => [&[(Matmul, true)], small_batch.as_slice()].concat(),
            Nothing => vec![(Matmul, true)],
        };
        let many = (Sm90, many && half && is_hopper(device));
        assert_paths(&problem, device, &[&[many], others.as_slice()].concat());
        // Burn's product has rows that depend on one another.
        if runs != Nothing {
            assert_paths(
                &problem.with_determinism(BatchInvariant),
                device,
                &[&[many], small_batch.as_slice()].concat(),
            );
        }
    });
}

#[rstest]
fn ops_paths_of_matmul(#[values(1, 65)] rows: usize) {
    for_each_dtype(|device, dtype| {
        let problem = LinearProblem::matmul([2, rows, 64, 48], dtype);
        assert_paths(&problem, device, &[(Matmul, true)]);
        let half = is_half(dtype);
        let many = (Sm90, rows > 64 && half && is_hopper(device));
        let invariant = [many, (PortableMma, half && is_cuda(device)), (Portable, true)];
        assert_paths(&problem.with_determinism(BatchInvariant), device, &invariant);
    });
}

/// Tokens and experts: a kernel has them all.
#[rstest]
#[case(1, 3, false)]
#[case(2, 3, true)]
#[case(1, 256, false)]
#[case(20, 256, false)]
#[case(200, 256, true)]
fn ops_paths_of_experts(#[case] tokens: usize, #[case] experts: usize, #[case] many: bool) {
    for_each_dtype(|device, dtype| {
        let (half, few) = (is_half(dtype), [(PortableMma, is_half(dtype) && is_cuda(device)), (Portable, true)]);
        for problem in LinearProblem::experts([tokens, 2, experts, 64, 96], dtype) {
            let expected = [&[(Sm90, many && half && is_hopper(device))], few.as_slice()].concat();
            assert_paths(&problem, device, &expected);
            assert_paths(&problem.with_determinism(BatchInvariant), device, &expected);
        }
    });
}

/// Weights in f32 beside rows in f16 or bf16.
#[test]
fn ops_paths_of_routers() {
    for_each_dtype(|device, dtype| {
        if is_half(dtype) {
            let router = |rows, outputs| LinearProblem::dense([rows, 64, outputs], dtype).with_weight_dtype(DType::F32);
            assert_paths(&router(4, 256), device, &[(Portable, true), (Matmul, true)]);
            assert_paths(&router(65, 256), device, &[(Portable, true), (Matmul, true)]);
            assert_paths(&router(65, 1024), device, &[(Matmul, true), (Portable, true)]);
        }
    });
}

/// The reasons, as they are printed.
#[test]
fn ops_paths_say_why() {
    let flex = Device::flex();
    let says = |choice: mla_ops::PathChoice, words: &str| {
        let device = format!("{flex:?}");
        let expected =
            format!("reference: the only one that {device} has for {words}; it needs tensor operations alone");
        assert_eq!(choice.to_string(), expected);
    };
    says(explain_path(&decode(BF16), &flex), "BF16, widths of 576 and 512 and pages of 64");
    says(explain_path(&sparse(DType::F16), &flex), "F16, widths of 576 and 512 and rows that are named one by one");
    says(explain_path(&index(64, 128, BF16), &flex), "BF16, 3 query tokens, 64 index heads of width 128, pages of 16");
    let linear = |problem: LinearProblem, words| says(explain_path(&problem, &flex), words);
    let dense = LinearProblem::dense([4, 64, 48], BF16);
    linear(dense, "BF16, 4 rows, 64 channels to 48");
    linear(dense.with_determinism(BatchInvariant), "BF16, 4 rows, 64 channels to 48, batch-invariant");
    linear(dense.with_weight_dtype(DType::F32), "BF16 with weights in F32, 4 rows, 64 channels to 48");
    linear(LinearProblem::gated([4, 64, 48], BF16), "BF16, 4 rows, 64 channels to 48 gated");
    linear(LinearProblem::by_head([4, 2, 64, 48, 16], BF16), "BF16, 4 rows of 2 heads, 64 channels to 48");
    linear(LinearProblem::matmul([3, 4, 64, 48], DType::F32), "F32, 4 rows of 3 products, 64 channels to 48");
    let [gate_up, down] = LinearProblem::experts([4, 6, 64, 2048, 1408], BF16);
    linear(gate_up, "BF16, 4 rows for 6 of 64 experts each, 2048 channels to 1408 gated");
    linear(down, "BF16, 4 rows for 6 of 64 experts each, 1408 channels to 2048");
    let refused = explain_path(&index(64, 128, DType::F64), &flex).to_string();
    let words = "F64, 3 query tokens, 64 index heads of width 128, pages of 16";
    let expected = format!("reference: refused, for {flex:?} has no implementation for {words}");
    assert_eq!(refused, expected);
}

fn assert_refused(problem: &impl Problem, device: &Device) {
    assert_eq!(available_paths(problem, device), []);
    let choice = explain_path(problem, device);
    assert_eq!(choice.path, if *device == Device::flex() { Reference } else { Portable });
    assert!(choice.reason.starts_with("refused, "), "{choice}");
}

/// Dtypes that no operation takes, and sizes that no device has room for, have no implementation, and are no reason to panic.
#[test]
fn ops_paths_of_what_is_refused() {
    const MOST: usize = usize::MAX;
    for_each_device(|device| {
        for dtype in [DType::F64, DType::I32, DType::U8] {
            assert_refused(&decode(dtype), device);
            assert_refused(&sparse(dtype), device);
            assert_refused(&index(64, 128, dtype), device);
            assert_refused(&LinearProblem::dense([4, 64, 48], dtype), device);
            assert_refused(&LinearProblem::dense([4, 64, 48], DType::F32).with_weight_dtype(dtype), device);
        }
        for dtype in [DType::F32, DType::F16] {
            assert_refused(&MlaDecodeProblem { heads: MOST, query_len: MOST, ..decode(dtype) }, device);
            assert_refused(&SparseMlaProblem { batch: MOST, query_len: MOST, ..sparse(dtype) }, device);
            assert_refused(&index(MOST, MOST, dtype), device);
            assert_refused(&LinearProblem::dense([MOST; 3], dtype), device);
            assert_refused(&LinearProblem::gated([MOST, 8, 8], dtype), device);
            assert_refused(&LinearProblem::by_head([1, MOST, 8, 8, MOST], dtype), device);
            assert_refused(&LinearProblem::matmul([MOST, 0, 8, 8], dtype), device);
            for problem in LinearProblem::experts([MOST; 5], dtype) {
                assert_refused(&problem, device);
            }
        }
    });
}
