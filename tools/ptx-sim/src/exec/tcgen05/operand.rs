//! Operands that all lanes of a warp must agree on.
use super::tmem::Place;
use crate::exec::registers::{LANES, LaneResult, lanes};
use crate::exec::warp::Warp;
use crate::ir::Slot;

/// An operand that all lanes must agree on, for instance an address.
pub(super) fn uniform(warp: &Warp, slot: Slot, offset: u64, mask: u32) -> LaneResult<u32> {
    let row = warp.regs.row(slot);
    let first = row[(mask.trailing_zeros() as usize).min(LANES - 1)];
    match lanes(mask).find(|l| row[*l] != first) {
        None => Ok(first.wrapping_add(offset) as u32),
        Some(l) => {
            let problem = format!("the lanes of the warp give different operands, {first:#x} and {:#x}", row[l]);
            Err((Place::new(first as u32).fault(problem), 1 << l))
        }
    }
}
