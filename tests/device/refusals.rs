//! How calls with wrong arguments are made, and how it is checked that they are refused.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{Decoded, MlaDecodeArgs, MlaDecodeOptions, MlaError, MlaPlan, MlaQuery, PagedBatchArgs, mla_decode};

use crate::ops_fixture::{DecodeCase, ints};

/// The kinds of [`MlaError`] that a caller can cause here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Shape,
    DType,
    Value,
    DeviceValue,
}

pub fn assert_refused<T>(result: Result<T, MlaError>, kind: Kind, argument: &str) {
    let error = result.err().unwrap_or_else(|| panic!("`{argument}` was accepted, expected {kind:?}"));
    let actual = match &error {
        MlaError::Shape { .. } => Kind::Shape,
        MlaError::DType { .. } => Kind::DType,
        MlaError::Value { .. } => Kind::Value,
        MlaError::DeviceValue { .. } => Kind::DeviceValue,
        other => panic!("{other}"),
    };
    assert_eq!(actual, kind, "{error}");
    // The name may have an explanation: "`kv_cache page size (dimension 1)`".
    let named = error.to_string().contains(&format!("`{argument}"));
    assert!(named, "`{argument}` is not named in: {error}");
}

/// Values inside tensors are checked by `validate`, and by the call itself on Flex, where reading them is free.
pub fn assert_values_refused<T>(
    device: &Device,
    validate: Result<(), MlaError>,
    call: impl FnOnce() -> Result<T, MlaError>,
    argument: &str,
) {
    assert_refused(validate, Kind::DeviceValue, argument);
    if *device == Device::flex() {
        assert_refused(call(), Kind::DeviceValue, argument);
    }
}

pub fn zeros<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::zeros(shape, (device, DType::F32))
}

/// Arguments of the operations on pages that they accept.
pub fn paged_args(device: &Device) -> PagedBatchArgs {
    PagedBatchArgs {
        req_to_token: ints(&[0; 24], [3, 8], device),
        req_rows: ints(&[2, 0], [2], device),
        seq_lens: ints(&[4, 3], [2], device),
        kv_start: Some(ints(&[4, 0], [2], device)),
        page_size: 4,
    }
}

/// Everything that makes a call of `mla_decode`: B 2, Sq 1, H 3, D 7, Dv 5, P 4, S 4.
pub struct Decode {
    pub args: MlaDecodeArgs,
    pub options: MlaDecodeOptions,
    pub plan: Option<MlaPlan>,
}

impl Decode {
    pub fn new(device: &Device) -> Self {
        let case = DecodeCase { lens: vec![5, 2], page_size: 4, widths: (7, 5), ..Default::default() };
        let mut args = case.inputs(51).args(device);
        args.page_table = ints(&[1, 0, 2, 0], [2, 2], device);
        args.kv_cache = zeros::<3>([4, 4, 7], device).into();
        Self { args, options: case.options(), plan: None }
    }

    pub fn parts(device: &Device, nope: [usize; 4], pe: [usize; 4]) -> Self {
        let mut decode = Self::new(device);
        decode.args.q = MlaQuery::Parts { nope: zeros(nope, device), pe: zeros(pe, device) };
        decode
    }

    pub fn call(self) -> Result<(Tensor<4>, Tensor<3>), MlaError> {
        mla_decode(self.args, &self.options, self.plan.as_ref()).map(Decoded::materialise)
    }
}
