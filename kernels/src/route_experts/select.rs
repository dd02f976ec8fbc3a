//! How many units count the experts of a token.

use super::RouteForm;

/// Units of a cube at most. Every runtime has this many.
const MAX_UNITS: usize = 256;
/// Units of a cube at least: a plane of most devices.
const MIN_UNITS: usize = 32;

/// Units of a cube.
pub(super) fn units(form: &RouteForm) -> usize {
    form.experts.next_power_of_two().clamp(MIN_UNITS, MAX_UNITS)
}
