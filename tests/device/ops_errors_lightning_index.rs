//! Wrong arguments of `lightning_index`; how they are compared: `ops_errors.rs`.

use burn::tensor::{DType, Device, FloatDType, IntDType, Tensor};
use mla_ops::{IndexForm, LightningIndexArgs, LightningIndexOptions, MlaError, lightning_index};

use crate::devices::{FLOATS, for_each_device, is_wgpu, skip};
use crate::ops_fixture::ints;
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, assert_values_refused, zeros};

/// B 2, Sq 3, Hi 4, di 5; 6 pages of 8, of which a sequence has up to 2.
fn args(device: &Device) -> LightningIndexArgs {
    LightningIndexArgs {
        q: zeros([2, 3, 4, 5], device),
        keys: zeros([6, 8, 5], device).into(),
        page_table: ints(&[5, 2, 0, 9], [2, 2], device),
        head_weights: zeros([2, 3, 4], device),
        visible: ints(&[15, 16, 0, 6, 7, 8], [2, 3], device),
    }
}

const OPTIONS: LightningIndexOptions = LightningIndexOptions { k: 4, scale: 1.0, form: IndexForm::Positions };

#[test]
fn ops_errors_lightning_index() {
    for_each_device(|device| {
        lightning_index(args(device), &OPTIONS).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut LightningIndexArgs, &Device)| {
            let mut args = args(device);
            change(&mut args, device);
            assert_refused(lightning_index(args, &OPTIONS), kind, argument);
        };
        refuses(Value, "q", |it, device| it.q = zeros([2, 3, 0, 5], device));
        refuses(Value, "q", |it, device| it.q = zeros([2, 3, 4, 0], device));
        refuses(Shape, "keys", |it, device| it.keys = zeros([6, 8, 4], device).into());
        refuses(Value, "keys", |it, device| it.keys = zeros([6, 7, 5], device).into());
        refuses(Value, "keys", |it, device| it.keys = zeros([6, 0, 5], device).into());
        refuses(Shape, "page_table", |it, device| it.page_table = ints(&[0; 3], [1, 3], device));
        refuses(Shape, "head_weights", |it, device| it.head_weights = zeros([2, 3, 3], device));
        refuses(Shape, "head_weights", |it, device| it.head_weights = zeros([2, 4, 3], device));
        refuses(Shape, "visible", |it, device| it.visible = ints(&[0; 4], [2, 2], device));
        refuses(Shape, "visible", |it, device| it.visible = ints(&[0; 3], [1, 3], device));
        refuses(WrongType, "page_table", |it, _| it.page_table = it.page_table.clone().cast(IntDType::I64));
        refuses(WrongType, "visible", |it, _| it.visible = it.visible.clone().cast(IntDType::I64));
        for (argument, options) in [
            ("k", LightningIndexOptions { k: 0, ..OPTIONS }),
            ("k", LightningIndexOptions { k: 1 << 31, ..OPTIONS }),
            ("k", LightningIndexOptions { k: usize::MAX, ..OPTIONS }),
            ("scale", LightningIndexOptions { scale: f32::NAN, ..OPTIONS }),
            ("scale", LightningIndexOptions { scale: f32::NEG_INFINITY, ..OPTIONS }),
        ] {
            assert_refused(lightning_index(args(device), &options), Value, argument);
        }
    });
}

#[test]
fn ops_errors_lightning_index_dense() {
    for_each_device(|device| {
        let dense = |keys| {
            let LightningIndexArgs { q, head_weights, visible, .. } = args(device);
            LightningIndexArgs::dense(q, keys, head_weights, visible)
        };
        let legal = dense(zeros([2, 16, 5], device)).expect("legal before it is changed");
        lightning_index(legal, &OPTIONS).expect("legal");
        assert_refused(dense(zeros([3, 16, 5], device)), Shape, "keys");
        assert_refused(dense(zeros([2, 16, 4], device)).and_then(|it| lightning_index(it, &OPTIONS)), Shape, "keys");
        let short = dense(zeros([2, 15, 5], device)).expect("legal but for its values");
        assert_values_refused(device, short.validate_device_inputs(), || lightning_index(short, &OPTIONS), "visible");
    });
}

