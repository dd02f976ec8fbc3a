//! [`argmax`]: the token of greedy decoding.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Int, Tensor};

use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

/// The index of the largest number of each row of `x [N, d]`, f32, f16 or bf16: i32 `[N]`, on the device. Of logits, the tokens
/// of greedy decoding.
///
/// Of several that are as large it is the first. NaN is left out, and plus infinity is as large as the largest f32. The index is
/// -1 in a row of nothing but minus infinity and NaN.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::argmax;
///
/// let logits = Tensor::<2>::from_data([[0.1, 2.0, -1.0], [5.0, 0.0, 5.0]], &Device::flex());
/// assert_eq!(argmax(logits)?.into_data(), TensorData::from([1, 0]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Another dtype; rows without numbers; more than the device can do ([`MlaError::DeviceLimit`]).
pub fn argmax(x: Tensor<2>) -> Result<Tensor<1, Int>, MlaError> {
    let check = Check::new("argmax", "x", &x)?;
    check.float("x", &x)?;
    let [rows, width] = x.dims();
    let holds = rows == 0 || (width > 0 && i32::try_from(width).is_ok());
    check.value("x", holds, format!("{width} numbers in a row"), || format!("1 to {}", i32::MAX))?;
    check.elements("x", &x)?;
    if rows == 0 {
        return Ok(Tensor::zeros([0], (&x.device(), DType::I32)));
    }
    Ok(tensors(<Dispatch as ArgmaxBackend>::argmax(x.into_dispatch())))
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait ArgmaxBackend: Backend {
    /// [`argmax`] of a row at least.
    #[fusion(dtype = DType::I32, shape = [x[0]].into())]
    fn argmax(x: FloatTensor<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "_gpu")]
mod cube {
    use burn::tensor::DType;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::argmax::{ArgmaxArgs, launch};

    use super::ArgmaxBackend;
    use crate::tensors::{buffers, contiguous, dims, elem, empty};

    impl ArgmaxBackend for CubeBackend {
        fn argmax(x: CubeTensor) -> CubeTensor {
            let x = contiguous(x);
            let ([rows, width], elem) = (dims(&x), elem(&x));
            let places = empty(&x, [rows], DType::I32);
            launch(&x.client, buffers!(x, places => ArgmaxArgs { x, places, rows, width, elem }));
            places
        }
    }
}

#[cfg(feature = "flex")]
mod reference {
    use burn::backend::{Flex, tensor::FloatTensor};
    use burn::tensor::{Int, Tensor};

    use super::ArgmaxBackend;
    use crate::reference::{IntoFlex, device_i32, tensor};

    impl ArgmaxBackend for Flex {
        fn argmax(x: FloatTensor<Self>) -> FloatTensor<Self> {
            argmax(tensor(x)).into_flex()
        }
    }

    fn argmax(x: Tensor<2>) -> Tensor<1, Int> {
        let ([rows, width], device) = (x.dims(), x.device());
        let x: Vec<f32> = x.try_into_vec_as().expect("computed on the CPU");
        let place = |row: &[f32]| {
            let mut best = (-1, f32::NEG_INFINITY);
            for (place, &value) in (0..).zip(row) {
                let value = if value > f32::MAX { f32::MAX } else { value };
                if value > best.1 {
                    best = (place, value);
                }
            }
            best.0
        };
        device_i32(x.chunks(width).map(place).collect(), [rows], &device)
    }
}
