//! Shuffles and votes (PTX ISA 9.7.9.6, 9.7.13.6).
use crate::edit::altered;
use crate::mutant::{Change, Site};

/// The lane, the bounds and the members of a shuffle; the members of a vote.
pub(super) fn warps(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let places: &[(&str, usize)] = match parts {
        ["shfl", "sync", ..] => &[("lane^1", 2), ("bounds^1", 3), ("members^1", 4)],
        ["vote" | "redux" | "match", ..] => &[("members^1", 2)],
        _ => return,
    };
    let operator = if parts[0] == "shfl" { "shuffle" } else { "vote" };
    for (change, operand) in places {
        let with = altered(site.instr(), ("xor.b32", 1), |i| i.operands.get_mut(*operand));
        changes.extend(with.map(|with| site.replaced(operator, *change, with)));
    }
}
