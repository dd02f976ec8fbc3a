//! [`linear_by_head`]: a projection of each head by its own matrix.

pub(super) mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use self::backend::{BackendHeadRows, LinearByHeadBackend};
use super::matmul::product;
use super::mla_decode::Decoded;
use super::norm_rope::checks::check_tables;
use super::norm_rope::{NormRopeArgs, NormRopeOptions, norm_rope};
use super::products::LinearProblem;
use crate::check::Check;
use crate::device::has_kernels;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError, StackedWeight};

const OP: &str = "linear_by_head";

/// Rows `[N, H, d]` that [`linear_by_head`] reads: in memory, those that a decode step gives, or heads before their inverse RoPE.
#[derive(Debug, Clone)]
pub struct HeadRows(Source);

#[derive(Debug, Clone)]
enum Source {
    InMemory(Tensor<3>),
    Decoded(Decoded),
    InverseRope(InverseRope),
}

/// Heads to which inverse RoPE is not applied yet, and which are projected in groups of neighbours (DeepSeek-V4: the output of an
/// attention whose values are keys with RoPE applied).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, InverseRope, RopeConfig, StackedWeight, linear_by_head};
///
/// let device = Device::flex();
/// let [cos, sin] = RopeConfig { rope_theta: 10_000.0, yarn: None }.tables(4, &[0, 1, 2], &device)?;
/// // 4 heads of 8 channels, projected in 2 groups.
/// let heads = InverseRope { x: Tensor::ones([3, 4, 8], &device), cos, sin };
/// let wo_a = StackedWeight::from(Tensor::<3>::ones([2, 5, 16], &device));
/// assert_eq!(linear_by_head(heads, &wo_a, Determinism::Fast)?.dims(), [3, 2, 5]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
#[derive(Debug, Clone)]
pub struct InverseRope {
    /// `[N, heads, d]`, f32, f16 or bf16: for [`linear_by_head`] rows `[N, H, heads / H · d]`.
    pub x: Tensor<3>,
    /// f32 `[N, dr / 2]`: RoPE's cosines for the last `dr` channels of each head, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
}

/// In memory.
impl From<Tensor<3>> for HeadRows {
    fn from(rows: Tensor<3>) -> Self {
        Self(Source::InMemory(rows))
    }
}

/// The `out [B, Sq, H, Dv]` of a decode step, as `[B Sq, H, Dv]`.
impl From<Decoded> for HeadRows {
    fn from(step: Decoded) -> Self {
        Self(Source::Decoded(step))
    }
}

/// As `[N, H, heads / H · d]`, for a weight of `H` matrices.
impl From<InverseRope> for HeadRows {
    fn from(heads: InverseRope) -> Self {
        Self(Source::InverseRope(heads))
    }
}

/// The product of each head of `x [N, H, d]`, f32, f16 or bf16, with the transpose of its own matrix of `weight [H, out, in]`, of
/// the same dtype, and behind it the head's channels past the first `in`, as they are: `[N, H, out + d - in]`.
///
/// MLA's absorbed projections (DeepSeek-V2 §2.1): the query against the latents, with its rotary part carried over, and the values
/// of attended latents. As fast as [`linear`](crate::linear()) for a few tokens on a GPU, where matrices may lie apart. Of a
/// [`Decoded`] step of one token on a GPU, the launch of the projection merges the splits, and with matrix instructions it applies
/// [`InverseRope`] to the heads of one token; the bits are the same.
/// [`explain_path`](crate::explain_path) says what runs for [`LinearProblem::by_head`](crate::LinearProblem::by_head).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Determinism, StackedWeight, linear_by_head};
///
/// let device = Device::flex();
/// // Queries of 2 heads with 4 channels and 2 rotary ones behind them, absorbed into a latent space of 8 channels.
/// let (q, w_uk) = (Tensor::<3>::ones([5, 2, 4 + 2], &device), Tensor::<3>::ones([2, 8, 4], &device));
/// let absorbed = linear_by_head(q, &StackedWeight::from(w_uk), Determinism::Fast)?;
/// assert_eq!(absorbed.dims(), [5, 2, 8 + 2]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices; a [`Decoded`] step whose `Dv` is not `in`: nothing is launched.
pub fn linear_by_head(
    x: impl Into<HeadRows>,
    weight: &StackedWeight,
    determinism: Determinism,
) -> Result<Tensor<3>, MlaError> {
    let HeadRows(x) = x.into();
    match x {
        Source::InverseRope(heads) => by_group(heads, weight, determinism),
        Source::InMemory(x) => {
            let check = Check::new(OP, "x", &x)?;
            check.float("x", &x)?;
            weight.check(&check, "weight", x.dtype(), "that of `x`")?;
            let ([_, heads, width], [_, _, inputs]) = (x.dims(), weight.dims());
            check.dims("weight", weight.dims(), [Some(heads), None, Some(inputs.min(width))], || {
                format!("[H, out, in] with H = {heads} and in at most {width}, as in `x`")
            })?;
            check.elements("x", &x)?;
            Ok(in_memory(x, weight, determinism))
        }
        Source::Decoded(step) => {
            let ([batch, query_len, heads, width], [_, outputs, _]) = (step.dims(), weight.dims());
            let check = Check::new(OP, "x", step.q())?;
            weight.check(&check, "weight", step.dtype(), "that of the query")?;
            check.dims("weight", weight.dims(), [Some(heads), None, Some(width)], || {
                format!("[H, out, Dv] with H = {heads}, Dv = {width}, as in `x`")
            })?;
            check.value("weight", outputs > 0, "matrices without rows", || "at least 1 row each".into())?;
            if (batch, query_len) == (1, 1) && has_kernels(check.device()) {
                return Ok(launch(BackendHeadRows::Decoded(step.into_backend()), weight, determinism));
            }
            let (out, _) = step.materialise();
            Ok(in_memory(out.reshape([batch * query_len, heads, width]), weight, determinism))
        }
    }
}

