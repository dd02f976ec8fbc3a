//! The gated activation behind two products.

use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use crate::ptx::math;

/// `silu(gate) * up`.
#[cube]
pub(crate) fn gated(gate: f32, up: f32, limit: f32, #[comptime] limited: bool) -> f32 {
    let (gate, up) = clamped(gate, up, limit, limited);
    gate / (1.0 + (-gate).exp()) * up
}

/// The same within 2^-17, for outputs in bf16 and f16: a division that rounds correctly has a branch, for which the outputs of a unit wait
/// one after the other. Small batches keep that: with all outputs' at once their kernel has too few registers.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn gated_fast(gate: f32, up: f32, limit: f32, #[comptime] limited: bool) -> f32 {
    let (gate, up) = clamped(gate, up, limit, limited);
    let inverse = math::reciprocal(1.0f32 + math::exp2(gate * comptime!(-std::f32::consts::LOG2_E)));
    gate * inverse * up
}

#[cube]
fn clamped(gate: f32, up: f32, limit: f32, #[comptime] limited: bool) -> (f32, f32) {
    let mut gate = gate;
    let mut up = up;
    if comptime!(limited) {
        // Comparisons, unlike minima, let what is not a number through.
        gate = select(gate > limit, limit, gate);
        up = select(up > limit, limit, select(up < -limit, -limit, up));
    }
    (gate, up)
}
