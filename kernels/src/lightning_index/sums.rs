//! Sums over the units of a cube.

use cubecl::prelude::*;

use super::form::Form;
use crate::common::plane;
use crate::common::scan::sum_before;

/// Numbers for each unit of a cube that shared memory holds.
pub(super) const FEW: usize = 2;
/// The unit of the upper one of two sums in a number. A cube has at most 2^15 keys.
pub(super) const UPPER: u32 = 1 << 16;

/// Shared memory of a cube.
#[derive(CubeType)]
pub(super) struct Space {
    /// Three numbers for each plane.
    pub sums: Shared<[u32]>,
    /// `FEW` numbers for each unit.
    pub few: Shared<[u32]>,
    /// Some keys of each unit, a bit for each. A unit reads only its own, but compilers do not know what it reads: they would
    /// keep a register for each bit where one for all is enough.
    pub keys: Shared<[u32]>,
}

/// Bytes of [`Space`] for each unit at most.
pub(super) const BYTES_PER_UNIT: usize = (3 + FEW + 1) * size_of::<u32>();

#[cube]
impl Space {
    pub fn new(#[comptime] form: Form) -> Space {
        Space {
            sums: Shared::new_slice(comptime!(3 * form.planes())),
            few: Shared::new_slice(comptime!(FEW * form.units)),
            keys: Shared::new_slice(form.units),
        }
    }
}

/// How many units of a plane say so.
#[cube]
pub(super) fn plane_count(yes: bool, #[comptime] form: Form) -> u32 {
    let mut count = u32::cast_from(yes);
    if comptime!(form.plane > 1) {
        // A plane has at most 32 units.
        count = plane::ballot(yes).count_ones();
    }
    count
}

#[cube]
pub(super) fn over_plane(value: u32, #[comptime] form: Form) -> u32 {
    let mut all = value;
    #[unroll]
    for i in 0..comptime!(form.plane.ilog2()) {
        all += plane::shuffle_xor::<u32>(all, comptime!(1u32 << i));
    }
    all
}

/// The sum over the units of a plane up to this one. Without the loop that CubeCL makes of it.
#[cube]
pub(super) fn through_plane(value: u32, #[comptime] form: Form) -> u32 {
    let lane = UNIT_POS % form.plane as u32;
    let mut through = value;
    #[unroll]
    for i in 0..comptime!(form.plane.ilog2()) {
        let distance = comptime!(1u32 << i);
        let other = plane::shuffle_up::<u32>(through, distance);
        through += select(lane >= distance, other, 0u32);
    }
    through
}

/// The sum over the planes of a cube. Calls take turns with 0 and 1, so that none writes what another still reads.
#[cube]
pub(super) fn over_cube(sums: &mut Shared<[u32]>, of_plane: u32, turn: usize, #[comptime] form: Form) -> u32 {
    let planes = comptime!(form.planes());
    let unit = UNIT_POS as usize;
    let lane = unit % form.plane;
    let first = turn * planes;
    if lane == 0 {
        sums[first + unit / form.plane] = of_plane;
    }
    sync_cube();
    let mut all = 0u32;
    if comptime!(form.plane > 1) {
        #[unroll]
        for i in 0..comptime!(planes.div_ceil(form.plane)) {
            let at = lane + comptime!(i * form.plane);
            if at < planes {
                all += sums[first + at];
            }
        }
        all = over_plane(all, form);
    } else {
        let mut distance = comptime!(form.units / 2).runtime();
        while distance > 0 {
            if unit < distance {
                sums[first + unit] += sums[first + unit + distance];
            }
            sync_cube();
            distance /= 2;
        }
        all = sums[first];
    }
    all
}

/// Sums over planes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sums {
    /// Those before this one.
    pub before: u32,
    /// All.
    pub all: u32,
}

/// The sums over the planes before this one and over all, of numbers whose sum is smaller than 2^16.
#[cube]
pub(super) fn before_plane(sums: &mut Shared<[u32]>, of_plane: u32, #[comptime] form: Form) -> Sums {
    let mut both = 0u32;
    if comptime!(form.plane > 1) {
        let planes = comptime!(form.planes());
        // Not where sums over the cube are, which another plane may still read.
        let first = comptime!(2 * form.planes());
        let lane = UNIT_POS as usize % form.plane;
        let plane = UNIT_POS as usize / form.plane;
        if lane == 0 {
            sums[first + plane] = of_plane;
        }
        sync_cube();
        #[unroll]
        for i in 0..comptime!(planes.div_ceil(form.plane)) {
            let at = lane + comptime!(i * form.plane);
            if at < planes {
                let sum = sums[first + at];
                both += sum * UPPER + select(at < plane, sum, 0u32);
            }
        }
        both = over_plane(both, form);
    } else {
        sync_cube();
        both = sum_before(sums, of_plane, form.units);
        both += sums[comptime!(form.units - 1)] * UPPER;
    }
    sync_cube();
    Sums { before: both % UPPER, all: both / UPPER }
}
