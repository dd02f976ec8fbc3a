//! [`route_experts`]: which experts each token gets, and their weights.

mod args;
mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;
mod logits;
#[cfg(feature = "flex")]
mod reference;
mod routing;

pub(crate) use self::args::MAX_EXPERTS;
pub use self::args::{ExpertChoice, ExpertGroups, ExpertScoring, LocalExperts, RouteExpertsArgs, RouteExpertsOptions};
pub(crate) use self::backend::*;
pub use self::logits::RouterLogits;
pub use self::routing::Routing;
use crate::MlaError;

/// Chooses the experts of each token, and their weights; in f32, on the device.
///
/// Of two that are as good, the lower number is the better one; NaN is the worst. Nothing is launched before the [`Routing`] is
/// read: a single token may choose in the launch of its experts' first projection.
///
/// Sources: DeepSeek-V2 §2.2 (softmax, groups by their best expert), DeepSeek-V3 §2.1.2 (sigmoid, a bias for the choice alone,
/// groups by their two best).
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use mla_ops::{ExpertChoice, ExpertScoring, RouteExpertsArgs, RouteExpertsOptions, route_experts};
///
/// // Two experts of four, by their sigmoids; their weights add up to 2.5.
/// let logits = Tensor::<2>::from_data([[0.0, 2.0, -1.0, 2.0]], &Device::flex());
/// let args = RouteExpertsArgs { logits: logits.into(), choice: ExpertChoice::Scores(2), slots: None };
/// let options = RouteExpertsOptions { normalise: true, scale: 2.5, ..RouteExpertsOptions::new(ExpertScoring::Sigmoid) };
/// let (experts, weights) = route_experts(args, &options)?.materialise();
/// assert_eq!(experts.into_data(), TensorData::from([[1, 3]]));
/// assert!((weights.max().into_scalar::<f32>() - 1.25).abs() < 1e-6);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices; groups that do not divide the experts or keep fewer than `k`; local experts that there are
/// not; more than 1024 experts; a scale that is not finite.
pub fn route_experts(args: RouteExpertsArgs, options: &RouteExpertsOptions) -> Result<Routing, MlaError> {
    args.check(options)?;
    Ok(Routing::chosen_from(args, *options))
}
