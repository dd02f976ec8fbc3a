//! Independent pieces of work on one device.

use burn::tensor::Device;
use rayon::prelude::*;

/// Multiply-adds of a piece from which on waking another thread pays: some ten microseconds.
const WORK_PER_THREAD: usize = 1 << 18;

/// Maps pieces that do not depend on one another, of `work` multiply-adds together: side by side on the CPU, whose
/// tensor operations are serial for small tensors; one after the other on a GPU, which has its own queue, or where the
/// pieces are too small.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::map_independent;
///
/// let device = Device::flex();
/// let sums = map_independent(&device, 1 << 20, vec![1.0, 2.0], |value| {
///     Tensor::<1>::full([4], value, &device).sum().into_scalar::<f32>()
/// });
/// assert_eq!(sums, [4.0, 8.0]);
/// ```
pub fn map_independent<I: Send, T: Send>(
    device: &Device,
    work: usize,
    pieces: Vec<I>,
    map: impl Fn(I) -> T + Send + Sync,
) -> Vec<T> {
    if pieces.len() > 1 && work / pieces.len() >= WORK_PER_THREAD && is_flex(device) {
        pieces.into_par_iter().map(map).collect()
    } else {
        pieces.into_iter().map(map).collect()
    }
}

/// How many of `items`, of `work` multiply-adds together, make a piece for [`map_independent`]: as few as pay.
#[cfg(feature = "flex")]
pub(crate) fn piece_len(items: usize, work: usize) -> usize {
    items.div_ceil((work / WORK_PER_THREAD).max(1)).max(1)
}

/// Whether the device is Burn's CPU backend.
pub(crate) fn is_flex(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_)) {
        return true;
    }
    let _ = device;
    false
}