/// [`linear_by_head`] of groups of heads, after their inverse RoPE.
fn by_group(heads: InverseRope, weight: &StackedWeight, determinism: Determinism) -> Result<Tensor<3>, MlaError> {
    let InverseRope { x, cos, sin } = heads;
    let check = Check::new(OP, "x", &x)?;
    check.float("x", &x)?;
    weight.check(&check, "weight", x.dtype(), "that of `x`")?;
    let ([tokens, heads, width], [groups, outputs, inputs]) = (x.dims(), weight.dims());
    check_tables(&check, [&cos, &sin], tokens, width)?;
    let words =
        || format!("[H, out, in] with H · in = {heads} · {width}, the channels of `x`, and whole heads in each group");
    let whole = groups * inputs == heads * width && (width == 0 || inputs.is_multiple_of(width));
    check.dims("weight", weight.dims(), [None, None, Some(if whole { inputs } else { inputs + 1 })], words)?;
    check.elements("x", &x)?;
    let is_empty = [tokens, groups, outputs, inputs].contains(&0);
    if tokens == 1 && !is_empty && has_kernels(check.device()) {
        let [x, cos, sin] = [x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch()];
        return Ok(launch(BackendHeadRows::InverseRope { x, cos, sin }, weight, determinism));
    }
    if is_empty {
        return Ok(Tensor::zeros([tokens, groups, outputs], (&x.device(), x.dtype())));
    }
    let options = NormRopeOptions { norm_eps: None, norm_whole_head: true, inverse: true };
    let x = norm_rope(NormRopeArgs { x, weight: None, cos, sin }, &options)?;
    Ok(in_memory(x.reshape([tokens, groups, inputs]), weight, determinism))
}

/// [`linear_by_head`] of checked rows in memory.
pub(super) fn in_memory(x: Tensor<3>, weight: &StackedWeight, determinism: Determinism) -> Tensor<3> {
    let ([rows, heads, width], [_, outputs, inputs]) = (x.dims(), weight.dims());
    let out = [rows, heads, outputs + width - inputs];
    if out.contains(&0) {
        // Burn joins no tensors without elements on a GPU.
        return Tensor::empty(out, (&x.device(), x.dtype()));
    }
    let (problem, device) = (LinearProblem::of_heads(&x, weight, determinism), x.device());
    if problem.dequantises(&device) {
        return in_memory(x, &weight.dense().into(), determinism);
    }
    if problem.has_kernel(&device) {
        return launch(BackendHeadRows::InMemory(x.into_dispatch()), weight, determinism);
    }
    let by_matmul = |x: Tensor<3>| by_matmul(x, weight, determinism);
    match width - inputs {
        0 => by_matmul(x),
        rest => {
            let carried = x.clone().narrow(2, inputs, rest);
            let read = match inputs {
                0 => Tensor::empty([rows, heads, 0], (&x.device(), x.dtype())),
                _ => x.narrow(2, 0, inputs),
            };
            Tensor::cat(vec![by_matmul(read), carried], 2)
        }
    }
}

fn launch(x: BackendHeadRows<Dispatch>, weight: &StackedWeight, determinism: Determinism) -> Tensor<3> {
    tensors(<Dispatch as LinearByHeadBackend>::linear_by_head(x, weight.clone().into_backend(), determinism))
}

/// All channels of each head of x `[N, H, in]` with its matrix.
fn by_matmul(x: Tensor<3>, weight: &StackedWeight, determinism: Determinism) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if !weight.format().is_dense() && crate::independent::is_flex(&x.device()) {
        return head_by_head(x, weight, determinism);
    }
    product(x.swap_dims(0, 1), weight.dense().swap_dims(1, 2), determinism).swap_dims(0, 1)
}

/// The same with weights in blocks on the CPU, which decodes where it multiplies.
#[cfg(feature = "flex")]
fn head_by_head(x: Tensor<3>, weight: &StackedWeight, determinism: Determinism) -> Tensor<3> {
    use super::linear::reference::times;
    let [_, heads, _] = x.dims();
    let products = (0..heads).map(|head| {
        let x: Tensor<2> = x.clone().narrow(1, head, 1).squeeze_dim(1);
        times(x, &weight.get(head), determinism).unsqueeze_dim::<3>(1)
    });
    Tensor::cat(products.collect(), 1)
}
