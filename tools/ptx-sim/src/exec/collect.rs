//! What the lanes of a mask make of their values together: `redux.sync`, `match.sync` (PTX ISA 9.7.13).
use super::registers::LANES;
use super::warp::Warp;
use crate::ir::{Atom, PredSlot, Slot};

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |l| mask >> l & 1 == 1)
}

pub(super) fn redux(warp: &mut Warp, mask: u32, (op, signed): (Atom, bool), dst: Slot, a: Slot) {
    let row = *warp.regs.row(a);
    let number = |x: u64| if signed { i64::from(x as i32) } else { i64::from(x as u32) };
    let all = lanes(mask).map(|l| row[l]).reduce(|x, y| match op {
        Atom::Min => {
            if number(y) < number(x) {
                y
            } else {
                x
            }
        }
        Atom::Max => {
            if number(y) > number(x) {
                y
            } else {
                x
            }
        }
        Atom::And => x & y,
        Atom::Or => x | y,
        Atom::Xor => x ^ y,
        _ => u64::from((x as u32).wrapping_add(y as u32)),
    });
    warp.regs.map(mask, dst, dst, |_| all.unwrap_or(0));
}

/// The lanes with the same value; of `.all` only if it is everybody's.
pub(super) fn matching(warp: &mut Warp, mask: u32, all: bool, (dst, pred): (Slot, Option<PredSlot>), a: Slot) {
    let row = *warp.regs.row(a);
    let same = |l: usize| lanes(mask).filter(|&m| row[m] == row[l]).fold(0u32, |lanes, m| lanes | 1 << m);
    let everybody = lanes(mask).all(|l| same(l) == mask);
    warp.regs.map_lanes(mask, dst, dst, dst, |l, _, _| u64::from(if all && !everybody { 0 } else { same(l) }));
    if let Some(pred) = pred {
        warp.regs.set_pred(mask, pred, if everybody { u32::MAX } else { 0 });
    }
}
