//! Every argument of every operation, made wrong: the error is of the right kind and names it, and nothing panics.
//!
//! Here: the operations beside `mla_decode` and `mla_plan`, which are in `ops_errors_decode.rs`.

use burn::tensor::{DType, Device, FloatDType, IntDType, Tensor};
use mla_ops::cache::new_pool;
use mla_ops::{
    Accumulator, MergeStateArgs, MlaDecodeArgs, MlaError, MlaQuery, PagedBatchArgs, RaggedAttentionArgs,
    RaggedAttentionOptions, WriteLatentArgs, kv_indices, merge_state, merge_states, page_table, ragged_attention,
    write_latent,
};
use rstest::rstest;

use crate::devices::{for_each_device, skip};
use crate::ops_fixture::{bits, ints};
use crate::refusals::Kind::{self, DType as WrongType, Shape, Value};
use crate::refusals::{Decode, assert_refused, assert_values_refused, paged_args, zeros};

/// Floats: f64 is no type of the operations, and f16 is not the type of the rest. Flex has all of them.
#[test]
fn ops_errors_float_types() {
    use FloatDType::{F16, F64};
    let device = &Device::flex();
    for wrong in [F64, F16] {
        let mut decode = Decode::new(device);
        decode.args.kv_cache = decode.args.kv_cache.dense().cast(wrong).into();
        assert_refused(decode.call(), WrongType, "kv_cache");
        let (nope, pe) = (zeros([2, 1, 3, 5], device), zeros([2, 1, 3, 2], device));
        let mut decode = Decode::new(device);
        decode.args.q = MlaQuery::Parts { nope, pe: pe.cast(wrong) };
        assert_refused(decode.call(), WrongType, "q.pe");

        let ragged = |change: fn(&mut RaggedAttentionArgs, FloatDType)| {
            let mut args = ragged_args(device);
            change(&mut args, wrong);
            ragged_attention(args, &RAGGED)
        };
        assert_refused(ragged(|args, wrong| args.k = args.k.clone().cast(wrong)), WrongType, "k");
        assert_refused(ragged(|args, wrong| args.v = args.v.clone().cast(wrong)), WrongType, "v");

        let merge = |change: fn(&mut MergeStateArgs, FloatDType)| {
            let mut args = merge_args(device);
            change(&mut args, wrong);
            merge_state(args)
        };
        assert_refused(merge(|args, wrong| args.out_b = args.out_b.clone().cast(wrong)), WrongType, "out_b");
        assert_refused(merge(|args, wrong| args.lse_a = args.lse_a.clone().cast(wrong)), WrongType, "lse_a");
        assert_refused(merge(|args, wrong| args.lse_b = args.lse_b.clone().cast(wrong)), WrongType, "lse_b");
        assert_refused(
            merge_states(zeros([1, 2, 3, 4], device), zeros([1, 2, 3], device).cast(wrong)),
            WrongType,
            "lses",
        );

        for (latent, rope, argument) in [(true, false, "latent"), (false, true, "rope")] {
            let mut args = write_args(device);
            args.latent = if latent { args.latent.cast(wrong) } else { args.latent };
            args.rope = args.rope.map(|it| if rope { it.cast(wrong) } else { it });
            assert_refused(write_latent(args).map_err(MlaError::from), WrongType, argument);
        }
    }
    let whole = MlaQuery::Whole(zeros([2, 1, 3, 7], device).cast(F64));
    assert_refused(
        Decode { args: MlaDecodeArgs { q: whole, ..Decode::new(device).args }, ..Decode::new(device) }.call(),
        WrongType,
        "q",
    );
    let args = ragged_args(device);
    assert_refused(
        ragged_attention(RaggedAttentionArgs { q: args.q.clone().cast(F64), ..args }, &RAGGED),
        WrongType,
        "q",
    );
    let args = merge_args(device);
    assert_refused(merge_state(MergeStateArgs { out_a: args.out_a.clone().cast(F64), ..args }), WrongType, "out_a");
    assert_refused(merge_states(zeros([1, 2, 3, 4], device).cast(F64), zeros([1, 2, 3], device)), WrongType, "outs");
    let args = write_args(device);
    let cache: Tensor<3> = zeros([3, 4, 7], device).cast(F64);
    assert_refused(
        write_latent(WriteLatentArgs { cache: cache.into(), ..args }).map_err(MlaError::from),
        WrongType,
        "cache",
    );
}

