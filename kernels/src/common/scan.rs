//! Sums over the units of a cube.

use cubecl::prelude::*;

/// The sum of `own` over the units before this one, of `units` units with consecutive `UNIT_POS` (Hillis and Steele). Called by
/// all units of a cube.
///
/// `scratch` has an entry for each unit. Its last one is the sum over all of them then; who reads it synchronises before the
/// next call.
#[cube]
pub(crate) fn sum_before(scratch: &mut Shared<[u32]>, own: u32, #[comptime] units: usize) -> u32 {
    let unit = UNIT_POS as usize;
    scratch[unit] = own;
    sync_cube();
    let mut distance = 1usize.runtime();
    while distance < units {
        let mut other = 0u32;
        if unit >= distance {
            other = scratch[unit - distance];
        }
        sync_cube();
        scratch[unit] += other;
        sync_cube();
        distance *= 2;
    }
    scratch[unit] - own
}
