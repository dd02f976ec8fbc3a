//! [`merge_state`] and its forms: the attention over two or more sets of keys from the attentions over each.
//!
//! A state is `out` (softmax-weighted mean of the values) and `lse` (natural logarithm of the sum of `exp(score)`).
//! Merged, each part weighs `exp(lse - lse_merged)` (FlashAttention-2 §3.1, "log-sum-exp" form). An empty part has
//! `lse = -inf`; `+inf` is read as `-inf`, since some producers mark "nothing" so. The `out` of an empty part may hold
//! anything. Where all parts are empty the result is `out = 0`, `lse = -inf`.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
pub(super) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

use self::backend::MergeStateBackend;
use crate::MlaError;
use crate::check::Check;
use crate::dispatch::tensors;

/// Arguments of [`merge_state`].
#[derive(Debug, Clone)]
pub struct MergeStateArgs {
    /// `[T, H, Dv]`, f32, f16 or bf16.
    pub out_a: Tensor<3>,
    /// f32 `[T, H]`.
    pub lse_a: Tensor<2>,
    /// `[T, H, Dv]`, the dtype of `out_a`.
    pub out_b: Tensor<3>,
    /// f32 `[T, H]`.
    pub lse_b: Tensor<2>,
}

/// Merges two states: `out [T, H, Dv]` in the dtype of the inputs, `lse` f32 `[T, H]`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{MergeStateArgs, merge_state};
///
/// let device = Device::flex();
/// // The second part has three times the weight of the first.
/// let (out_a, lse_a) = (Tensor::zeros([1, 1, 8], &device), Tensor::zeros([1, 1], &device));
/// let (out_b, lse_b) = (Tensor::ones([1, 1, 8], &device), Tensor::full([1, 1], 3f32.ln(), &device));
/// let (out, lse) = merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b })?;
/// assert!((out.max().into_scalar::<f32>() - 0.75).abs() < 1e-6);
/// assert!((lse.into_scalar::<f32>() - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices: nothing is launched.
pub fn merge_state(args: MergeStateArgs) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let MergeStateArgs { out_a, lse_a, out_b, lse_b } = args;
    let check = Check::new("merge_state", "out_a", &out_a)?;
    check.float("out_a", &out_a)?;
    check.float_as("out_b", &out_b, out_a.dtype(), "the dtype of `out_a`")?;
    check_states(&check, ["lse_a", "out_b", "lse_b"], &out_a, &lse_a, &out_b, &lse_b)?;
    check.elements("out_a", &out_a)?;
    let ([out_a, out_b], [lse_a, lse_b]) =
        ([out_a, out_b].map(Tensor::into_dispatch), [lse_a, lse_b].map(Tensor::into_dispatch));
    Ok(tensors(<Dispatch as MergeStateBackend>::merge_state(out_a, lse_a, out_b, lse_b)))
}

/// Merges `n` states at once: `outs [T, n, H, Dv]`, `lses` f32 `[T, n, H]` -> `out [T, H, Dv]` in the dtype of `outs`,
/// `lse` f32 `[T, H]`. With `n = 0` the result is empty states.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::merge_states;
///
/// let device = Device::flex();
/// // 4 parts of 2 tokens and 3 heads.
/// let (out, lse) = merge_states(Tensor::ones([2, 4, 3, 8], &device), Tensor::zeros([2, 4, 3], &device))?;
/// assert_eq!((out.dims(), lse.dims()), ([2, 3, 8], [2, 3]));
/// assert!((lse.max().into_scalar::<f32>() - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices: nothing is launched.
pub fn merge_states(outs: Tensor<4>, lses: Tensor<3>) -> Result<(Tensor<3>, Tensor<2>), MlaError> {
    let check = Check::new("merge_states", "outs", &outs)?;
    check.float("outs", &outs)?;
    check.float_as("lses", &lses, DType::F32, "always")?;
    let [tokens, states, heads, _] = outs.dims();
    let words = || format!("[{tokens}, {states}, {heads}], the leading dimensions of `outs`");
    check.dims("lses", lses.dims(), [Some(tokens), Some(states), Some(heads)], words)?;
    check.elements("outs", &outs)?;
    Ok(tensors(<Dispatch as MergeStateBackend>::merge_states(outs.into_dispatch(), lses.into_dispatch())))
}

