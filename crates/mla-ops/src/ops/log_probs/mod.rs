//! [`log_probs`]: what the model says of the token chosen, and of the most probable ones.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use self::backend::{LogProbsBackend, LogProbsSpec};
use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

const OP: &str = "log_probs";

/// What [`log_probs`] gives, natural logarithms in f32.
#[derive(Debug)]
pub struct LogProbs {
    /// f32 `[B]`: of the tokens asked for; minus infinity of one that is none, or whose logit is NaN or minus infinity.
    pub chosen: Tensor<1>,
    /// i32 `[B, K]`: the most probable tokens, the best first, of equal ones the lowest id; -1 where there are fewer.
    pub ids: Tensor<2, Int>,
    /// f32 `[B, K]`: of `ids`; minus infinity where there is none.
    pub values: Tensor<2>,
}

/// The logarithms of the probabilities that logits `[B, V]` (f32, f16 or bf16) give to one token of each row, `tokens` i32 `[B]`, and
/// to the `top` most probable ones.
///
/// The probabilities are the softmax of the logits as they are: the model's own, before penalty, temperature and filters of
/// [`sample`](super::sample()). That is what vLLM reports by default (`logprobs_mode` is `raw_logprobs`). NaN counts as minus infinity,
/// plus infinity as the largest finite number. The sum of a row does not depend on the order in which it is made: a row's results
/// depend on nothing but the row.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{LogProbs, log_probs};
///
/// let device = Device::flex();
/// // Four tokens that are equally probable; asked for are token 2 and the two best.
/// let logits = Tensor::<2>::zeros([1, 4], &device);
/// let LogProbs { chosen, ids, values } = log_probs(logits, index_tensor(vec![2], &device), 2)?;
/// assert!((chosen.into_scalar::<f32>() - 0.25f32.ln()).abs() < 1e-6);
/// assert_eq!((ids.into_data(), values.dims()), (TensorData::from([[0, 1]]), [1, 2]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Another dtype; shapes that do not fit together; a `top` of 0; more than the device can do ([`MlaError::DeviceLimit`]).
pub fn log_probs(logits: Tensor<2>, tokens: Tensor<1, Int>, top: usize) -> Result<LogProbs, MlaError> {
    let check = Check::new(OP, "logits", &logits)?;
    check.float("logits", &logits)?;
    check.elements("logits", &logits)?;
    let [batch, width] = logits.dims();
    let holds = batch == 0 || (width > 0 && i32::try_from(width).is_ok());
    check.value("logits", holds, format!("{width} numbers in a row"), || format!("1 to {}", i32::MAX))?;
    check.int("tokens", &tokens)?;
    let expected = || format!("[{batch}], a token for each row of `logits`");
    check.dims("tokens", tokens.dims(), [Some(batch)], expected)?;
    check.value("top", top > 0, top, || "at least 1".into())?;
    check.allocation("top", DType::F32, [batch, top])?;
    if batch == 0 {
        let (floats, ints) = ((check.device(), DType::F32), (check.device(), DType::I32));
        let (ids, values) = (Tensor::zeros([0, top], ints), Tensor::zeros([0, top], floats));
        return Ok(LogProbs { chosen: Tensor::zeros([0], floats), ids, values });
    }
    let spec = LogProbsSpec { top };
    let (chosen, ids, values) =
        tensors(<Dispatch as LogProbsBackend>::log_probs(logits.into_dispatch(), tokens.into_dispatch(), spec));
    Ok(LogProbs { chosen, ids, values })
}