const RAGGED: RaggedAttentionOptions =
    RaggedAttentionOptions { softmax_scale: 1.0, softcap: None, causal: true, window: None };

/// N 4, H 3, dqk 6, dv 5.
fn ragged_args(device: &Device) -> RaggedAttentionArgs {
    RaggedAttentionArgs {
        q: zeros([4, 3, 6], device),
        k: zeros([4, 3, 6], device),
        k_pe: None,
        v: zeros([4, 3, 5], device),
        cu_seqlens: ints(&[0, 1, 4], [3], device),
        cu_seqlens_k: None,
    }
}

#[test]
fn ops_errors_ragged_attention() {
    for_each_device(|device| {
        ragged_attention(ragged_args(device), &RAGGED).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut RaggedAttentionArgs, &Device)| {
            let mut args = ragged_args(device);
            change(&mut args, device);
            assert_refused(ragged_attention(args, &RAGGED), kind, argument);
        };
        refuses(Shape, "k", |it, device| it.k = zeros([3, 3, 6], device));
        refuses(Value, "k", |it, device| it.k = zeros([4, 2, 6], device));
        refuses(Value, "k", |it, device| it.k = zeros([4, 0, 6], device));
        refuses(Shape, "k", |it, device| it.k = zeros([4, 3, 5], device));
        refuses(Shape, "k", |it, device| it.k_pe = Some(zeros([4, 1], device)));
        refuses(Shape, "k_pe", |it, device| it.k_pe = Some(zeros([5, 1], device)));
        refuses(Value, "k_pe", |it, device| it.k_pe = Some(zeros([4, 6], device)));
        refuses(Value, "k_pe", |it, device| it.k_pe = Some(zeros([4, 0], device)));
        refuses(WrongType, "cu_seqlens_k", |it, _| it.cu_seqlens_k = Some(it.cu_seqlens.clone().cast(IntDType::I64)));
        refuses(Shape, "cu_seqlens_k", |it, device| it.cu_seqlens_k = Some(ints(&[0, 4], [2], device)));
        refuses(Shape, "v", |it, device| it.v = zeros([5, 3, 5], device));
        refuses(Shape, "v", |it, device| it.v = zeros([4, 1, 5], device));
        refuses(WrongType, "cu_seqlens", |it, _| it.cu_seqlens = it.cu_seqlens.clone().cast(IntDType::I64));
        refuses(Value, "cu_seqlens", |it, device| it.cu_seqlens = ints(&[], [0], device));
        for softmax_scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let options = RaggedAttentionOptions { softmax_scale, ..RAGGED };
            assert_refused(ragged_attention(ragged_args(device), &options), Value, "softmax_scale");
        }
        for softcap in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY].map(Some) {
            let options = RaggedAttentionOptions { softcap, ..RAGGED };
            assert_refused(ragged_attention(ragged_args(device), &options), Value, "softcap");
        }
        for (causal, window) in [(true, 0), (false, 0), (false, 3)] {
            let options = RaggedAttentionOptions { causal, window: Some(window), ..RAGGED };
            assert_refused(ragged_attention(ragged_args(device), &options), Value, "window");
        }
        for wrong in [[1, 1, 4], [-1, 1, 4], [0, 3, 2], [0, 1, 5], [0, -1, 4]] {
            let args = RaggedAttentionArgs { cu_seqlens: ints(&wrong, [3], device), ..ragged_args(device) };
            let call = || ragged_attention(args.clone(), &RAGGED);
            assert_values_refused(device, args.validate_device_inputs(), call, "cu_seqlens");
            let cu_seqlens_k = Some(ints(&wrong, [3], device));
            let args = RaggedAttentionArgs { cu_seqlens_k, ..ragged_args(device) };
            let call = || ragged_attention(args.clone(), &RAGGED);
            assert_values_refused(device, args.validate_device_inputs(), call, "cu_seqlens_k");
        }
    });
}

