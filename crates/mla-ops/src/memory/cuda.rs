//! The memory of an NVIDIA GPU.

use cubecl::MemoryScope;
use cubecl::client::Client;
use cudarc::driver::{CudaContext, sys};

use super::DeviceMemory;

/// What the driver says of the GPU of this number; `None` without a driver or such a GPU.
pub(super) fn memory(index: usize) -> Option<DeviceMemory> {
    // SAFETY: it loads the driver's library, by the names that CubeCL looks for, and calls nothing in it. Where it is missing, the
    // calls below would panic.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    // The primary context, which CubeCL's is, too: it lives as long as somebody holds it.
    let (free, total) = CudaContext::new(index).ok()?.mem_get_info().ok()?;
    Some(DeviceMemory { total: total as u64, free: free as u64 })
}

/// The same with what the program's own pools hold and nobody uses.
pub(super) fn with_pools(driver: DeviceMemory, client: &Client) -> Option<DeviceMemory> {
    let usage = client.memory_report(MemoryScope::Device).usage();
    let idle = usage.bytes_reserved.saturating_sub(usage.bytes_in_use).saturating_sub(usage.bytes_padding);
    Some(DeviceMemory { free: driver.free.saturating_add(idle).min(driver.total), ..driver })
}
