//! The gated activation behind two products.

use cubecl::prelude::*;

/// `silu(gate) * up`.
#[cube]
pub(crate) fn gated(gate: f32, up: f32, limit: f32, #[comptime] limited: bool) -> f32 {
    let mut gate = gate;
    let mut up = up;
    if comptime!(limited) {
        // Comparisons, unlike minima, let what is not a number through.
        gate = select(gate > limit, limit, gate);
        up = select(up > limit, limit, select(up < -limit, -limit, up));
    }
    gate / (1.0 + (-gate).exp()) * up
}
