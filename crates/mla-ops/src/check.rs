//! Argument checks shared by the operations. They look at metadata only: nothing is read from the device.

use std::sync::{PoisonError, RwLock};

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Int, Tensor, kind::Basic};

use crate::MlaError;
use crate::independent::is_flex;

/// Float types of queries, keys, values and caches.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The checks of one call of one operation. The first tensor decides the device.
pub(crate) struct Check {
    op: &'static str,
    like: &'static str,
    device: Device,
}

impl Check {
    /// Starts with the argument that decides the device, and refuses devices that no implementation is registered for.
    pub(crate) fn new<const D: usize, K: Basic>(
        op: &'static str,
        argument: &'static str,
        tensor: &Tensor<D, K>,
    ) -> Result<Self, MlaError> {
        Self::of(op, argument, tensor.device())
    }

    /// Starts with the device itself: of a call that makes its first tensor.
    pub(crate) fn on(op: &'static str, device: &Device) -> Result<Self, MlaError> {
        Self::of(op, "device", device.clone())
    }

    fn of(op: &'static str, like: &'static str, device: Device) -> Result<Self, MlaError> {
        match unsupported(&device) {
            None => Ok(Self { op, like, device }),
            Some(reason) => {
                Err(MlaError::UnsupportedDevice { op, device: format!("{device:?}"), reason: reason.into() })
            }
        }
    }

    /// The device of the call.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether values are checked too: where reading them costs nothing, or where `MLA_VALIDATE=1` asks for it.
    pub(crate) fn sees_values(&self) -> bool {
        is_flex(&self.device) || validate_always()
    }

    /// Words of a weight on the call's device.
    pub(crate) fn on_device_of(&self, argument: &'static str, words: &Tensor<1, Int>) -> Result<(), MlaError> {
        self.on_device(argument, words.device())
    }

    /// The dtype that a weight stands for.
    pub(crate) fn same_dtype(
        &self,
        argument: &'static str,
        actual: DType,
        dtype: DType,
        why: &str,
    ) -> Result<(), MlaError> {
        if actual == dtype { Ok(()) } else { Err(self.dtype(argument, actual, &format!("{dtype:?} ({why})"))) }
    }

    /// Same device as the first argument.
    fn on_device(&self, argument: &'static str, device: Device) -> Result<(), MlaError> {
        if device.is_autodiff() {
            let reason = AUTODIFF.into();
            return Err(MlaError::UnsupportedDevice { op: self.op, device: format!("{device:?}"), reason });
        }
        if device == self.device {
            return Ok(());
        }
        Err(MlaError::Device {
            op: self.op,
            argument,
            actual: format!("{device:?}"),
            expected: format!("{:?}", self.device),
            like: self.like,
        })
    }

    /// A float tensor of one of the supported types, on the device.
    pub(crate) fn float<const D: usize>(&self, argument: &'static str, tensor: &Tensor<D>) -> Result<(), MlaError> {
        self.on_device(argument, tensor.device())?;
        self.float_type(argument, tensor.dtype())
    }

    /// One of the supported float types, with which the device can compute.
    pub(crate) fn float_type(&self, argument: &'static str, actual: DType) -> Result<(), MlaError> {
        if !FLOATS.contains(&actual) {
            return Err(self.dtype(argument, actual, "F32, F16 or BF16"));
        }
        if !supports(&self.device, actual) {
            return Err(self.dtype(argument, actual, "a dtype that this device can compute with"));
        }
        Ok(())
    }

    /// A float tensor of exactly this type, on the device.
    pub(crate) fn float_as<const D: usize>(
        &self,
        argument: &'static str,
        tensor: &Tensor<D>,
        dtype: DType,
        why: &str,
    ) -> Result<(), MlaError> {
        self.on_device(argument, tensor.device())?;
        match tensor.dtype() {
            actual if actual == dtype => Ok(()),
            actual => Err(self.dtype(argument, actual, &format!("{dtype:?} ({why})"))),
        }
    }

    /// An i32 tensor, on the device.
    pub(crate) fn int<const D: usize>(&self, argument: &'static str, tensor: &Tensor<D, Int>) -> Result<(), MlaError> {
        self.on_device(argument, tensor.device())?;
        match tensor.dtype() {
            DType::I32 => Ok(()),
            actual => Err(self.dtype(argument, actual, "I32")),
        }
    }

