//! [`check_written`]: whether a device could do what a tensor's numbers come from.

use burn::tensor::{Tensor, kind::Basic};

use crate::MlaError;

/// Whether the allocation of a tensor, and what was launched so far to write it, was possible. Burn itself says so when the numbers
/// are read. It waits for the calls before to reach the device, and not for the device: a kernel that fails later shows later.
/// Nothing is found out under Fusion, which defers the calls.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::check_written;
///
/// let weights = Tensor::<2>::ones([4, 4], &Device::flex());
/// check_written("weights", &weights)?; // an error where a GPU had no memory for them
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::Read`] with the first cause, for instance an allocation ([`failed_allocation`](crate::failed_allocation)).
pub fn check_written<const D: usize, K: Basic>(argument: &'static str, tensor: &Tensor<D, K>) -> Result<(), MlaError> {
    #[cfg(all(feature = "_gpu", not(feature = "fusion")))]
    {
        use burn::backend::{BackendTensor, DispatchTensorKind};
        if let DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) = tensor.clone().into_dispatch().kind
        {
            let failed = |error: cubecl::server::ServerError| error.to_string();
            let outcome = tensor.client.check([&tensor.handle]).map_err(failed);
            return outcome.map_err(|reason| MlaError::Read { op: "check_written", argument, reason });
        }
    }
    let _ = (argument, tensor);
    Ok(())
}