/// As in `mla_decode`.
#[test]
fn ops_errors_ragged_attention_without_heads() {
    for_each_device(|device| {
        let none = || zeros([4, 0, 6], device);
        let args = RaggedAttentionArgs { q: none(), k: none(), v: none(), ..ragged_args(device) };
        assert_refused(ragged_attention(args, &RAGGED), Value, "q");
    });
}

/// T 2, H 3, Dv 4.
fn merge_args(device: &Device) -> MergeStateArgs {
    let (out, lse) = (|| zeros([2, 3, 4], device), || zeros([2, 3], device));
    MergeStateArgs { out_a: out(), lse_a: lse(), out_b: out(), lse_b: lse() }
}

#[test]
fn ops_errors_merge_state() {
    for_each_device(|device| {
        merge_state(merge_args(device)).expect("legal before it is changed");
        for wrong in [[3, 3, 4], [2, 1, 4], [2, 3, 5]] {
            let args = MergeStateArgs { out_b: zeros(wrong, device), ..merge_args(device) };
            assert_refused(merge_state(args), Shape, "out_b");
        }
        for wrong in [[3, 3], [2, 1]] {
            let args = MergeStateArgs { lse_a: zeros(wrong, device), ..merge_args(device) };
            assert_refused(merge_state(args), Shape, "lse_a");
            let args = MergeStateArgs { lse_b: zeros(wrong, device), ..merge_args(device) };
            assert_refused(merge_state(args), Shape, "lse_b");
        }
        for wrong in [[1, 5, 3], [3, 5, 2], [1, 1, 3]] {
            assert_refused(merge_states(zeros([1, 5, 2, 4], device), zeros(wrong, device)), Shape, "lses");
        }
    });
}

/// A refused part leaves the accumulator as it was.
#[test]
fn ops_errors_accumulator() {
    for_each_device(|device| {
        let mut accumulator = Accumulator::empty(2, 3, 4, device).expect("small");
        let (out, lse) = (Tensor::ones([2, 3, 4], (device, DType::F32)), zeros([2, 3], device));
        accumulator.merge(out.clone(), lse.clone()).expect("legal");
        let before = (bits(&accumulator.out), bits(&accumulator.lse));
        assert_refused(accumulator.merge(zeros([2, 3, 5], device), lse.clone()), Shape, "out");
        assert_refused(accumulator.merge(zeros([1, 3, 4], device), lse.clone()), Shape, "out");
        assert_refused(accumulator.merge(out.clone(), zeros([2, 2], device)), Shape, "lse");
        if *device == Device::flex() {
            assert_refused(accumulator.merge(out.clone().cast(FloatDType::F64), lse.clone()), WrongType, "out");
            assert_refused(accumulator.merge(out.clone(), lse.clone().cast(FloatDType::F16)), WrongType, "lse");
        }
        assert_eq!((bits(&accumulator.out), bits(&accumulator.lse)), before);
        let mut wrong = accumulator.clone();
        wrong.out = wrong.out.cast(FloatDType::F16);
        assert_refused(wrong.merge(out.clone(), lse.clone()), WrongType, "accumulator.out");
        accumulator.lse = zeros([2, 4], device);
        assert_refused(accumulator.merge(out, lse), Shape, "accumulator.lse");
    });
}

/// R 3, T 8, B 2, pages of 4.
/// Both operations that take a batch refuse it.
fn paging_refuses(kind: Kind, argument: &str, args: PagedBatchArgs) {
    assert_refused(page_table(args.clone(), 4), kind, argument);
    assert_refused(kv_indices(args, 4), kind, argument);
}

