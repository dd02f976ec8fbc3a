//! The memory of an NVIDIA GPU.

use std::sync::{Arc, Mutex, PoisonError};

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

/// Makes the context of the GPU of this number, and keeps it: CubeCL then gets the same one, and would panic without.
///
/// # Errors
/// What the driver says.
pub(crate) fn keep_context(index: usize) -> Result<(), String> {
    static KEPT: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if kept.iter().any(|context| context.ordinal() == index) {
        return Ok(());
    }
    // SAFETY: as in `memory`.
    if !unsafe { sys::is_culib_present() } {
        return Err("this machine has no CUDA driver".into());
    }
    let context = CudaContext::new(index).map_err(|error| {
        let text = error.error_string().map(|text| text.to_string_lossy()).unwrap_or_default();
        format!("the driver makes no context there: {:?} ({text})", error.0)
    })?;
    kept.push(context);
    Ok(())
}
