//! Memory, asked for in numbers before it is taken, and the error of memory that ran out all the same.

use burn::tensor::{Device, Tensor, kind::Basic};
use mla_ops::cache::CacheError;
use mla_ops::{DeviceMemory, MlaError, check_written, device_memory, failed_allocation, host_memory};

use crate::{ModelError, Result};

/// So many bytes every machine has: small models do not ask.
const FEW: u128 = 1 << 30;
/// The same of a GPU, which others may use up.
const FEW_ON_A_GPU: u128 = 1 << 20;

/// Refuses what the device has no memory for, where that is known (the CPU on Linux, CUDA).
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check(what: &'static str, needed_bytes: u128, device: &Device) -> Result<()> {
    // Of GPUs alone the largest buffer is known.
    let few = if mla_ops::largest_buffer(device).is_some() { FEW_ON_A_GPU } else { FEW };
    check_free(what, needed_bytes, few, &format!("{device:?}"), || device_memory(device))
}

/// Refuses what the machine has no memory for, whatever its devices have.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_host(what: &'static str, needed_bytes: u128) -> Result<()> {
    check_free(what, needed_bytes, FEW, "the host", host_memory)
}

/// [`check_written`] of a tensor of `what`.
///
/// # Errors
/// As [`of_failure`].
pub(crate) fn check_allocated<const D: usize, K: Basic>(
    what: &'static str,
    tensor: &Tensor<D, K>,
    device: &Device,
) -> Result<()> {
    check_written("tensor", tensor).map_err(|error| of_failure(what, error.into(), device))
}

/// The error of what a device was given, [`ModelError::OutOfMemory`] if it had no memory for a buffer of `what`.
pub(crate) fn of_failure(what: &'static str, error: ModelError, device: &Device) -> ModelError {
    let report = match &error {
        ModelError::Device { reason }
        | ModelError::Ops(MlaError::Read { reason, .. })
        | ModelError::Cache(CacheError::Mla(MlaError::Read { reason, .. })) => reason,
        _ => return error,
    };
    match failed_allocation(report) {
        None => error,
        Some(bytes) => ModelError::OutOfMemory {
            what,
            device: format!("{device:?}"),
            needed_bytes: bytes.into(),
            free_bytes: device_memory(device).map_or(0, |memory| memory.free),
        },
    }
}

fn check_free(
    what: &'static str,
    needed_bytes: u128,
    few: u128,
    device: &str,
    memory: impl FnOnce() -> Option<DeviceMemory>,
) -> Result<()> {
    if needed_bytes < few {
        return Ok(());
    }
    let free_bytes = memory().map_or(isize::MAX as u64, |memory| memory.free);
    match needed_bytes <= u128::from(free_bytes) {
        true => Ok(()),
        false => Err(ModelError::OutOfMemory { what, device: device.into(), needed_bytes, free_bytes }),
    }
}