#[test]
fn ops_errors_lightning_index_float_types() {
    let device = &Device::flex();
    let refuses = |argument, change: fn(&mut LightningIndexArgs)| {
        let mut args = args(device);
        change(&mut args);
        assert_refused(lightning_index(args, &OPTIONS), WrongType, argument);
    };
    refuses("q", |it| it.q = it.q.clone().cast(FloatDType::F64));
    refuses("keys", |it| it.keys = it.keys.dense().cast(FloatDType::BF16).into());
    refuses("head_weights", |it| it.head_weights = it.head_weights.clone().cast(FloatDType::F16));
}

#[test]
fn ops_errors_lightning_index_values() {
    for_each_device(|device| {
        let values = |argument, change: fn(&mut LightningIndexArgs, &Device)| {
            let mut args = args(device);
            change(&mut args, device);
            let validated = args.validate_device_inputs();
            assert_values_refused(device, validated, || lightning_index(args, &OPTIONS), argument);
        };
        args(device).validate_device_inputs().expect("legal: the last page is no sequence's");
        values("visible", |it, device| it.visible = ints(&[15, 17, 0, 6, 7, 8], [2, 3], device));
        values("visible", |it, device| it.visible = ints(&[15, 16, -1, 6, 7, 8], [2, 3], device));
        values("page_table", |it, device| it.visible = ints(&[15, 16, 0, 6, 7, 9], [2, 3], device));
        values("page_table", |it, device| it.page_table = ints(&[5, -1, 0, 0], [2, 2], device));
        values("page_table", |it, device| it.page_table = ints(&[6, 1, 0, 0], [2, 2], device));
        values("page_table", |it, device| it.keys = zeros([0, 8, 5], device).into());
    });
}

/// Every tensor on the device of the first.
#[test]
fn ops_errors_lightning_index_another_device() {
    for_each_device(|device| {
        let flex = args(&Device::flex());
        if *device == Device::flex() {
            skip(device, "there is no other device");
            return;
        }
        let named = |changed: LightningIndexArgs, argument: &str| {
            let error = lightning_index(changed, &OPTIONS).expect_err("tensors on two devices");
            assert!(matches!(&error, MlaError::Device { argument: name, .. } if *name == argument), "{error}");
        };
        named(LightningIndexArgs { keys: flex.keys.clone(), ..args(device) }, "keys");
        named(LightningIndexArgs { page_table: flex.page_table.clone(), ..args(device) }, "page_table");
        named(LightningIndexArgs { head_weights: flex.head_weights.clone(), ..args(device) }, "head_weights");
        named(LightningIndexArgs { visible: flex.visible, ..args(device) }, "visible");
    });
}

/// What a device cannot do is an error of the call: types, and buffers that it does not have.
#[test]
fn ops_errors_lightning_index_limits() {
    for_each_device(|device| {
        for dtype in FLOATS.into_iter().filter(|dtype| !device.supports_dtype(*dtype)) {
            let q = Tensor::empty([2, 3, 4, 5], (device, dtype));
            assert_refused(lightning_index(LightningIndexArgs { q, ..args(device) }, &OPTIONS), WrongType, "q");
        }
        if !is_wgpu(device) {
            skip(device, "it may have room");
            return;
        }
        let limited = |args, options: &LightningIndexOptions, argument: &str| {
            let error = lightning_index(args, options).expect_err("more than the device has room for");
            assert!(matches!(&error, MlaError::DeviceLimit { argument: name, .. } if *name == argument), "{error}");
        };
        limited(args(device), &LightningIndexOptions { k: i32::MAX as usize, ..OPTIONS }, "k");
        // Scores of 2^31 keys, by way of few pages.
        let keys = Tensor::<3>::empty([1, 1 << 20, 1], (device, DType::F32));
        let page_table = ints(&[0; 4096], [2, 2048], device);
        let wide = LightningIndexArgs { q: zeros([2, 3, 4, 1], device), keys: keys.into(), page_table, ..args(device) };
        limited(wide, &OPTIONS, "page_table");
    });
}
