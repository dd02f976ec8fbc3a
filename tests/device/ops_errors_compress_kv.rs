//! Wrong arguments of `compress_kv`; how they are compared: `ops_errors.rs`.

use burn::tensor::{DType, Device, FloatDType, IntDType, Tensor};
use mla_ops::cache::{Pool, new_pool};
use mla_ops::{CompressKvArgs, CompressKvOptions, EntryCache, MlaError, compress_kv};

use crate::devices::{FLOATS, for_each_device, is_wgpu, skip};
use crate::ops_fixture::{bits, ints};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, assert_values_refused, zeros};

/// B 2, N 5, m 2, d 6 with overlap (C 12, L 4), n 2, dr 4; R 3.
fn args(device: &Device) -> CompressKvArgs {
    CompressKvArgs {
        kv_gates: Tensor::ones([5, 24], (device, DType::F32)),
        state: new_pool([3, 4, 24], FloatDType::F32, device).expect("small"),
        state_rows: ints(&[2, 0], [2], device),
        state_slots: ints(&[9, 10, 0, 1, 2], [5], device),
        cu_seqlens: ints(&[0, 2, 5], [3], device),
        starts: ints(&[1, 0], [2], device),
        position_bias: zeros([2, 12], device),
        norm_weight: zeros([6], device),
        cos: zeros([2, 2, 2], device),
        sin: zeros([2, 2, 2], device),
        cache: Some(EntryCache {
            cache: new_pool([2, 4, 6], FloatDType::F32, device).expect("small").into(),
            slots: ints(&[3, -1, 7, 0], [4], device),
        }),
    }
}

fn change_cache(args: &mut CompressKvArgs, change: impl FnOnce(&mut EntryCache)) {
    args.cache.as_mut().map(change).expect("there is one");
}

const OPTIONS: CompressKvOptions = CompressKvOptions { overlap: true, norm_eps: 1e-6, dtype: FloatDType::F32 };

/// The error, after a look at state and cache that come back with it: they must be as they were.
fn refused(args: CompressKvArgs, options: &CompressKvOptions) -> Result<(), MlaError> {
    let seen = |state: &Tensor<3>, cache: Option<&Pool>| (bits(state), cache.map(|cache| bits(&cache.dense())));
    let before = seen(&args.state, args.cache.as_ref().map(|to| &to.cache));
    let Err(refused) = compress_kv(args, options) else { return Ok(()) };
    assert!(seen(&refused.state, refused.cache.as_ref()) == before, "{refused}: they have changed");
    Err(refused.error)
}

#[test]
fn ops_errors_compress_kv() {
    for_each_device(|device| {
        compress_kv(args(device), &OPTIONS).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut CompressKvArgs, &Device)| {
            let mut args = args(device);
            change(&mut args, device);
            assert_refused(refused(args, &OPTIONS), kind, argument);
        };
        refuses(Shape, "kv_gates", |it, device| it.kv_gates = zeros([5, 12], device));
        refuses(Shape, "kv_gates", |it, device| it.kv_gates = zeros([5, 25], device));
        refuses(Shape, "state", |it, device| it.state = zeros([3, 2, 24], device));
        refuses(Shape, "state", |it, device| it.state = zeros([3, 4, 12], device));
        refuses(Shape, "state_slots", |it, device| it.state_slots = ints(&[0; 4], [4], device));
        refuses(Shape, "cu_seqlens", |it, device| it.cu_seqlens = ints(&[0, 5], [2], device));
        refuses(Shape, "cu_seqlens", |it, device| it.cu_seqlens = ints(&[], [0], device));
        refuses(Shape, "cu_seqlens", |it, device| it.state_rows = ints(&[1], [1], device));
        refuses(Shape, "starts", |it, device| it.starts = ints(&[0; 3], [3], device));
        refuses(Shape, "position_bias", |it, device| it.position_bias = zeros([2, 18], device));
        refuses(Shape, "position_bias", |it, device| it.position_bias = zeros([2, 13], device));
        refuses(Shape, "position_bias", |it, device| it.position_bias = zeros([2, 0], device));
        refuses(Shape, "state", |it, device| it.position_bias = zeros([3, 12], device));
        refuses(Value, "position_bias", |it, device| it.position_bias = zeros([0, 12], device));
        refuses(Shape, "position_bias", |it, device| it.norm_weight = zeros([5], device));
        refuses(Value, "norm_weight", |it, device| it.norm_weight = zeros([0], device));
        refuses(Shape, "cos", |it, device| it.cos = zeros([1, 2, 2], device));
        refuses(Shape, "cos", |it, device| it.cos = zeros([2, 2, 4], device));
        refuses(Shape, "sin", |it, device| it.sin = zeros([2, 2, 1], device));
        refuses(Shape, "sin", |it, device| it.sin = zeros([2, 3, 2], device));
        refuses(Shape, "cache", |it, device| change_cache(it, |to| to.cache = zeros::<3>([2, 4, 5], device).into()));
        refuses(Shape, "cache_slots", |it, device| change_cache(it, |to| to.slots = ints(&[0; 2], [2], device)));
        refuses(WrongType, "cache_slots", |it, _| {
            change_cache(it, |to| to.slots = to.slots.clone().cast(IntDType::I64));
        });
        refuses(WrongType, "state_rows", |it, _| it.state_rows = it.state_rows.clone().cast(IntDType::I64));
        refuses(WrongType, "state_slots", |it, _| it.state_slots = it.state_slots.clone().cast(IntDType::I64));
        refuses(WrongType, "cu_seqlens", |it, _| it.cu_seqlens = it.cu_seqlens.clone().cast(IntDType::I64));
        refuses(WrongType, "starts", |it, _| it.starts = it.starts.clone().cast(IntDType::I64));
        for (argument, options) in [
            ("overlap", CompressKvOptions { overlap: false, ..OPTIONS }),
            ("norm_eps", CompressKvOptions { norm_eps: f32::NAN, ..OPTIONS }),
            ("norm_eps", CompressKvOptions { norm_eps: f32::INFINITY, ..OPTIONS }),
            ("norm_eps", CompressKvOptions { norm_eps: -1e-6, ..OPTIONS }),
            ("dtype", CompressKvOptions { dtype: FloatDType::F64, ..OPTIONS }),
            ("dtype", CompressKvOptions { dtype: FloatDType::Flex32, ..OPTIONS }),
        ] {
            assert_refused(refused(args(device), &options), Value, argument);
        }
    });
}

