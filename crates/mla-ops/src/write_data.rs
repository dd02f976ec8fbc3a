//! [`write_data`]: numbers of the host into a part of a tensor.

use burn::tensor::{Tensor, TensorData, kind::Basic, s};

/// Writes `data` into `tensor` from element `first` on, as `slice_assign` would. CUDA copies it there in place, with no kernel and no
/// other tensor; where the tensor has another handle, or under Fusion, it is `slice_assign`.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::write_data;
///
/// let zeros = Tensor::<1>::zeros([4], &Device::flex());
/// let written = write_data(zeros, 1, TensorData::from([5.0f32, 6.0]));
/// assert_eq!(written.into_data().try_to_vec::<f32>().unwrap(), [0.0, 5.0, 6.0, 0.0]);
/// ```
///
/// # Panics
/// If the data has another dtype than the tensor, or goes beyond its end.
pub fn write_data<K: Basic>(tensor: Tensor<1, K>, first: usize, data: TensorData) -> Tensor<1, K> {
    let ([len], count, dtype) = (tensor.dims(), data.num_elements(), tensor.dtype());
    assert_eq!(data.dtype(), dtype, "data of the dtype of the tensor");
    assert!(first <= len && count <= len - first, "{count} elements from {first} on, of a tensor of {len}");
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
            return Tensor::from_dispatch(dispatch);
        }
        Tensor::from_dispatch(dispatch)
    };
    let options = (&tensor.device(), dtype);
    tensor.slice_assign(s![first..first + count], Tensor::from_data(data, options))
}
