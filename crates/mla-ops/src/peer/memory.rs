//! The memory of ranks: mailboxes, which others write to, and the epochs, which are a rank's own.
//!
//! Not CubeCL's: what its pools have is not accessible to other devices, and moves.

use std::sync::Arc;

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use mla_kernels::all_reduce::EPOCHS_BYTES;

use super::{GROUP, unsupported};
use crate::MlaError;

/// The memory of a rank, in the primary context of its device, which CubeCL's is, too.
pub(super) struct RankMemory {
    context: Arc<CudaContext>,
    mailbox: Allocation,
    epochs: Allocation,
}

/// Memory of the device of a context, zeros at first.
struct Allocation {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
}

impl Allocation {
    fn zeros(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: the context is current.
        let address = unsafe { result::malloc_sync(bytes) }?;
        let allocation = Self { context: context.clone(), address };
        // SAFETY: as many bytes were allocated.
        unsafe { result::memset_d8_sync(address, 0, bytes) }?;
        // To set memory of a device may return before it is done.
        context.synchronize()?;
        Ok(allocation)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.bind_to_thread().and_then(|()| self.context.synchronize()).is_ok() {
            // SAFETY: it was allocated in this context, and nothing that could use it runs any more: the group is gone. Where the
            // device has failed there is nobody to tell.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl RankMemory {
    /// The addresses of the mailbox and of the epochs.
    pub(super) fn addresses(&self) -> [u64; 2] {
        [self.mailbox.address, self.epochs.address]
    }

    /// Makes every cube's last epoch this one.
    pub(super) fn set_epoch(&self, epoch: u32) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        let epochs = [epoch; EPOCHS_BYTES / size_of::<u32>()];
        // SAFETY: the epochs are as many bytes.
        unsafe { result::memcpy_htod_sync(self.epochs.address, &epochs) }?;
        self.context.synchronize()
    }
}

/// Makes the devices accessible to one another, and allocates.
pub(super) fn allocate(devices: &[Device], mailbox_bytes: usize) -> Result<Vec<RankMemory>, MlaError> {
    let contexts = devices.iter().map(context).collect::<Result<Vec<_>, _>>()?;
    for (from, device) in contexts.iter().zip(devices) {
        for (to, peer) in contexts.iter().zip(devices).filter(|(to, _)| !Arc::ptr_eq(to, from)) {
            enable(from, to).map_err(|reason| {
                unsupported(device, format!("it has no access to the memory of {peer:?}: {reason}"))
            })?;
        }
    }
    let memory = |(context, device): (&Arc<CudaContext>, &Device)| {
        let mailbox =
            Allocation::zeros(context, mailbox_bytes).map_err(|error| failed(device, mailbox_bytes, error))?;
        let epochs = Allocation::zeros(context, EPOCHS_BYTES).map_err(|error| failed(device, EPOCHS_BYTES, error))?;
        Ok(RankMemory { context: context.clone(), mailbox, epochs })
    };
    contexts.iter().zip(devices).map(memory).collect()
}

/// The primary context of a device.
fn context(device: &Device) -> Result<Arc<CudaContext>, MlaError> {
    let DispatchDevice::Cube(cubecl::Device::Cuda(gpu)) = device.as_dispatch() else {
        return Err(unsupported(device, "it is not a CUDA device".to_string()));
    };
    CudaContext::new(gpu.index).map_err(|error| unsupported(device, error.to_string()))
}

/// Lets kernels of one device access the memory of another.
fn enable(from: &CudaContext, to: &CudaContext) -> Result<(), String> {
    let text = |error: DriverError| error.to_string();
    let mut can = 0;
    // SAFETY: the devices are there, and the answer has room.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from.cu_device(), to.cu_device()) }.result().map_err(text)?;
    if can == 0 {
        return Err("the driver says that it cannot have it (no NVLink, and none by way of PCIe)".to_string());
    }
    from.bind_to_thread().map_err(text)?;
    // SAFETY: both contexts are there, as long as this process holds them.
    match unsafe { sys::cuCtxEnablePeerAccess(to.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        result => result.result().map_err(text),
    }
}

/// Why there is no memory.
fn failed(device: &Device, bytes: usize, error: DriverError) -> MlaError {
    if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        let reason = format!("no memory for a mailbox of {bytes} bytes");
        return MlaError::DeviceLimit { op: GROUP, argument: "devices", device: format!("{device:?}"), reason };
    }
    unsupported(device, error.to_string())
}