/// With C = d a token serves its own window only.
#[test]
fn ops_errors_compress_kv_without_overlap() {
    for_each_device(|device| {
        let narrow = |device| CompressKvArgs {
            kv_gates: zeros([5, 12], device),
            state: new_pool([3, 2, 12], FloatDType::F32, device).expect("small"),
            state_slots: ints(&[5, 4, -1, 1, 0], [5], device),
            position_bias: zeros([2, 6], device),
            ..args(device)
        };
        let options = CompressKvOptions { overlap: false, ..OPTIONS };
        compress_kv(narrow(device), &options).expect("legal before it is changed");
        assert_refused(refused(narrow(device), &OPTIONS), Value, "overlap");
        let long =
            CompressKvArgs { state: new_pool([3, 4, 12], FloatDType::F32, device).expect("small"), ..narrow(device) };
        assert_refused(refused(long, &options), Shape, "state");
    });
}

#[test]
fn ops_errors_compress_kv_float_types() {
    let device = &Device::flex();
    let refuses = |argument, change: fn(&mut CompressKvArgs)| {
        let mut args = args(device);
        change(&mut args);
        assert_refused(refused(args, &OPTIONS), WrongType, argument);
    };
    refuses("kv_gates", |it| it.kv_gates = it.kv_gates.clone().cast(FloatDType::F64));
    refuses("cache", |it| change_cache(it, |to| to.cache = to.cache.dense().cast(FloatDType::F16).into()));
    refuses("state", |it| it.state = it.state.clone().cast(FloatDType::F16));
    refuses("position_bias", |it| it.position_bias = it.position_bias.clone().cast(FloatDType::F64));
    refuses("norm_weight", |it| it.norm_weight = it.norm_weight.clone().cast(FloatDType::BF16));
    refuses("cos", |it| it.cos = it.cos.clone().cast(FloatDType::F16));
    refuses("sin", |it| it.sin = it.sin.clone().cast(FloatDType::F64));
}

