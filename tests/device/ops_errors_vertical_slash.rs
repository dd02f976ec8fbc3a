//! Wrong arguments of `vertical_slash_index` and `vertical_slash_attention`; how they are compared: `ops_errors.rs`.

use burn::tensor::{Device, FloatDType, IntDType};
use mla_ops::{
    MlaError, PackedVerticalSlashArgs, VerticalSlashAttentionArgs, VerticalSlashAttentionOptions, VerticalSlashIndex,
    VerticalSlashIndexArgs, VerticalSlashIndexOptions, packed_vertical_slash_attention, vertical_slash_attention,
    vertical_slash_index,
};

use crate::devices::{for_each_device, skip};
use crate::ops_fixture::ints;
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, assert_values_refused, zeros};

/// B 2, H 4, Nv 3, Ns 2.
fn index_args(device: &Device) -> VerticalSlashIndexArgs {
    VerticalSlashIndexArgs {
        q_lens: ints(&[5, 8], [2], device),
        kv_lens: ints(&[9, 8], [2], device),
        vertical: ints(&[0; 24], [2, 4, 3], device),
        slash: ints(&[0; 16], [2, 4, 2], device),
        vertical_counts: Some(ints(&[3; 4], [4], device)),
        slash_counts: Some(ints(&[2; 4], [4], device)),
    }
}

const OPTIONS: VerticalSlashIndexOptions =
    VerticalSlashIndexOptions { max_query_len: 8, block_size_m: 4, block_size_n: 4, causal: true };

#[test]
fn ops_errors_vertical_slash_index() {
    for_each_device(|device| {
        vertical_slash_index(index_args(device), &OPTIONS).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut VerticalSlashIndexArgs, &Device)| {
            let mut args = index_args(device);
            change(&mut args, device);
            assert_refused(vertical_slash_index(args, &OPTIONS), kind, argument);
        };
        refuses(Shape, "kv_lens", |it, device| it.kv_lens = ints(&[1], [1], device));
        refuses(Shape, "vertical", |it, device| it.vertical = ints(&[0; 12], [1, 4, 3], device));
        refuses(Shape, "slash", |it, device| it.slash = ints(&[0; 12], [2, 3, 2], device));
        refuses(Shape, "vertical_counts", |it, device| it.vertical_counts = Some(ints(&[1; 3], [3], device)));
        refuses(Shape, "slash_counts", |it, device| it.slash_counts = Some(ints(&[1; 5], [5], device)));
        refuses(WrongType, "q_lens", |it, _| it.q_lens = it.q_lens.clone().cast(IntDType::I64));
        refuses(WrongType, "kv_lens", |it, _| it.kv_lens = it.kv_lens.clone().cast(IntDType::I64));
        refuses(WrongType, "vertical", |it, _| it.vertical = it.vertical.clone().cast(IntDType::I64));
        refuses(WrongType, "slash", |it, _| it.slash = it.slash.clone().cast(IntDType::I64));
        refuses(WrongType, "slash_counts", |it, _| {
            it.slash_counts = it.slash_counts.take().map(|it| it.cast(IntDType::I64));
        });
        for (argument, options) in [
            ("block_size_m", VerticalSlashIndexOptions { block_size_m: 0, ..OPTIONS }),
            ("block_size_m", VerticalSlashIndexOptions { block_size_m: usize::MAX, ..OPTIONS }),
            ("block_size_n", VerticalSlashIndexOptions { block_size_n: 0, ..OPTIONS }),
            ("block_size_n", VerticalSlashIndexOptions { block_size_n: (1 << 16) + 1, ..OPTIONS }),
            ("max_query_len", VerticalSlashIndexOptions { max_query_len: usize::MAX, ..OPTIONS }),
        ] {
            assert_refused(vertical_slash_index(index_args(device), &options), Value, argument);
        }
        let values = |argument, change: fn(&mut VerticalSlashIndexArgs, &Device)| {
            let mut args = index_args(device);
            change(&mut args, device);
            let validated = args.validate_device_inputs(&OPTIONS);
            assert_values_refused(device, validated, || vertical_slash_index(args, &OPTIONS), argument);
        };
        values("q_lens", |it, device| it.q_lens = ints(&[5, 9], [2], device));
        values("q_lens", |it, device| it.q_lens = ints(&[-1, 8], [2], device));
        values("kv_lens", |it, device| it.kv_lens = ints(&[9, -8], [2], device));
        values("kv_lens", |it, device| it.kv_lens = ints(&[9, i32::MAX], [2], device));
        values("vertical_counts", |it, device| it.vertical_counts = Some(ints(&[3, 3, 3, 4], [4], device)));
        values("slash_counts", |it, device| it.slash_counts = Some(ints(&[2, -1, 2, 2], [4], device)));
    });
}

const ATTENTION: VerticalSlashAttentionOptions =
    VerticalSlashAttentionOptions { softmax_scale: 1.0, softcap: None, causal: true };

