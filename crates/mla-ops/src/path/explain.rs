//! [`explain_path`] and [`available_paths`].

#[cfg(feature = "_gpu")]
use burn::backend::DispatchDevice;
use burn::tensor::Device;

use super::problem::{Implementation, Problem, could_be};
use super::{Path, PathChoice};
use crate::check::{FLOATS, supports, unsupported};
use crate::device::has_kernels;

/// Which implementation of an operation runs for a problem on a device, where the call's options name none, and why: the first of
/// [`available_paths`].
///
/// It reads the table that the operation's launch reads. Nothing is launched. Where the device has no implementation, the operation
/// refuses the call with an error, and the reason says so; the path is then the most general one of the device.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use mla_ops::{Path, RaggedAttentionProblem, available_paths, explain_path};
///
/// let problem = RaggedAttentionProblem {
///     heads: 128, kv_heads: 128, key_width: 192, value_width: 128, shared_width: 64, dtype: DType::BF16,
/// };
/// let choice = explain_path(&problem, &Device::flex());
/// println!("{}: {}", choice.path, choice.reason);
/// assert_eq!(available_paths(&problem, &Device::flex()), [Path::Reference]);
/// ```
pub fn explain_path(problem: &impl Problem, device: &Device) -> PathChoice {
    let (words, found) = (problem.words(), implementations(problem, device));
    let Some(&Implementation { path, needs }) = found.first() else {
        let path = if has_kernels(device) { Path::Portable } else { Path::Reference };
        return PathChoice { path, reason: format!("refused, for {device:?} has no implementation for {words}") };
    };
    let names: Vec<String> = found.iter().map(|it| it.path.to_string()).collect();
    let rank = if names.len() == 1 { "the only one".into() } else { format!("the fastest of {}", names.join(", ")) };
    PathChoice { path, reason: format!("{rank} that {device:?} has for {words}; it needs {needs}") }
}

/// The implementations of an operation that a device has for a problem, the fastest first; none where the operation refuses it:
/// a dtype other than f32, f16 and bf16, or one that the device does not compute with, a device without these operations, sizes
/// that the device has no room for.
pub fn available_paths(problem: &impl Problem, device: &Device) -> Vec<Path> {
    implementations(problem, device).into_iter().map(|it| it.path).collect()
}

fn implementations(problem: &impl Problem, device: &Device) -> Vec<Implementation> {
    let computes = |&dtype: &_| FLOATS.contains(&dtype) && supports(device, dtype);
    if unsupported(device).is_some() || !problem.dtypes().iter().all(computes) || !could_be(&problem.shapes()) {
        return Vec::new();
    }
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(device) = device.as_dispatch() {
        return problem.on_gpu(&device.client());
    }
    vec![Implementation::REFERENCE]
}
