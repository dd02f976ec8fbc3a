//! What a GPU cannot do, found out before anything is launched.

#[cfg(feature = "_gpu")]
use burn::backend::DispatchDevice;
use burn::tensor::{DType, Tensor, kind::Basic};
#[cfg(feature = "_gpu")]
use cubecl::{client::Client, ir::AddressType};

use crate::MlaError;
use crate::check::Check;
use crate::memory::{DeviceMemory, host_memory};

impl Check {
    /// The client of the call's device, which the launchers' own checks ask; none on the CPU, which has no such limits.
    #[cfg(feature = "_gpu")]
    pub(crate) fn client(&self) -> Option<Client> {
        match self.device().as_dispatch() {
            DispatchDevice::Cube(device) => Some(device.client()),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    /// The device's kernels reach all elements of a tensor.
    pub(crate) fn elements<const D: usize, K: Basic>(
        &self,
        argument: &'static str,
        tensor: &Tensor<D, K>,
    ) -> Result<(), MlaError> {
        self.element_count(argument, tensor.shape().num_elements())
    }

    /// They reach so many elements.
    pub(crate) fn element_count(&self, argument: &'static str, elements: usize) -> Result<(), MlaError> {
        // What 32 bits count, every device reaches: asking for its properties would cost each call a microsecond.
        if u32::try_from(elements).is_ok() {
            return Ok(());
        }
        #[cfg(feature = "_gpu")]
        if let Some(client) = self.client()
            && !client.properties().supports_address(AddressType::from_len(elements))
        {
            let reason = format!("{elements} elements, and the device has offsets of 32 bits");
            return Err(self.device_limit(argument, reason));
        }
        let _ = argument;
        Ok(())
    }

    /// The device can make a tensor of this dtype and shape, which `argument` asks for; of the CPU, the host has the memory.
    pub(crate) fn allocation<const D: usize>(
        &self,
        argument: &'static str,
        dtype: DType,
        shape: [usize; D],
    ) -> Result<(), MlaError> {
        // Of a tensor without elements, too, strides are computed.
        if shape.contains(&0) && bytes_of(dtype, shape.map(|len| len.max(1))) > isize::MAX as u128 {
            return Err(self.device_limit(argument, format!("{shape:?} is more than can be addressed")));
        }
        let bytes = bytes_of(dtype, shape);
        // As in `elements`: every device has a megabyte.
        if bytes <= 1 << 20 {
            return Ok(());
        }
        #[cfg(feature = "_gpu")]
        if let Some(client) = self.client() {
            let most = client.properties().memory.max_page_size;
            if bytes > u128::from(most) {
                let reason = format!("it takes a buffer of {bytes} bytes, and the largest has {most}");
                return Err(self.device_limit(argument, reason));
            }
            return Ok(());
        }
        match host_lacks(bytes) {
            None => Ok(()),
            Some(reason) => Err(self.device_limit(argument, format!("it takes {bytes} bytes, and {reason}"))),
        }
    }
}

/// Bytes of a tensor of this dtype and shape, in arithmetic that no shape overflows.
pub(crate) fn bytes_of<const D: usize>(dtype: DType, shape: [usize; D]) -> u128 {
    match shape.contains(&0) {
        true => 0,
        false => shape.into_iter().fold(dtype.size() as u128, |bytes, size| bytes.saturating_mul(size as u128)),
    }
}

/// What the host lacks for so many bytes. Where its memory is not known, many are asked for, and given back untouched.
fn host_lacks(bytes: u128) -> Option<String> {
    const MANY: u128 = 1 << 30;
    if bytes < MANY {
        return None;
    }
    if let Some(DeviceMemory { free, .. }) = host_memory() {
        return (bytes > u128::from(free)).then(|| format!("the host has {free} free"));
    }
    let given = usize::try_from(bytes).is_ok_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    (!given).then(|| "the host does not have so many".into())
}