/// B 2, H 4, 2 rows of 4 queries, 2 key blocks of 4 keys and 3 columns at most.
fn index(device: &Device) -> VerticalSlashIndex {
    VerticalSlashIndex {
        block_count: ints(&[2; 16], [2, 4, 2], device),
        block_offset: ints(&[0, 5].repeat(16), [2, 4, 2, 2], device),
        column_count: ints(&[1; 16], [2, 4, 2], device),
        column_index: ints(&[4, -1, -1].repeat(16), [2, 4, 2, 3], device),
        block_size_m: 4,
        block_size_n: 4,
    }
}

/// B 2, Sq 6, Sk 9, H 4, Hkv 2, d 6, dv 5.
fn attention_args(device: &Device) -> VerticalSlashAttentionArgs {
    VerticalSlashAttentionArgs {
        q: zeros([2, 6, 4, 6], device),
        k: zeros([2, 9, 2, 6], device),
        v: zeros([2, 9, 2, 5], device),
        q_lens: ints(&[6, 3], [2], device),
        kv_lens: ints(&[9, 4], [2], device),
        index: index(device),
    }
}

#[test]
fn ops_errors_vertical_slash_attention() {
    for_each_device(|device| {
        vertical_slash_attention(attention_args(device), &ATTENTION).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut VerticalSlashAttentionArgs, &Device)| {
            let mut args = attention_args(device);
            change(&mut args, device);
            assert_refused(vertical_slash_attention(args, &ATTENTION), kind, argument);
        };
        refuses(Shape, "k", |it, device| it.k = zeros([1, 9, 2, 6], device));
        refuses(Shape, "k", |it, device| it.k = zeros([2, 9, 2, 5], device));
        refuses(Value, "k", |it, device| it.k = zeros([2, 9, 3, 6], device));
        refuses(Value, "k", |it, device| it.k = zeros([2, 9, 0, 6], device));
        refuses(Shape, "v", |it, device| it.v = zeros([2, 8, 2, 5], device));
        refuses(Shape, "v", |it, device| it.v = zeros([2, 9, 1, 5], device));
        refuses(Value, "v", |it, device| it.v = zeros([2, 9, 2, 0], device));
        refuses(Value, "q", |it, device| it.q = zeros([2, 6, 0, 6], device));
        refuses(Value, "q", |it, device| it.q = zeros([2, 6, 4, 0], device));
        refuses(Shape, "q_lens", |it, device| it.q_lens = ints(&[6], [1], device));
        refuses(Shape, "kv_lens", |it, device| it.kv_lens = ints(&[6; 3], [3], device));
        refuses(WrongType, "q_lens", |it, _| it.q_lens = it.q_lens.clone().cast(IntDType::I64));
        refuses(Shape, "index.block_count", |it, device| it.index.block_count = ints(&[1; 4], [2, 1, 2], device));
        refuses(Shape, "index.column_count", |it, device| it.index.column_count = ints(&[1; 8], [2, 4, 1], device));
        refuses(Shape, "index.block_offset", |it, device| {
            it.index.block_offset = ints(&[1; 24], [2, 4, 3, 1], device);
        });
        refuses(Shape, "index.column_index", |it, device| {
            it.index.column_index = ints(&[1; 16], [1, 8, 2, 1], device);
        });
        refuses(WrongType, "index.block_offset", |it, _| {
            it.index.block_offset = it.index.block_offset.clone().cast(IntDType::I64);
        });
        refuses(Value, "index.block_size_m", |it, _| it.index.block_size_m = 0);
        refuses(Value, "index.block_size_n", |it, _| it.index.block_size_n = 0);
        for (argument, options) in [
            ("softmax_scale", VerticalSlashAttentionOptions { softmax_scale: f32::NAN, ..ATTENTION }),
            ("softcap", VerticalSlashAttentionOptions { softcap: Some(-1.0), ..ATTENTION }),
            ("softcap", VerticalSlashAttentionOptions { softcap: Some(f32::INFINITY), ..ATTENTION }),
        ] {
            assert_refused(vertical_slash_attention(attention_args(device), &options), Value, argument);
        }
    });
}

#[test]
fn ops_errors_vertical_slash_float_types() {
    let device = &Device::flex();
    let args = attention_args(device);
    let wrong = VerticalSlashAttentionArgs { q: args.q.clone().cast(FloatDType::F64), ..args.clone() };
    assert_refused(vertical_slash_attention(wrong, &ATTENTION), WrongType, "q");
    let wrong = VerticalSlashAttentionArgs { k: args.k.clone().cast(FloatDType::F16), ..args.clone() };
    assert_refused(vertical_slash_attention(wrong, &ATTENTION), WrongType, "k");
    let wrong = VerticalSlashAttentionArgs { v: args.v.clone().cast(FloatDType::BF16), ..args };
    assert_refused(vertical_slash_attention(wrong, &ATTENTION), WrongType, "v");
}

