//! [`read_beside`]: numbers on their way to the host while the device goes on.

use burn::tensor::{Int, Tensor};

use crate::MlaError;

/// The numbers of an i32 tensor `[n]`, and what `launch_next` gives.
///
/// Burn asks for a tensor's numbers when they are looked at, and then waits for all that was launched before. Here they are
/// asked for, then `launch_next` runs, and only then are they waited for: what it launches runs while the host looks at them.
/// On the CPU, and under Fusion, `launch_next` runs first.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::read_beside;
///
/// let device = Device::flex();
/// let tokens = index_tensor(vec![3, 1], &device);
/// let (tokens, next) = read_beside(tokens, || Tensor::<1>::ones([2], &device) * 2.0)?; // the next step
/// assert_eq!((tokens, next.dims()), (vec![3, 1], [2]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::Read`] where the device fails, now or in what it was asked before; then what `launch_next` gave is lost.
pub fn read_beside<T>(numbers: Tensor<1, Int>, launch_next: impl FnOnce() -> T) -> Result<(Vec<i32>, T), MlaError> {
    #[cfg(all(feature = "_gpu", not(feature = "fusion")))]
    if let Some((client, handle)) = cube::source(&numbers) {
        let asked = client.read_async(vec![handle]);
        let next = launch_next();
        return Ok((cube::wait(asked).map_err(failed)?, next));
    }
    let next = launch_next();
    Ok((numbers.try_into_vec_as::<i32>().map_err(failed)?, next))
}

fn failed(error: impl std::fmt::Display) -> MlaError {
    MlaError::Read { op: "read_beside", argument: "numbers", reason: error.to_string() }
}

#[cfg(all(feature = "_gpu", not(feature = "fusion")))]
mod cube {
    use burn::backend::{BackendTensor, DispatchTensorKind};
    use burn::tensor::{DType, Int, Tensor, TensorData};
    use burn_cubecl::kernel::into_contiguous;
    use cubecl::bytes::Bytes;
    use cubecl::client::Client;
    use cubecl::future;
    use cubecl::server::{Handle, ServerError};

    /// Where the numbers are; none if that is no such device, they are not i32, or there are none.
    pub(super) fn source(numbers: &Tensor<1, Int>) -> Option<(Client, Handle)> {
        if numbers.dims() == [0] || numbers.dtype() != DType::I32 {
            return None;
        }
        match numbers.clone().into_dispatch().kind {
            DispatchTensorKind::Cube(BackendTensor::Int(tensor)) => {
                let tensor = into_contiguous(tensor);
                Some((tensor.client, tensor.handle))
            }
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    pub(super) fn wait(asked: impl Future<Output = Result<Vec<Bytes>, ServerError>>) -> Result<Vec<i32>, String> {
        let bytes = future::block_on(asked).map_err(|error| error.to_string())?;
        let bytes = bytes.into_iter().next().ok_or("the device gave nothing")?;
        let len = bytes.len() / size_of::<i32>();
        TensorData::from_bytes(bytes, [len], DType::I32).try_into_vec().map_err(|error| error.to_string())
    }
}
