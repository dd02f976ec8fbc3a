//! Addresses: their spaces, their alignment, and whose they are.
use super::shared::rank_and_offset;
use super::warp::Warp;
use crate::error::Fault;
use crate::ir::{Addr, Int, Space, Ty};
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};

/// Bytes of a value.
pub(super) fn size(ty: Ty) -> u64 {
    match ty {
        Ty::U8 | Ty::S8 => 1,
        Ty::Int(Int::U16 | Int::S16) | Ty::F16 | Ty::Bf16 => 2,
        Ty::Int(Int::U32 | Int::S32) | Ty::F32 => 4,
        Ty::Int(Int::U64 | Int::S64) | Ty::F64 => 8,
    }
}

/// The space of an address and the address in it.
pub(super) fn resolve(space: Space, address: u64) -> (Space, u64) {
    match space {
        Space::Generic if address >> 44 == PARAM_WINDOW >> 44 => (Space::Param, address - PARAM_WINDOW),
        Space::Generic if address >> 44 == SHARED_WINDOW >> 44 => (Space::Cluster, address - SHARED_WINDOW),
        Space::Generic if address >> 44 == LOCAL_WINDOW >> 44 => (Space::Local, address - LOCAL_WINDOW),
        Space::Generic => (Space::Global, address),
        other => (other, address),
    }
}

/// An address of `.shared::cta` is one of the CTA itself.
pub(super) fn own(warp: &Warp, space: Space, access: &str, address: u64, bytes: u64) -> Result<(), Fault> {
    if space != Space::Shared || rank_and_offset(address).0 == warp.rank {
        return Ok(());
    }
    let nearest = format!("it is not in the shared memory of CTA {} of the cluster itself", warp.rank);
    Err(Fault::OutOfBounds { access: access.to_string(), address, bytes, nearest })
}

pub(super) fn aligned(access: &str, address: u64, bytes: u64) -> Result<(), Fault> {
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    Err(Fault::Misaligned { access: access.to_string(), address, bytes })
}

/// The address that a lane gives.
pub(super) fn address(warp: &Warp, addr: Addr, lane: usize) -> u64 {
    warp.regs.row(addr.base)[lane].wrapping_add(addr.offset)
}

/// A shared address, given as one of the shared or of the generic space.
pub(super) fn shared_address(address: u64) -> u64 {
    if address >> 44 == SHARED_WINDOW >> 44 { address - SHARED_WINDOW } else { address }
}
