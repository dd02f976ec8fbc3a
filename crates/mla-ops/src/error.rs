//! Errors of the operations: what was passed, under which name, and what it should have been.

use burn::tensor::DType;
use thiserror::Error;

/// A call that cannot be carried out. Nothing was launched and nothing was changed.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{MlaError, rms_norm};
///
/// let device = Device::flex();
/// let error = rms_norm(Tensor::ones([2, 8], &device), Tensor::ones([7], &device), 1e-6).unwrap_err();
/// assert!(matches!(error, MlaError::Shape { argument: "weight", .. }));
/// assert_eq!(error.to_string(), "rms_norm: `weight` has shape [7], expected [d] = [8]");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MlaError {
    /// A tensor has the wrong shape.
    #[error("{op}: `{argument}` has shape {actual:?}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The shape it has.
        actual: Vec<usize>,
        /// The shape it should have, in words.
        expected: String,
    },
    /// A tensor has the wrong element type.
    #[error("{op}: `{argument}` has dtype {actual:?}, expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The dtype it has.
        actual: DType,
        /// The dtypes it may have.
        expected: String,
    },
    /// A tensor lives on another device than the rest.
    #[error("{op}: `{argument}` is on {actual}, expected {expected} (where `{like}` is)")]
    Device {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Where it is.
        actual: String,
        /// Where it should be.
        expected: String,
        /// The argument that decides.
        like: &'static str,
    },
    /// The operation does not run on this device, or not in this build.
    #[error("{op}: cannot run on {device}: {reason}")]
    UnsupportedDevice {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A number or option is out of range.
    #[error("{op}: `{argument}` is {actual}, expected {expected}")]
    Value {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Its value.
        actual: String,
        /// The values it may have.
        expected: String,
    },
    /// Legal, but more than this device can do.
    #[error("{op}: `{argument}` exceeds what {device} can do: {reason}")]
    DeviceLimit {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The device.
        device: String,
        /// What it would take, and what the device has.
        reason: String,
    },
    /// A tensor to be written has a second owner, so that writing in place would change what that owner sees.
    #[error(
        "{op}: `{argument}` is shared with another tensor; drop every clone and view of it before writing (it is written in place, never copied)"
    )]
    CacheShared {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
    },
    /// A value inside a tensor is out of range; found only where values are checked (`validate_device_inputs`).
    #[error("{op}: `{argument}`{index:?} is {actual}, expected {expected}")]
    DeviceValue {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Where in the tensor.
        index: Vec<usize>,
        /// The value there.
        actual: i32,
        /// The values it may have.
        expected: String,
    },
    /// A tensor could not be read back from the device.
    #[error("{op}: reading `{argument}` back from the device failed: {reason}")]
    Read {
        /// The operation.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// What the backend said.
        reason: String,
    },
}