    /// Sizes: `None` in `expected` is any size; `words` is the same for the reader, e.g. `[B, maxP] with B = 4`.
    pub(crate) fn dims<const D: usize>(
        &self,
        argument: &'static str,
        actual: [usize; D],
        expected: [Option<usize>; D],
        words: impl FnOnce() -> String,
    ) -> Result<(), MlaError> {
        if actual.iter().zip(expected).all(|(a, e)| e.is_none_or(|e| *a == e)) {
            return Ok(());
        }
        Err(MlaError::Shape { op: self.op, argument, actual: actual.to_vec(), expected: words() })
    }

    /// A condition on a number or option.
    pub(crate) fn value(
        &self,
        argument: &'static str,
        holds: bool,
        actual: impl ToString,
        expected: impl FnOnce() -> String,
    ) -> Result<(), MlaError> {
        if holds {
            return Ok(());
        }
        Err(MlaError::Value { op: self.op, argument, actual: actual.to_string(), expected: expected() })
    }

    /// A tensor without another handle: it is about to be written.
    pub(crate) fn only_handle<const D: usize, K: Basic>(
        &self,
        argument: &'static str,
        tensor: &Tensor<D, K>,
    ) -> Result<(), MlaError> {
        // While a GPU's own thread makes the buffer of a new tensor it has a handle of it, too, for a moment. What looks shared is
        // looked at again after that; what the wait itself says is for the next read to report.
        let is_only = || {
            let _ = self.device.sync();
            tensor.can_mut()
        };
        if tensor.can_mut() || is_only() { Ok(()) } else { Err(MlaError::CacheShared { op: self.op, argument }) }
    }

    /// A tensor that lies in memory row by row.
    pub(crate) fn contiguous<const D: usize>(
        &self,
        argument: &'static str,
        tensor: &Tensor<D>,
    ) -> Result<(), MlaError> {
        let words = || "a tensor that lies in memory row by row".into();
        self.value(argument, is_contiguous(tensor), "a strided view", words)
    }

    /// A page size: a power of two.
    pub(crate) fn page_size(&self, argument: &'static str, page_size: usize) -> Result<(), MlaError> {
        let holds = page_size.is_power_of_two() && page_size <= MAX_INDEX;
        self.value(argument, holds, page_size, || "a power of two that fits in an i32".into())
    }

    /// A length of something that i32 indices count.
    pub(crate) fn index_range(&self, argument: &'static str, length: usize) -> Result<(), MlaError> {
        self.value(argument, length <= MAX_INDEX, length, || format!("at most {MAX_INDEX} (indices are i32)"))
    }

    /// The error of a call that is more than the device can do.
    pub(crate) fn device_limit(&self, argument: &'static str, reason: impl ToString) -> MlaError {
        let device = format!("{:?}", self.device);
        MlaError::DeviceLimit { op: self.op, argument, device, reason: reason.to_string() }
    }

    fn dtype(&self, argument: &'static str, actual: DType, expected: &str) -> MlaError {
        MlaError::DType { op: self.op, argument, actual, expected: expected.into() }
    }
}

/// Whether the device computes with the dtype. Its answer is kept: asking again would cost each call some microseconds.
pub(crate) fn supports(device: &Device, dtype: DType) -> bool {
    static SUPPORTED: RwLock<Vec<(Device, DType)>> = RwLock::new(Vec::new());
    let is_known = |known: &[(Device, DType)]| known.iter().any(|known| known.1 == dtype && known.0 == *device);
    if is_known(&SUPPORTED.read().unwrap_or_else(PoisonError::into_inner)) {
        return true;
    }
    let supported = device.supports_dtype(dtype);
    if supported {
        SUPPORTED.write().unwrap_or_else(PoisonError::into_inner).push((device.clone(), dtype));
    }
    supported
}

/// The largest index.
const MAX_INDEX: usize = i32::MAX as usize;

const AUTODIFF: &str = "the operations are for inference and have no backward pass: call `.inner()` on the tensors, or on the device, first";

/// Why no implementation is registered for this device, if so.
pub(crate) fn unsupported(device: &Device) -> Option<&'static str> {
    if device.is_autodiff() {
        return Some(AUTODIFF);
    }
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => None,
        #[cfg(feature = "_gpu")]
        DispatchDevice::Cube(_) => None,
        #[allow(unreachable_patterns)]
        _ => Some(
            "this backend has no implementation in this build; use a Flex, wgpu or CUDA device (cargo features `flex`, `wgpu`, `cuda`)",
        ),
    }
}

