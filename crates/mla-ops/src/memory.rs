//! How much memory there is, asked before much of it is taken, and allocations that have failed.

mod control_group;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::path::Path;

use burn::tensor::Device;

use self::control_group::group_memory;
use crate::DeviceName;
use crate::independent::is_flex;

/// Bytes of memory that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In all.
    pub total: u64,
    /// Those that a program may still take.
    pub free: u64,
}

impl DeviceMemory {
    /// What fits into both.
    fn least(self, other: Self) -> Self {
        Self { total: self.total.min(other.total), free: self.free.min(other.free) }
    }
}

/// The memory of a device: for the CPU that of the machine, its swap included, within the limits of its control groups (Linux);
/// for CUDA what the driver says, where free is also what this program's pools of memory hold and nobody uses. A buffer that is larger
/// than the gaps of the pools may find less. `None` where it is not known, as of wgpu, whose adapters do not tell, and in a pass of
/// [`compile_ahead`](crate::compile_ahead), which takes none.
///
/// ```
/// use burn::tensor::Device;
/// use mla_ops::device_memory;
///
/// if let Some(memory) = device_memory(&Device::flex()) {
///     assert!(memory.free <= memory.total);
/// }
/// ```
pub fn device_memory(device: &Device) -> Option<DeviceMemory> {
    if is_flex(device) {
        return host_memory();
    }
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(cube) = device.as_dispatch()
        && let cubecl::Device::Cuda(gpu) = cube
        && !cubecl::dry_run::launch_mode().is_skipped()
    {
        return cuda::with_pools(cuda::memory(gpu.index)?, &cube.client());
    }
    None
}

impl DeviceName {
    /// The memory of the device, which is not opened: as [`device_memory`], but without what this program's pools hold. `None` too
    /// of a device that this build has no backend for.
    pub fn memory(self) -> Option<DeviceMemory> {
        match self {
            Self::Flex => host_memory(),
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => cuda::memory(index),
            _ => None,
        }
    }
}

/// Bytes of the buffer that a device had no memory for, if that is why its work has failed: what Burn reports of a failure is text,
/// and names the first cause last. `None` for other failures.
///
/// ```
/// use mla_ops::failed_allocation;
///
/// assert_eq!(failed_allocation("out of device memory allocating 4096 bytes"), Some(4096));
/// assert_eq!(failed_allocation("a launch failed"), None);
/// ```
pub fn failed_allocation(report: &str) -> Option<u64> {
    // CubeCL's `IoError::OutOfMemory`, and a buffer that is larger than any that the device has.
    let named = ["out of device memory allocating ", "can't allocate buffer of size: "];
    let sizes = named.iter().filter_map(|before| report.split_once(before));
    let digits = |text: &str| text.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
    sizes.filter_map(|(_, after)| digits(after)).next()
}

/// The memory of the machine, its swap included, within the limits of the control groups that this process is in; `None` on others
/// than Linux.
pub fn host_memory() -> Option<DeviceMemory> {
    let root = Path::new("/");
    let machine = parse_meminfo(&std::fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    Some(group_memory(root, machine.total).map_or(machine, |group| machine.least(group)))
}

/// What `/proc/meminfo` says.
fn parse_meminfo(text: &str) -> Option<DeviceMemory> {
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let swap = |name| bytes(name).unwrap_or(0);
    Some(DeviceMemory {
        total: bytes("MemTotal:")?.saturating_add(swap("SwapTotal:")),
        free: bytes("MemAvailable:")?.saturating_add(swap("SwapFree:")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_counts_and_files_do_not() {
        let text = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\nSwapTotal: 50 kB\nSwapFree:  20 kB\n";
        assert_eq!(parse_meminfo(text), Some(DeviceMemory { total: 1050 << 10, free: 620 << 10 }));
        assert_eq!(parse_meminfo("MemTotal: 1 kB"), None);
        assert_eq!(parse_meminfo("MemTotal: 1 kB\nMemAvailable: 99999999999999999999 kB"), None);
    }

    #[test]
    fn a_failed_allocation_is_found_in_what_is_reported() {
        let report = "The bytes were never written\nCaused by:\n  An IO error happened\n  out of device memory allocating 4096 bytes\n0: f";
        assert_eq!(failed_allocation(report), Some(4096));
        assert_eq!(failed_allocation("can't allocate buffer of size: 77\nat"), Some(77));
        assert_eq!(failed_allocation("CUDA_ERROR_LAUNCH_FAILED"), None);
        assert_eq!(failed_allocation("out of device memory allocating many bytes"), None);
    }
}
