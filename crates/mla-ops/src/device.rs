//! Devices by name, opened so that an absent one is an error.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

use crate::MlaError;

/// A device that the operations run on: `flex`, `wgpu`, `cuda` or `cuda:N`.
///
/// ```
/// use mla_ops::DeviceName;
///
/// let name: DeviceName = "flex".parse()?;
/// let device = name.open().map_err(|error| error.to_string())?;
/// assert_eq!("cuda:1".parse(), Ok(DeviceName::Cuda(1)));
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// The CPU.
    Flex,
    /// The GPU that wgpu prefers (Vulkan, Metal or DirectX 12).
    Wgpu,
    /// The NVIDIA GPU of this number.
    Cuda(usize),
}

impl DeviceName {
    /// Opens the device.
    ///
    /// # Errors
    /// [`MlaError::UnsupportedDevice`] if this build has no backend for it, or this machine no such device, or its driver has
    /// no memory for a context.
    pub fn open(self) -> Result<Device, MlaError> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => {
                self.check(mla_kernels::Runtime::Wgpu)?;
                Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(index) => {
                self.check(mla_kernels::Runtime::Cuda(index))?;
                crate::memory::cuda::keep_context(index).map_err(|reason| self.unsupported(reason))?;
                Ok(Device::new(burn_cuda::CudaDevice::new(index)))
            }
            #[allow(unreachable_patterns)]
            _ => Err(self.unsupported(format!(
                "this build has no {0} backend; build it with `--features {0}`, a feature of burn-mla",
                self.feature()
            ))),
        }
    }

    /// The cargo feature that has its backend.
    #[allow(dead_code)]
    fn feature(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Wgpu => "wgpu",
            Self::Cuda(_) => "cuda",
        }
    }

    #[cfg(feature = "_gpu")]
    fn check(self, runtime: mla_kernels::Runtime) -> Result<(), MlaError> {
        runtime.open().map(|_| ()).map_err(|error| self.unsupported(error.to_string()))
    }

    #[allow(dead_code)]
    fn unsupported(self, reason: String) -> MlaError {
        MlaError::UnsupportedDevice { op: "open", device: self.to_string(), reason }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "flex" => Ok(Self::Flex),
            None if text == "wgpu" => Ok(Self::Wgpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", index)) => {
                index.parse().map(Self::Cuda).map_err(|_| format!("`{index}` is not a device number"))
            }
            _ => Err("expected flex (the CPU), wgpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flex => write!(f, "flex"),
            Self::Wgpu => write!(f, "wgpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Whether the device runs the kernels of this project.
pub(crate) fn has_kernels(device: &Device) -> bool {
    #[cfg(feature = "_gpu")]
    if let burn::backend::DispatchDevice::Cube(_) = device.as_dispatch() {
        return true;
    }
    let _ = device;
    false
}

/// Whether the device is CUDA's.
pub fn is_cuda(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(_)) = device.as_dispatch() {
        return true;
    }
    let _ = device;
    false
}

/// Whether the device can be used for the first time: of a CUDA device that was not opened by [`DeviceName::open`] that would panic
/// where there is no driver, or no memory for its context. The others are not asked.
///
/// ```
/// use burn::tensor::Device;
///
/// mla_ops::check_opens(&Device::flex())?;
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::UnsupportedDevice`] with what the driver says.
pub fn check_opens(device: &Device) -> Result<(), MlaError> {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(cubecl::Device::Cuda(gpu)) = device.as_dispatch() {
        let name = DeviceName::Cuda(gpu.index);
        return crate::memory::cuda::keep_context(gpu.index).map_err(|reason| name.unsupported(reason));
    }
    let _ = device;
    Ok(())
}

/// Bytes of the largest tensor that a GPU can hold in one buffer; none for the CPU.
pub fn largest_buffer(device: &Device) -> Option<u64> {
    #[cfg(feature = "_gpu")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return Some(device.client().properties().memory.max_page_size);
    }
    let _ = device;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for name in ["flex", "wgpu", "cuda:3"] {
            assert_eq!(name.parse::<DeviceName>().map(|device| device.to_string()), Ok(name.to_string()));
        }
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        for wrong in ["", "cpu", "cuda:", "cuda:x", "flex:0"] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
    }
}
