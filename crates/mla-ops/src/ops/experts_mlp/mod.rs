//! [`experts_mlp`]: the weighted sum of each token's experts.

mod args;
mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;
mod sum;

pub use self::args::{ExpertsMlpArgs, ExpertsMlpOptions, SharedExperts};
pub use self::sum::ExpertsSum;
use crate::MlaError;

/// The weighted sum of the experts of each token, `down(silu(gate(x)) ⊙ up(x))`, and of the shared ones: `[N, hidden]` of the
/// dtype of `x`.
///
/// Nothing is launched before the [`ExpertsSum`] is read: by [`ExpertsSum::materialise`], as a summand of a
/// [`Residual`](crate::Residual), whose norm may be in the launch of the last step, or as an output that goes into
/// [`Streams`](crate::Streams), whose products may be in that launch.
///
/// On a GPU nothing comes back to the host on the way: the pairs of several tokens are sorted by expert on the device (a grouped
/// GEMM), and a single token's shared experts are in the launches of its own. Products and the weighted sum are f32; activations
/// and the output of each expert are rounded to the dtype. [`explain_path`](crate::explain_path) says what runs for both products of
/// [`LinearProblem::experts`](crate::LinearProblem::experts).
///
/// Source: DeepSeekMoE (Dai et al., 2024) §3; DeepSeek-V3 §2.1.2.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use mla_ops::{ExpertsMlpArgs, ExpertsMlpOptions, Routing, experts_mlp};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let experts = Tensor::<2, Int>::from_data([[0, 2], [1, 0]], (&device, DType::I32));
/// let routing = Routing::given(experts, Tensor::from_data([[0.7, 0.3], [0.5, 0.5]], &device)); // or from `route_experts`
/// let (gate_up, down) = (Tensor::<3>::ones([3, 2 * 4, 8], &device), Tensor::<3>::zeros([3, 8, 4], &device));
/// let args = ExpertsMlpArgs::new(x, routing, gate_up, down);
/// let y = experts_mlp(args, &ExpertsMlpOptions::default())?.materialise();
/// assert_eq!(y.dims(), [2, 8]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, a limit that is not above 0, or more than the device can do.
pub fn experts_mlp(args: ExpertsMlpArgs, options: &ExpertsMlpOptions) -> Result<ExpertsSum, MlaError> {
    args.check(options)?;
    Ok(ExpertsSum::new(args, *options))
}
