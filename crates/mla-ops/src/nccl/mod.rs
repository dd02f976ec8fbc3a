//! NCCL, which sums large tensors over several NVIDIA GPUs.

#[cfg(feature = "cuda")]
mod cuda;

#[cfg(feature = "cuda")]
pub use self::cuda::{find_nccl, nccl_all_reduce};

/// Looks for NCCL, which builds without the feature `cuda` have no use for.
///
/// ```
/// // Without it, sums of several GPUs go through their memory alone.
/// if let Err(reason) = mla_ops::find_nccl() {
///     println!("{reason}");
/// }
/// ```
///
/// # Errors
/// [`MlaError::UnsupportedDevice`](crate::MlaError::UnsupportedDevice), always.
#[cfg(not(feature = "cuda"))]
pub fn find_nccl() -> Result<(), crate::MlaError> {
    let reason = "this build has no cuda backend; build it with the feature `cuda` of burn-mla".into();
    Err(crate::MlaError::UnsupportedDevice { op: "all_reduce", device: "cuda".into(), reason })
}
