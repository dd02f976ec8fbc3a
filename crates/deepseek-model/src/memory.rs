//! Memory, asked for in numbers before it is taken.

use burn::tensor::Device;
use mla_ops::{DeviceMemory, device_memory, host_memory};

use crate::{ModelError, Result};

/// So many bytes every machine has: small models do not ask.
const FEW: u128 = 1 << 30;

/// Refuses what the device has no memory for, where that is known (the CPU on Linux).
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check(what: &'static str, needed_bytes: u128, device: &Device) -> Result<()> {
    check_free(what, needed_bytes, &format!("{device:?}"), || device_memory(device))
}

/// Refuses what the machine has no memory for, whatever its devices have.
///
/// # Errors
/// [`ModelError::OutOfMemory`].
pub(crate) fn check_host(what: &'static str, needed_bytes: u128) -> Result<()> {
    check_free(what, needed_bytes, "the host", host_memory)
}

fn check_free(
    what: &'static str,
    needed_bytes: u128,
    device: &str,
    memory: impl FnOnce() -> Option<DeviceMemory>,
) -> Result<()> {
    if needed_bytes < FEW {
        return Ok(());
    }
    let free_bytes = memory().map_or(isize::MAX as u64, |memory| memory.free);
    match needed_bytes <= u128::from(free_bytes) {
        true => Ok(()),
        false => Err(ModelError::OutOfMemory { what, device: device.into(), needed_bytes, free_bytes }),
    }
}
