//! Shuffles and votes of whole planes, in kernels that run on every device. All units of a plane call them.
//!
//! On CUDA, CubeCL's `plane_*` take `__activemask()`: units that have not come back from a branch are left out, and nothing says so.
//! There these functions name all units of the warp ([`crate::ptx::warp`]). WGSL has no masks: it asks for uniform control flow.

use cubecl::features::Plane;
use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use crate::ptx::warp;

/// Units of a plane, if all planes have as many and units are in the order of their planes; otherwise 1.
pub(crate) fn units(device: &DeviceProperties) -> usize {
    let (least, most) = (device.hardware.plane_size_min as usize, device.hardware.plane_size_max as usize);
    let usable = device.features.plane.contains(Plane::Ops) && least == most && least.is_power_of_two();
    if usable { least } else { 1 }
}

/// Whether the kernel becomes PTX. Then some planes of a cube may shuffle while others do something else.
#[cube]
pub(crate) fn is_ptx() -> comptime_type!(bool) {
    let device = comptime::device_properties();
    comptime!(cfg!(feature = "cuda") && device.identity.fingerprint.starts_with("ptx"))
}

/// The value of a unit of the plane.
#[cube]
pub(crate) fn shuffle<T: CubePrimitive>(value: T, unit: u32) -> T {
    let ptx = is_ptx().comptime();
    if comptime!(ptx) { warp::shuffle::<T>(value, unit) } else { plane_shuffle(value, unit) }
}

/// The value of the unit whose number differs in these bits.
#[cube]
pub(crate) fn shuffle_xor<T: CubePrimitive>(value: T, #[comptime] bits: u32) -> T {
    let ptx = is_ptx().comptime();
    if comptime!(ptx) {
        warp::shuffle_xor::<T>(value, bits)
    } else {
        plane_shuffle_xor(value, comptime!(bits).runtime())
    }
}

/// The value of the unit `distance` before this one; for the first ones any value.
#[cube]
pub(crate) fn shuffle_up<T: CubePrimitive>(value: T, #[comptime] distance: u32) -> T {
    let ptx = is_ptx().comptime();
    if comptime!(ptx) {
        warp::shuffle_up::<T>(value, distance)
    } else {
        plane_shuffle_up(value, comptime!(distance).runtime())
    }
}

/// Whether any unit says so.
#[cube]
pub(crate) fn any(yes: bool) -> bool {
    let ptx = is_ptx().comptime();
    if comptime!(ptx) { warp::any(yes) } else { plane_any(yes) }
}

/// A bit for each unit of a plane of at most 32 that says so.
#[cube]
pub(crate) fn ballot(yes: bool) -> u32 {
    let ptx = is_ptx().comptime();
    if comptime!(ptx) { warp::ballot(yes) } else { plane_ballot(yes).extract(0usize) }
}

/// In place of the instructions, which no device of this build has.
#[cfg(not(feature = "cuda"))]
mod warp {
    use cubecl::prelude::*;

    #[cube]
    pub(super) fn shuffle<T: CubePrimitive>(value: T, unit: u32) -> T {
        plane_shuffle(value, unit)
    }

    #[cube]
    pub(super) fn shuffle_xor<T: CubePrimitive>(value: T, #[comptime] bits: u32) -> T {
        plane_shuffle_xor(value, comptime!(bits).runtime())
    }

    #[cube]
    pub(super) fn shuffle_up<T: CubePrimitive>(value: T, #[comptime] distance: u32) -> T {
        plane_shuffle_up(value, comptime!(distance).runtime())
    }

    #[cube]
    pub(super) fn any(yes: bool) -> bool {
        plane_any(yes)
    }

    #[cube]
    pub(super) fn ballot(yes: bool) -> u32 {
        plane_ballot(yes).extract(0usize)
    }
}
