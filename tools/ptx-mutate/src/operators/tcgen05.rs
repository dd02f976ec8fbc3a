//! Tensor memory: its columns, addresses in it, and who hears of completed operations (PTX ISA 9.7.16.7, 9.7.16.8,
//! 9.7.16.12).
use super::tensors;
use crate::edit::altered;
use crate::site::{Change, Site};
use ptx_sim::Operand;

/// A column and a lane further, as addresses of tensor memory count them.
const NEIGHBOURS: [(&str, u64); 2] = [("next column", 1), ("16 lanes on", 16 << 16)];

/// Changes of `tcgen05` other than fences, waits and descriptors.
pub(super) fn tensor_memory(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    match parts {
        ["tcgen05", "alloc", ..] => columns(site, changes),
        ["tcgen05", "dealloc", ..] => {
            changes.push(site.removed("allocation"));
            columns(site, changes);
        }
        ["tcgen05", "relinquish_alloc_permit", ..] => changes.push(site.removed("allocation")),
        ["tcgen05", "commit", ..] => {
            changes.extend(tensors::signal(site));
            for bit in [1, 2] {
                let with = tensors::multicast(instr, parts, bit);
                changes.extend(with.map(|with| site.replaced("multicast", format!("mask^{bit}"), with)));
            }
        }
        ["tcgen05", "ld" | "st" | "mma" | "cp", ..] => addresses(site, changes),
        _ => {}
    }
}

/// Half and twice as many columns.
fn columns(site: &Site, changes: &mut Vec<Change>) {
    let instr = site.instr();
    let Some(Operand::Int(columns)) = instr.operands.get(1) else { return };
    for columns in [columns / 2, columns * 2] {
        let mut with = instr.clone();
        with.operands[1] = Operand::Int(columns);
        changes.push(site.replaced("columns", format!("to {columns}"), vec![with]));
    }
}

/// Every address of tensor memory that an instruction has, moved.
fn addresses(site: &Site, changes: &mut Vec<Change>) {
    let instr = site.instr();
    let places = (0..instr.operands.len()).filter(|i| matches!(instr.operands[*i], Operand::Address { .. }));
    for (which, place) in places.enumerate() {
        for (change, distance) in NEIGHBOURS {
            let with = altered(instr, ("add.s32", distance), |i| match &mut i.operands[place] {
                Operand::Address { base, .. } => Some(base),
                _ => None,
            });
            let change = if which == 0 { change.to_string() } else { format!("{change}, A") };
            changes.extend(with.map(|with| site.replaced("tensor_address", change, with)));
        }
    }
}