#[test]
fn ops_errors_paging() {
    for_each_device(|device| {
        page_table(paged_args(device), 4).expect("legal before it is changed");
        kv_indices(paged_args(device), 4).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut PagedBatchArgs, &Device)| {
            let mut args = paged_args(device);
            change(&mut args, device);
            paging_refuses(kind, argument, args);
        };
        refuses(Shape, "seq_lens", |it, device| it.seq_lens = ints(&[1], [1], device));
        refuses(Shape, "kv_start", |it, device| it.kv_start = Some(ints(&[0; 3], [3], device)));
        refuses(WrongType, "req_to_token", |it, _| it.req_to_token = it.req_to_token.clone().cast(IntDType::I64));
        refuses(WrongType, "req_rows", |it, _| it.req_rows = it.req_rows.clone().cast(IntDType::I64));
        refuses(WrongType, "seq_lens", |it, _| it.seq_lens = it.seq_lens.clone().cast(IntDType::I64));
        refuses(WrongType, "kv_start", |it, _| it.kv_start = it.kv_start.take().map(|it| it.cast(IntDType::I64)));
        refuses(Value, "page_size", |it, _| it.page_size = 0);
        refuses(Value, "page_size", |it, _| it.page_size = 3);

        let values = |argument, rows: [i32; 2], starts: [i32; 2], lens: [i32; 2]| {
            let mut args = paged_args(device);
            (args.req_rows, args.seq_lens) = (ints(&rows, [2], device), ints(&lens, [2], device));
            args.kv_start = Some(ints(&starts, [2], device));
            assert_values_refused(device, args.validate_device_inputs(), || page_table(args.clone(), 4), argument);
            assert_values_refused(device, args.validate_device_inputs(), || kv_indices(args.clone(), 4), argument);
        };
        values("req_rows", [0, 3], [0, 0], [1, 1]);
        values("req_rows", [-1, 0], [0, 0], [1, 1]);
        values("kv_start", [0, 1], [0, 2], [1, 1]);
        values("kv_start", [0, 1], [-4, 0], [1, 1]);
        values("kv_start", [0, 1], [12, 0], [0, 1]);
        values("seq_lens", [0, 1], [0, 0], [1, -1]);
        values("seq_lens", [0, 1], [4, 0], [5, 1]);
        values("seq_lens", [0, 1], [0, 0], [8, 9]);

        // The first token of a page is at its first slot; what lies behind it, or past the end, is not read.
        for wrong in [-1, 1, 2, i32::MIN, i32::MAX] {
            let mut map = [5; 24];
            (map[0], map[16], map[20]) = (4, wrong, 12);
            let legal = PagedBatchArgs { req_to_token: ints(&map, [3, 8], device), ..paged_args(device) };
            legal.validate_device_inputs().expect("no entry of the batch is wrong");
            map[20] = wrong;
            let args = PagedBatchArgs { req_to_token: ints(&map, [3, 8], device), ..paged_args(device) };
            let validated = || args.validate_device_inputs();
            assert_values_refused(device, validated(), || page_table(args.clone(), 4), "req_to_token");
            assert_values_refused(device, validated(), || kv_indices(args.clone(), 4), "req_to_token");
        }
    });
}

/// Page sizes are powers of two, and some of those are larger than any number of tokens that i32 counts.
#[rstest]
fn ops_errors_huge_pages(#[values(1 << 30, 1 << 31, 1 << 32, 1 << 63)] page_size: usize) {
    for_each_device(|device| {
        let args = PagedBatchArgs { page_size, kv_start: None, ..paged_args(device) };
        // Accepted or refused: page 0 holds everything, or the size is out of range. A panic is neither.
        match page_table(args.clone(), 4) {
            Ok(it) => assert_eq!(crate::ops_fixture::int_values(it.table), [0, -1, -1, -1, 0, -1, -1, -1]),
            Err(error) => assert_refused(Err::<(), _>(error), Value, "page_size"),
        }
        match kv_indices(args, 4) {
            Ok(csr) => assert_eq!(crate::ops_fixture::int_values(csr.indices), [0, 0, -1, -1]),
            Err(error) => assert_refused(Err::<(), _>(error), Value, "page_size"),
        }
    });
}