/// Whether a tensor lies in memory row by row; a backend that does not show it (a fusing one) is believed.
fn is_contiguous<const D: usize>(tensor: &Tensor<D>) -> bool {
    if tensor.shape().num_elements() == 0 {
        return true;
    }
    #[cfg(feature = "flex")]
    if let Ok(primitive) = tensor.clone().try_into_primitive::<burn::backend::Flex>() {
        return primitive.is_contiguous();
    }
    #[cfg(all(feature = "_gpu", not(feature = "fusion")))]
    if let Ok(primitive) = tensor.clone().try_into_primitive::<burn::backend::Cube>() {
        return primitive.is_contiguous();
    }
    let _ = tensor;
    true
}

/// Reads an i32 tensor back to the host.
pub(crate) fn read_i32<const D: usize>(
    op: &'static str,
    argument: &'static str,
    tensor: &Tensor<D, Int>,
) -> Result<Vec<i32>, MlaError> {
    #[cfg(feature = "flex")]
    if let Ok(primitive) = tensor.clone().try_into_primitive::<burn::backend::Flex>()
        && let Some(values) = primitive.as_slice::<i32>()
    {
        return Ok(values.to_vec());
    }
    let failed = |reason| MlaError::Read { op, argument, reason: unread(reason, validate_always()) };
    tensor.try_to_vec_as::<i32>().map_err(|error| failed(error.to_string()))
}

/// Why values could not be read. Who captures a step may not know that a variable of the environment has its calls read.
fn unread(reason: String, validates: bool) -> String {
    let why =
        "; every call reads its index tensors since MLA_VALIDATE=1 is set, which a step that is captured cannot do";
    if validates { reason + why } else { reason }
}

/// Reads the tensor back: its values start at 0, ascend, and end at `tokens` at most.
pub(crate) fn check_cu_seqlens(
    op: &'static str,
    argument: &'static str,
    cu_seqlens: &Tensor<1, Int>,
    tokens: usize,
) -> Result<Vec<i32>, MlaError> {
    let entries = read_i32(op, argument, cu_seqlens)?;
    let mut least = 0;
    for (i, &entry) in entries.iter().enumerate() {
        let most = if i == 0 { 0 } else { tokens as i64 };
        if i64::from(entry) < least || i64::from(entry) > most {
            let expected = format!("{least} to {most}");
            return Err(MlaError::DeviceValue { op, argument, index: vec![i], actual: entry, expected });
        }
        least = i64::from(entry);
    }
    Ok(entries)
}

/// Reads the tensor back: each value is -1 or one of `slot_count` slots, and no slot occurs twice.
pub(crate) fn check_slots(
    op: &'static str,
    argument: &'static str,
    slots: &Tensor<1, Int>,
    slot_count: usize,
) -> Result<(), MlaError> {
    let slots = read_i32(op, argument, slots)?;
    let mut seen = std::collections::HashSet::new();
    for (n, &slot) in slots.iter().enumerate() {
        let in_range = slot == -1 || usize::try_from(slot).is_ok_and(|slot| slot < slot_count);
        if !in_range || (slot >= 0 && !seen.insert(slot)) {
            let expected = format!("-1, or a slot from 0 to {} that occurs once", slot_count as i64 - 1);
            return Err(MlaError::DeviceValue { op, argument, index: vec![n], actual: slot, expected });
        }
    }
    Ok(())
}

/// Whether `MLA_VALIDATE=1` asks for checks of values in every call on every device.
#[doc(hidden)]
pub fn validate_always() -> bool {
    static VALIDATE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *VALIDATE.get_or_init(|| std::env::var("MLA_VALIDATE").is_ok_and(|value| value == "1"))
}

#[cfg(test)]
mod tests {
    /// Who has set the variable is told what it has to do with a read that fails.
    #[test]
    fn errors_of_reads_name_the_variable() {
        assert_eq!(super::unread("no graph".into(), false), "no graph");
        let told = super::unread("no graph".into(), true);
        assert!(told.starts_with("no graph; ") && told.contains("MLA_VALIDATE=1"), "{told}");
    }
}
