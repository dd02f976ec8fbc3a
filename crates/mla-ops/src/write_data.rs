//! [`write_data`]: numbers of the host into a part of a tensor.

use burn::tensor::{Tensor, TensorData, kind::Basic, s};

use crate::MlaError;

/// Writes `data`, `[n]`, into `tensor`, `[len]` of the same dtype, any, from element `first` on, as `slice_assign` would. CUDA copies it there in place, with no kernel and no
/// other tensor; where the tensor has another handle, or under Fusion, it is `slice_assign`.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::write_data;
///
/// let zeros = Tensor::<1>::zeros([4], &Device::flex());
/// let written = write_data(zeros, 1, TensorData::from([5.0f32, 6.0]))?;
/// assert_eq!(written.into_data().try_to_vec::<f32>().unwrap(), [0.0, 5.0, 6.0, 0.0]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// [`MlaError::DType`] if the data has another dtype than the tensor, [`MlaError::Value`] if it goes beyond the tensor's end.
pub fn write_data<K: Basic>(tensor: Tensor<1, K>, first: usize, data: TensorData) -> Result<Tensor<1, K>, MlaError> {
    let ([len], count, dtype) = (tensor.dims(), data.num_elements(), tensor.dtype());
    if data.dtype() != dtype {
        let expected = format!("{dtype:?}, as the tensor has");
        return Err(MlaError::DType { op: "write_data", argument: "data", actual: data.dtype(), expected });
    }
    if first > len || count > len - first {
        let expected = format!("at most {len} less the {count} elements of `data`");
        return Err(MlaError::Value { op: "write_data", argument: "first", actual: first.to_string(), expected });
    }
    #[cfg(all(feature = "cuda", not(feature = "fusion")))]
    let tensor = {
        use burn::backend::{BackendTensor, DispatchTensorKind};
        let is_cuda = crate::is_cuda(&tensor.device());
        let dispatch = tensor.into_dispatch();
        if is_cuda
            && let DispatchTensorKind::Cube(BackendTensor::Float(whole) | BackendTensor::Int(whole)) = &dispatch.kind
            && whole.handle.can_mut()
            && whole.is_contiguous()
        {
            let part = whole.handle.clone().offset_start((first * dtype.size()) as u64);
            whole.client.write(&part, data.into_parts().0);
            return Ok(Tensor::from_dispatch(dispatch));
        }
        Tensor::from_dispatch(dispatch)
    };
    let options = (&tensor.device(), dtype);
    Ok(tensor.slice_assign(s![first..first + count], Tensor::from_data(data, options)))
}