#[test]
fn ops_errors_vertical_slash_attention_values() {
    for_each_device(|device| {
        let values = |argument, change: fn(&mut VerticalSlashAttentionArgs, &Device)| {
            let mut args = attention_args(device);
            change(&mut args, device);
            let validated = args.validate_device_inputs();
            assert_values_refused(device, validated, || vertical_slash_attention(args, &ATTENTION), argument);
        };
        values("q_lens", |it, device| it.q_lens = ints(&[7, 3], [2], device));
        values("q_lens", |it, device| it.q_lens = ints(&[-1, 3], [2], device));
        // Rows for three queries.
        values("q_lens", |it, device| {
            it.index = VerticalSlashIndex { block_size_m: 1, ..index(device) };
        });
        values("kv_lens", |it, device| it.kv_lens = ints(&[9, 10], [2], device));
        values("index.block_count", |it, device| it.index.block_count = ints(&[3; 16], [2, 4, 2], device));
        values("index.block_count", |it, device| it.index.block_count = ints(&[-1; 16], [2, 4, 2], device));
        values("index.column_count", |it, device| it.index.column_count = ints(&[4; 16], [2, 4, 2], device));
        values("index.block_offset", |it, device| {
            it.index.block_offset = ints(&[-1, 5].repeat(16), [2, 4, 2, 2], device);
        });
        values("index.block_offset", |it, device| {
            it.index.block_offset = ints(&[1, 4].repeat(16), [2, 4, 2, 2], device);
        });
        values("index.column_index", |it, device| {
            it.index.column_index = ints(&[3, -1, -1].repeat(16), [2, 4, 2, 3], device);
        });
        values("index.column_index", |it, device| {
            it.index.column_index = ints(&[-1, -1, -1].repeat(16), [2, 4, 2, 3], device);
        });
        // What is behind the counts, and the second row of a sequence of three queries, are not used.
        let mut args = attention_args(device);
        args.index.block_count = ints(&[2, 2, 2, 2, 2, 2, 2, 2, 2, 9, 2, 9, 2, 9, 2, 9], [2, 4, 2], device);
        args.validate_device_inputs().expect("legal");
    });
}

#[test]
fn ops_errors_packed_vertical_slash_attention() {
    for_each_device(|device| {
        // Nq 7, Nk 12.
        let args = |cu_seqlens_q: &[i32], cu_seqlens_k: &[i32]| PackedVerticalSlashArgs {
            q: zeros([7, 4, 6], device),
            k: zeros([12, 2, 6], device),
            v: zeros([12, 2, 5], device),
            cu_seqlens_q: ints(cu_seqlens_q, [cu_seqlens_q.len()], device),
            cu_seqlens_k: ints(cu_seqlens_k, [cu_seqlens_k.len()], device),
            index: index(device),
        };
        let call = |args| packed_vertical_slash_attention(args, &ATTENTION);
        let legal = || args(&[0, 5, 7], &[0, 8, 12]);
        call(legal()).expect("legal before it is changed");
        assert_refused(call(PackedVerticalSlashArgs { k: zeros([12, 2, 5], device), ..legal() }), Shape, "k");
        assert_refused(call(PackedVerticalSlashArgs { v: zeros([11, 2, 5], device), ..legal() }), Shape, "v");
        assert_refused(call(PackedVerticalSlashArgs { k: zeros([12, 3, 6], device), ..legal() }), Value, "k");
        assert_refused(call(args(&[], &[])), Value, "cu_seqlens_q");
        assert_refused(call(args(&[0, 5, 7], &[0, 12])), Shape, "cu_seqlens_k");
        assert_refused(call(args(&[0, 7], &[0, 12])), Shape, "index.block_count");
        let long = VerticalSlashIndex { block_size_m: 1, ..index(device) };
        for (argument, wrong) in [
            ("cu_seqlens_q", args(&[1, 5, 7], &[0, 8, 12])),
            ("cu_seqlens_q", args(&[0, 5, 8], &[0, 8, 12])),
            ("cu_seqlens_q", args(&[0, 5, 4], &[0, 8, 12])),
            ("cu_seqlens_k", args(&[0, 5, 7], &[0, 8, 13])),
            ("cu_seqlens_q", PackedVerticalSlashArgs { index: long, ..legal() }),
        ] {
            let validated = wrong.validate_device_inputs();
            assert_values_refused(device, validated, || call(wrong), argument);
        }
    });
}

/// Every tensor on the device of the first.
#[test]
fn ops_errors_vertical_slash_another_device() {
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
        let args = VerticalSlashIndexArgs { slash: index_args(&flex).slash, ..index_args(device) };
        named(vertical_slash_index(args, &OPTIONS).map(drop), "slash");
        let args = VerticalSlashAttentionArgs { v: attention_args(&flex).v, ..attention_args(device) };
        named(vertical_slash_attention(args, &ATTENTION).map(drop), "v");
        let mut args = attention_args(device);
        args.index.column_index = index(&flex).column_index;
        named(vertical_slash_attention(args, &ATTENTION).map(drop), "index.column_index");
    });
}
