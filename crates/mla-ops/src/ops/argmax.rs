//! [`argmax`]: the likeliest token.

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::MlaError;
use crate::backend::MlaBackend;
use crate::check::Check;

/// The place of the largest number of each row of `x [N, d]`, f32, f16 or bf16: i32 `[N]`, on the device. The next tokens of
/// logits where nothing is drawn.
///
/// Of several that are as large it is the first. What is not a number is left out, and plus infinity is as large as the largest
/// f32. The place is -1 in a row that has only minus infinity and what is not a number.
///
/// # Errors
/// Another dtype; rows without numbers; more than the device can do ([`MlaError::DeviceLimit`]).
pub fn argmax(x: Tensor<2>) -> Result<Tensor<1, Int>, MlaError> {
    let check = Check::new("argmax", "x", &x)?;
    check.float("x", &x)?;
    let [rows, width] = x.dims();
    let holds = rows == 0 || (width > 0 && i32::try_from(width).is_ok());
    check.value("x", holds, format!("{width} numbers in a row"), || format!("1 to {}", i32::MAX))?;
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    crate::limits::elements(&check, "x", &x)?;
    if rows == 0 {
        return Ok(Tensor::zeros([0], (&x.device(), burn::tensor::DType::I32)));
    }
    Ok(Tensor::from_dispatch(<Dispatch as MlaBackend>::argmax(x.into_dispatch())))
}