#[test]
fn ops_errors_boundless_capacity() {
    for_each_device(|device| {
        assert_refused(kv_indices(paged_args(device), usize::MAX), Value, "capacity");
        assert_refused(page_table(paged_args(device), usize::MAX), Value, "max_pages");
    });
}

/// P 3, S 4, D 7, Dv 5, N 2.
fn write_args(device: &Device) -> WriteLatentArgs {
    WriteLatentArgs {
        cache: new_pool([3, 4, 7], FloatDType::F32, device).expect("small").into(),
        slots: ints(&[3, 7], [2], device),
        latent: Tensor::ones([2, 5], (device, DType::F32)),
        rope: Some(Tensor::ones([2, 2], (device, DType::F32))),
    }
}

/// The error, after a look at the cache that comes back with it: it must be as it was.
fn write_refused(args: WriteLatentArgs) -> Result<(), MlaError> {
    let before = bits(&args.cache.dense());
    let Err(refused) = write_latent(args) else { return Ok(()) };
    assert!(bits(&refused.cache.dense()) == before, "{refused}: the cache has changed");
    Err(refused.error)
}

#[test]
fn ops_errors_write_latent() {
    for_each_device(|device| {
        write_latent(write_args(device)).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut WriteLatentArgs, &Device)| {
            let mut args = write_args(device);
            change(&mut args, device);
            assert_refused(write_refused(args), kind, argument);
        };
        refuses(Shape, "latent", |it, device| it.latent = zeros([3, 5], device));
        refuses(Shape, "latent", |it, device| it.latent = zeros([2, 6], device));
        refuses(Shape, "latent", |it, _| it.rope = None);
        refuses(Shape, "latent", |it, device| it.rope = Some(zeros([2, 3], device)));
        refuses(Shape, "rope", |it, device| it.rope = Some(zeros([1, 2], device)));
        refuses(Value, "rope", |it, device| it.rope = Some(zeros([2, 7], device)));
        refuses(Value, "rope", |it, device| it.rope = Some(zeros([2, 8], device)));
        refuses(WrongType, "slots", |it, _| it.slots = it.slots.clone().cast(IntDType::I64));
        for wrong in [[0, 12], [-2, 0], [5, 5]] {
            let args = WriteLatentArgs { slots: ints(&wrong, [2], device), ..write_args(device) };
            let validated = args.validate_device_inputs();
            assert_values_refused(device, validated, || write_refused(args), "slots");
        }
        let skipped_twice = WriteLatentArgs { slots: ints(&[-1, -1], [2], device), ..write_args(device) };
        skipped_twice.validate_device_inputs().expect("-1 may occur twice");
    });
}

/// Every tensor on the device of the first.
#[test]
fn ops_errors_another_device() {
    for_each_device(|device| {
        let flex = Device::flex();
        if *device == flex {
            skip(device, "there is no other device");
            return;
        }
        let named = |result: Result<(), MlaError>, argument: &str| {
            let error = result.expect_err("tensors on two devices");
            assert!(matches!(&error, MlaError::Device { argument: name, .. } if *name == argument), "{error}");
        };
        let mut decode = Decode::new(device);
        decode.args.kv_cache = Decode::new(&flex).args.kv_cache;
        named(decode.call().map(drop), "kv_cache");
        let args = RaggedAttentionArgs { v: ragged_args(&flex).v, ..ragged_args(device) };
        named(ragged_attention(args, &RAGGED).map(drop), "v");
        let args = MergeStateArgs { lse_b: merge_args(&flex).lse_b, ..merge_args(device) };
        named(merge_state(args).map(drop), "lse_b");
        let args = PagedBatchArgs { seq_lens: paged_args(&flex).seq_lens, ..paged_args(device) };
        named(page_table(args, 4).map(drop), "seq_lens");
        let args = WriteLatentArgs { slots: write_args(&flex).slots, ..write_args(device) };
        named(write_refused(args), "slots");
    });
}
