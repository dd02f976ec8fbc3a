//! The runtimes that the kernels are compiled for, asked whether this machine has them.

use cubecl::device::{Device, DeviceUnavailable, WgpuDeviceKind};
use thiserror::Error;

/// A CubeCL runtime and one of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runtime {
    /// The CUDA device of this number.
    Cuda(usize),
    /// The wgpu device that the machine prefers (Vulkan, Metal or DirectX 12).
    Wgpu,
}

/// Why a runtime cannot be used here.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// Not in this build, or no such device.
    #[error("{0}")]
    Unavailable(DeviceUnavailable),
    /// Kernels are compiled on the machine, with the headers of the CUDA toolkit.
    #[error("no CUDA toolkit was found, whose headers kernels are compiled with; install it or set CUDA_PATH")]
    NoCudaToolkit,
}

impl Runtime {
    /// The device, if this build has its runtime and this machine has it. Where this fails, using the device would panic.
    ///
    /// # Errors
    /// What is missing.
    pub fn open(self) -> Result<Device, RuntimeError> {
        match self {
            Runtime::Cuda(index) => {
                let device = Device::cuda(index).map_err(RuntimeError::Unavailable)?;
                check_cuda_toolkit()?;
                Ok(device)
            }
            Runtime::Wgpu => Device::wgpu(WgpuDeviceKind::default()).map_err(RuntimeError::Unavailable),
        }
    }
}

#[cfg(feature = "cuda")]
fn check_cuda_toolkit() -> Result<(), RuntimeError> {
    cubecl_cuda::install::cuda_path().map(|_| ()).ok_or(RuntimeError::NoCudaToolkit)
}

#[cfg(not(feature = "cuda"))]
fn check_cuda_toolkit() -> Result<(), RuntimeError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error that a device number past the last one gives, in any build on any machine.
    #[test]
    fn an_absent_device_is_an_error() {
        let error = Runtime::Cuda(1000).open().expect_err("no machine has so many");
        assert!(matches!(error, RuntimeError::Unavailable(_)), "{error}");
    }
}
