//! Shuffles and votes (PTX ISA 9.7.9.6, 9.7.13.6).
use crate::edit::altered;
use crate::site::{Change, Site};

/// The lane, the bounds and the members of a shuffle; the members of a vote.
pub(super) fn warps(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let members = ("members^1", ("xor.b32", 1));
    let lane = ("another lane", ("xor.b32", 1));
    // Another distance could be as good: with all distances of a butterfly, every lane is reached.
    let own = ("its own lane", ("and.b32", 0));
    let bounds = ("bounds^31", ("xor.b32", 31));
    let places = match parts {
        ["shfl", "sync", "idx", ..] => vec![(2, lane), (3, bounds), (4, members)],
        ["shfl", "sync", ..] => vec![(2, own), (3, bounds), (4, members)],
        ["vote" | "redux" | "match", ..] => vec![(2, members)],
        _ => return,
    };
    let operator = if parts[0] == "shfl" { "shuffle" } else { "vote" };
    for (operand, (change, alteration)) in places {
        let with = altered(site.instr(), alteration, |i| i.operands.get_mut(operand));
        changes.extend(with.map(|with| site.replaced(operator, change, with)));
    }
}