/// A state in f32 that others are merged into, one after the other, without rounding in between.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::Accumulator;
///
/// let device = Device::flex();
/// let mut sum = Accumulator::empty(1, 1, 8, &device)?;
/// for value in [1.0, 2.0, 6.0] {
///     sum.merge(Tensor::full([1, 1, 8], value, &device), Tensor::zeros([1, 1], &device))?;
/// }
/// assert!((sum.out.max().into_scalar::<f32>() - 3.0).abs() < 1e-5);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Accumulator {
    /// f32 `[T, H, Dv]`.
    pub out: Tensor<3>,
    /// f32 `[T, H]`.
    pub lse: Tensor<2>,
}

impl Accumulator {
    /// The empty state: `out = 0`, `lse = -inf`.
    ///
    /// # Errors
    /// [`MlaError::UnsupportedDevice`]; [`MlaError::DeviceLimit`] for sizes that the device has no memory for: nothing is
    /// allocated.
    pub fn empty(tokens: usize, heads: usize, value_width: usize, device: &Device) -> Result<Self, MlaError> {
        let (check, out) = (Check::on("Accumulator", device)?, [tokens, heads, value_width]);
        check.allocation("[tokens, heads, value_width]", DType::F32, out)?;
        check.allocation("[tokens, heads]", DType::F32, [tokens, heads])?;
        Ok(Self {
            out: Tensor::zeros(out, (device, DType::F32)),
            lse: Tensor::full([tokens, heads], f32::NEG_INFINITY, (device, DType::F32)),
        })
    }

    /// Merges a state of any float dtype into this one. The buffers are reused where this is their only handle.
    ///
    /// # Errors
    /// Wrong shapes, dtypes or devices: the accumulator is unchanged.
    pub fn merge(&mut self, out: Tensor<3>, lse: Tensor<2>) -> Result<(), MlaError> {
        let check = Check::new("merge_state_into", "accumulator.out", &self.out)?;
        check.float_as("accumulator.out", &self.out, DType::F32, "always")?;
        check.float("out", &out)?;
        check_states(&check, ["accumulator.lse", "out", "lse"], &self.out, &self.lse, &out, &lse)?;
        check.elements("out", &out)?;
        let empty = || Tensor::empty([0, 0, 0], (check.device(), DType::F32));
        let acc_out = std::mem::replace(&mut self.out, empty());
        let acc_lse = std::mem::replace(&mut self.lse, Tensor::empty([0, 0], (check.device(), DType::F32)));
        (self.out, self.lse) = tensors(<Dispatch as MergeStateBackend>::merge_state_into(
            acc_out.into_dispatch(),
            acc_lse.into_dispatch(),
            out.into_dispatch(),
            lse.into_dispatch(),
        ));
        Ok(())
    }
}

/// Shapes and lse types of two states; `names` are those of lse a, out b and lse b.
fn check_states(
    check: &Check,
    names: [&'static str; 3],
    out_a: &Tensor<3>,
    lse_a: &Tensor<2>,
    out_b: &Tensor<3>,
    lse_b: &Tensor<2>,
) -> Result<(), MlaError> {
    let [tokens, heads, width] = out_a.dims();
    let words = || format!("[T, H] = [{tokens}, {heads}]");
    for (name, lse) in [(names[0], lse_a), (names[2], lse_b)] {
        check.float_as(name, lse, DType::F32, "always")?;
        check.dims(name, lse.dims(), [Some(tokens), Some(heads)], words)?;
    }
    let words = || format!("[T, H, Dv] = [{tokens}, {heads}, {width}]");
    check.dims(names[1], out_b.dims(), [Some(tokens), Some(heads), Some(width)], words)
}
