//! Bulk and tensor copies, clusters, registers of a warp group (PTX ISA 9.7.9.25 to 9.7.9.27, 9.7.9.24, 9.7.19.5).
use crate::edit::{altered, beside, name};
use crate::site::{Change, Site};
use ptx_sim::{Instr, Operand};

/// The address operands of an instruction, in order.
fn addresses(instr: &mut Instr) -> impl Iterator<Item = &mut Operand> {
    instr.operands.iter_mut().filter(|o| matches!(o, Operand::Address { .. }))
}

/// Coordinates, the barrier and the bytes of a copy, what of it is padding.
pub(super) fn copies(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    if !matches!(parts, ["cp", "async", ..]) {
        return;
    }
    if !parts.contains(&"bulk") {
        // `[shared], [global], 16, bytes`: without the last, nothing is filled with zeros.
        if instr.operands.len() == 4 && instr.operands[2] != instr.operands[3] {
            let whole = Instr { operands: instr.operands[..3].to_vec(), ..instr.clone() };
            changes.push(site.replaced("zero_fill", "lost", vec![whole]));
        }
        return;
    }
    for axis in 0..coordinates(instr) {
        let with = altered(instr, ("add.s32", 1), |i| {
            addresses(i).find_map(|a| match a {
                Operand::Address { coords, .. } => coords.get_mut(axis),
                _ => None,
            })
        });
        changes.extend(with.map(|with| site.replaced("coordinate", format!("{axis} + 1"), with)));
    }
    if parts.iter().any(|p| p.starts_with("mbarrier::")) {
        changes.extend(signal(site));
    }
    if let Some(with) = multicast(instr, parts, 1) {
        changes.push(site.replaced("multicast", "mask^1", with));
    }
    // The first address that is no tensor: shared memory.
    let mut moved = instr.clone();
    let shared = addresses(&mut moved).find_map(|a| match a {
        Operand::Address { offset, coords, .. } if coords.is_empty() => Some(offset),
        _ => None,
    });
    if let Some(offset) = shared {
        *offset += 128;
        changes.push(site.replaced("shared_address", "+128", vec![moved]));
    }
}

/// Another mbarrier: it is the last address of what signals one.
pub(super) fn signal(site: &Site) -> Option<Change> {
    let mut moved = site.instr().clone();
    let Some(Operand::Address { offset, .. }) = addresses(&mut moved).last() else { return None };
    *offset += 8;
    Some(site.replaced("signal", "next mbarrier", vec![moved]))
}

fn coordinates(instr: &Instr) -> usize {
    let of = |o: &Operand| match o {
        Operand::Address { coords, .. } => coords.len(),
        _ => 0,
    };
    instr.operands.iter().map(of).max().unwrap_or(0)
}

/// Flips a bit of the CTA mask, which comes behind the last address.
pub(super) fn multicast(instr: &Instr, parts: &[&str], bit: u64) -> Option<Vec<Instr>> {
    if !parts.contains(&"multicast::cluster") {
        return None;
    }
    let last = instr.operands.iter().rposition(|o| matches!(o, Operand::Address { .. }))?;
    match instr.operands.get(last + 1)? {
        Operand::Int(mask) => {
            let mut with = instr.clone();
            with.operands[last + 1] = Operand::Int(mask ^ bit);
            Some(vec![with])
        }
        // A register of 16 bits is altered in itself: masks are not used for anything else.
        Operand::Name(register) => {
            let flip = beside(instr, "xor.b16", vec![name(register), name(register), Operand::Int(bit)]);
            Some(vec![flip, instr.clone()])
        }
        _ => None,
    }
}

fn is_rank(instr: &Instr) -> bool {
    matches!(instr.operands.get(1), Some(Operand::Name(n)) if matches!(n.as_str(), "%cluster_ctarank" | "%cluster_ctaid.x"))
}

/// Ranks of a cluster, `setmaxnreg`.
pub(super) fn clusters(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    match parts {
        // Where a CTA reads its place in the cluster.
        ["mov", ..] if is_rank(instr) => {
            let flip =
                beside(instr, "xor.b32", vec![instr.operands[0].clone(), instr.operands[0].clone(), Operand::Int(1)]);
            changes.push(site.replaced("rank", "^1", vec![instr.clone(), flip]));
        }
        ["mapa", ..] => {
            let with = altered(instr, ("xor.b32", 1), |i| i.operands.get_mut(2));
            changes.extend(with.map(|with| site.replaced("rank", "^1", with)));
        }
        ["setmaxnreg", ..] => {
            changes.push(site.removed("setmaxnreg"));
            if let [Operand::Int(registers)] = instr.operands[..] {
                for registers in [registers - 8, registers + 8] {
                    let with = Instr { operands: vec![Operand::Int(registers)], ..instr.clone() };
                    changes.push(site.replaced("setmaxnreg", format!("to {registers}"), vec![with]));
                }
            }
        }
        _ => {}
    }
}
