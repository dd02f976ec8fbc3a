//! [`capture`]: a computation that is recorded once and replayed.

use std::panic::{self, AssertUnwindSafe};

use burn::tensor::{Device, Graph};

use crate::compile_ahead::on_device_thread;

/// Burn's [`capture`](burn::tensor::capture) on the device's own thread. `None` on the CPU and under Fusion. What cannot be recorded
/// is a graph without [hardware](Graph::is_hardware).
///
/// While a computation is recorded no memory can be had from the device: each buffer has to fit where one was in the runs before.
/// From another thread that is not certain. How early a buffer is free again, and whether it has a second handle, so that Burn does
/// not write in place, depend on how far the device's thread is behind, and it is less so while it records than while it
/// launches. On that thread itself every call is done before the next one is made: each run makes and frees the same buffers in
/// the same order.
///
/// Other threads that use the device wait meanwhile, so `step` must not wait for them.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::capture;
///
/// let device = Device::flex();
/// let x = Tensor::<1>::ones([4], &device);
/// let mut step = || x.clone() * 2.0;
/// let out = match capture(&device, &mut step) {
///     // SAFETY: `x` lives, and nobody else uses what the step reads and writes.
///     Some(mut graph) if graph.is_hardware() => unsafe { graph.replay() }.clone(),
///     // The CPU has no graphs: the step is launched.
///     _ => step(),
/// };
/// assert_eq!(out.max().into_scalar::<f32>(), 2.0);
/// ```
///
/// # Panics
/// Where `step` does.
pub fn capture<T: Send, F: FnMut() -> T + Send>(device: &Device, step: F) -> Option<Graph<T, F>> {
    if cfg!(feature = "fusion") {
        return None;
    }
    let mut graph = None;
    let run = || graph = Some(panic::catch_unwind(AssertUnwindSafe(|| burn::tensor::capture(device, step))));
    on_device_thread(device, run)?;
    // The thread that asked for the graph panics, not the device's.
    graph.map(|graph| graph.unwrap_or_else(|payload| panic::resume_unwind(payload)))
}
