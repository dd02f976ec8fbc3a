//! [`sample`]: the next token of each row, drawn at random from the tokens that the filters leave.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
mod params;
#[cfg(feature = "flex")]
mod reference;
#[cfg(all(test, feature = "flex"))]
mod tests;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use self::backend::SampleBackend;
pub use self::params::{SampleParams, SampleRows};
use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

const OP: &str = "sample";

/// Arguments of [`sample`]. `B` rows, `V` tokens of the vocabulary.
#[derive(Debug)]
pub struct SampleArgs<'a> {
    /// `[B, V]`, f32, f16 or bf16.
    pub logits: Tensor<2>,
    /// How the token of each row is chosen; `B` rows.
    pub rows: &'a SampleRows,
    /// i32 `[R, ceil(V / 32)]`, a bit for each token that was seen, the lowest first; consumed, and written in place. Which of these
    /// rows belongs to which row of logits, [`SampleParams::seen_row`] says; one that there is not is as none.
    pub seen: Option<Tensor<2, Int>>,
}

/// What [`sample`] gives.
#[derive(Debug)]
pub struct Sampled {
    /// i32 `[B]`: the tokens; -1 where no logit is finite or plus infinity.
    pub tokens: Tensor<1, Int>,
    /// The buffer of [`SampleArgs::seen`], with the tokens chosen.
    pub seen: Option<Tensor<2, Int>>,
}

/// The next token of each row.
///
/// The order is that of transformers (`_get_logits_processor` in `generation/utils.py`, and `generation/logits_process.py`):
///
/// 1. repetition penalty: a logit below 0 of a token seen is multiplied by it, another one divided (CTRL, arXiv 1909.05858, 4.1);
/// 2. temperature: logits are divided by it;
/// 3. top-k: logits below the k-th largest are left out, so that several which are equal to it all stay;
/// 4. top-p: of the probabilities of what is left, the smallest are left out whose sum is at most `1 - top_p`, but never the
///    largest. Of several that are equal at this border transformers keeps some, which depends on how it sorts; here all of them
///    stay;
/// 5. min-p: tokens less probable than `min_p` times the most probable one are left out.
///
/// (vLLM has min-p before top-k and top-p, so that its top-p is of fewer tokens.) A token is drawn by the probabilities of what is
/// left then. With a temperature of 0 it is the largest logit after the penalty, the first one of several.
///
/// A logit that is NaN counts as minus infinity, which is never chosen, plus infinity as the largest finite number. Weights
/// `e^((logit - largest) / temperature)` are whole numbers of 64 bits, in which the largest is `2^(63 - ceil(log2(V)))`: sums do not
/// depend on the order in which they are made, and what a row gets depends on nothing but itself. A token is less probable than
/// 2^-46 of the most probable one, for V3's vocabulary, if it cannot be drawn for that.
///
/// The random number of a row is 64 bits of Philox4x32-10 (Salmon et al., SC 2011) with the seed as its key and the position as its
/// counter. The token is the one at which that part of the whole weight is reached, from the most probable one on, of equal ones
/// from the lowest id on.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::{SampleArgs, SampleParams, SampleRows, sample};
///
/// let device = Device::flex();
/// // The first row is greedy, the second one is drawn: of the token 2 alone, as the others are out of its top-p.
/// let logits = Tensor::<2>::from_data([[0.0, 3.0, 1.0], [0.0, 1.0, 9.0]], &device);
/// let drawn = SampleParams { temperature: 0.8, top_p: 0.9, seed: 7, position: 12, ..SampleParams::GREEDY };
/// let rows = SampleRows::new(&[SampleParams::GREEDY, drawn], &device)?;
/// let sampled = sample(SampleArgs { logits, rows: &rows, seen: None })?;
/// assert_eq!(sampled.tokens.into_data(), TensorData::from([1, 2]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Another dtype; shapes that do not fit together; `seen` with another handle ([`MlaError::CacheShared`]), or absent where a row
/// names it; more than the device can do ([`MlaError::DeviceLimit`]).
pub fn sample(args: SampleArgs) -> Result<Sampled, MlaError> {
    let SampleArgs { logits, rows, seen } = args;
    let check = Check::new(OP, "logits", &logits)?;
    check.float("logits", &logits)?;
    check.elements("logits", &logits)?;
    let [batch, width] = logits.dims();
    let holds = batch == 0 || (width > 0 && i32::try_from(width).is_ok());
    check.value("logits", holds, format!("{width} numbers in a row"), || format!("1 to {}", i32::MAX))?;
    check.int("rows", &rows.words)?;
    let [count, words] = rows.words.dims();
    let expected = || format!("[B, {words}] with B = {batch}, a row for each row of `logits`");
    check.dims("rows", [count, words], [Some(batch), None], expected)?;
    let has_seen = seen.is_some();
    check.value("seen", has_seen || !rows.names_seen, "absent", || "there, as a row has a `seen_row`".into())?;
    if let Some(seen) = &seen {
        check.int("seen", seen)?;
        let words = width.div_ceil(32);
        let expected = || format!("[R, {words}], a bit for each of the {width} tokens");
        check.dims("seen", seen.dims(), [None, Some(words)], expected)?;
        check.elements("seen", seen)?;
        check.only_handle("seen", seen)?;
    }
    if batch == 0 {
        return Ok(Sampled { tokens: Tensor::zeros([0], (check.device(), DType::I32)), seen });
    }
    let device = check.device();
    let seen = seen.unwrap_or_else(|| Tensor::empty([0, width.div_ceil(32)], (device, DType::I32)));
    let (tokens, seen) = tensors(<Dispatch as SampleBackend>::sample(
        logits.into_dispatch(),
        rows.words.clone().into_dispatch(),
        seen.into_dispatch(),
    ));
    Ok(Sampled { tokens, seen: has_seen.then_some(seen) })
}
