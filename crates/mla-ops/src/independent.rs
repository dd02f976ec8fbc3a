//! Independent pieces of work on one device.

use burn::tensor::Device;
use rayon::prelude::*;

/// Rows of a piece from which on another thread is worth waking.
const ROWS_PER_THREAD: usize = 16;

/// Maps pieces that do not depend on one another, of `rows` rows together: side by side on the CPU, whose tensor
/// operations are serial for small tensors; one after the other on a GPU, which has its own queue, or where the pieces
/// are too small.
pub fn map_independent<I: Send, T: Send>(
    device: &Device,
    rows: usize,
    pieces: Vec<I>,
    map: impl Fn(I) -> T + Send + Sync,
) -> Vec<T> {
    if pieces.len() > 1 && rows >= ROWS_PER_THREAD * pieces.len() && is_flex(device) {
        pieces.into_par_iter().map(map).collect()
    } else {
        pieces.into_iter().map(map).collect()
    }
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