#[test]
fn ops_errors_compress_kv_values() {
    for_each_device(|device| {
        let values = |argument, change: fn(&mut CompressKvArgs, &Device)| {
            let mut args = args(device);
            change(&mut args, device);
            let validated = args.validate_device_inputs();
            assert_values_refused(device, validated, || refused(args, &OPTIONS), argument);
        };
        args(device).validate_device_inputs().expect("legal");
        values("state_rows", |it, device| it.state_rows = ints(&[3, 0], [2], device));
        values("state_rows", |it, device| it.state_rows = ints(&[2, -1], [2], device));
        values("state_rows", |it, device| it.state = zeros([0, 4, 24], device));
        values("state_slots", |it, device| it.state_slots = ints(&[9, 10, 0, 1, 12], [5], device));
        values("state_slots", |it, device| it.state_slots = ints(&[9, 10, 0, -2, 2], [5], device));
        values("state_slots", |it, device| it.state_slots = ints(&[9, 10, 9, 1, 2], [5], device));
        values("cache_slots", |it, device| change_cache(it, |to| to.slots = ints(&[3, -1, 8, 0], [4], device)));
        values("cache_slots", |it, device| change_cache(it, |to| to.slots = ints(&[3, -1, 3, 0], [4], device)));
        values("cu_seqlens", |it, device| it.cu_seqlens = ints(&[1, 2, 5], [3], device));
        values("cu_seqlens", |it, device| it.cu_seqlens = ints(&[0, -1, 5], [3], device));
        values("cu_seqlens", |it, device| it.cu_seqlens = ints(&[0, 6, 5], [3], device));
        values("cu_seqlens", |it, device| it.cu_seqlens = ints(&[0, 3, 2], [3], device));
        values("cu_seqlens", |it, device| it.cu_seqlens = ints(&[0, 2, 4], [3], device));
        values("starts", |it, device| it.starts = ints(&[0, -1], [2], device));
        let skipped = CompressKvArgs { state_slots: ints(&[-1; 5], [5], device), ..args(device) };
        skipped.validate_device_inputs().expect("-1 may occur often");
    });
}

/// Every tensor on the device of the first.
#[test]
fn ops_errors_compress_kv_another_device() {
    for_each_device(|device| {
        let flex = args(&Device::flex());
        if *device == Device::flex() {
            skip(device, "there is no other device");
            return;
        }
        let named = |argument: &str, change: fn(&mut CompressKvArgs, &CompressKvArgs)| {
            let mut args = args(device);
            change(&mut args, &flex);
            let error = refused(args, &OPTIONS).expect_err("tensors on two devices");
            assert!(matches!(&error, MlaError::Device { argument: name, .. } if *name == argument), "{error}");
        };
        named("state", |it, flex| it.state = flex.state.clone());
        named("state_rows", |it, flex| it.state_rows = flex.state_rows.clone());
        named("state_slots", |it, flex| it.state_slots = flex.state_slots.clone());
        named("cu_seqlens", |it, flex| it.cu_seqlens = flex.cu_seqlens.clone());
        named("starts", |it, flex| it.starts = flex.starts.clone());
        named("position_bias", |it, flex| it.position_bias = flex.position_bias.clone());
        named("norm_weight", |it, flex| it.norm_weight = flex.norm_weight.clone());
        named("cos", |it, flex| it.cos = flex.cos.clone());
        named("sin", |it, flex| it.sin = flex.sin.clone());
    });
}

/// What a device cannot do is an error of the call: types, buffers and cubes that it does not have.
#[test]
fn ops_errors_compress_kv_limits() {
    for_each_device(|device| {
        for dtype in FLOATS.into_iter().filter(|dtype| !device.supports_dtype(*dtype)) {
            let options = CompressKvOptions { dtype: FloatDType::from(dtype), ..OPTIONS };
            assert_refused(refused(args(device), &options), Value, "dtype");
        }
        if !is_wgpu(device) {
            skip(device, "it may have room");
            return;
        }
        let limited = |args, argument: &str| {
            let error = refused(args, &OPTIONS).expect_err("more than the device has room for");
            assert!(matches!(&error, MlaError::DeviceLimit { argument: name, .. } if *name == argument), "{error}");
        };
        let angles = || Tensor::empty([2, i32::MAX as usize, 0], (device, DType::F32));
        limited(CompressKvArgs { cos: angles(), sin: angles(), cache: None, ..args(device) }, "cos");
        let width = 1 << 14;
        let wide = CompressKvArgs {
            kv_gates: zeros([5, 4 * width], device),
            state: new_pool([3, 4, 4 * width], FloatDType::F32, device).expect("small"),
            position_bias: zeros([2, 2 * width], device),
            norm_weight: zeros([width], device),
            cache: None,
            ..args(device)
        };
        limited(wide, "norm_weight");
    });
}

/// A state whose rows are not in order in memory would have to be copied; only Flex shows that without a fusing backend.
#[test]
fn ops_errors_compress_kv_strided_state() {
    let device = &Device::flex();
    let state = new_pool([4, 3, 24], FloatDType::F32, device).expect("small").swap_dims(0, 1);
    assert_refused(refused(CompressKvArgs { state, ..args(device) }, &OPTIONS), Value, "state");
}
