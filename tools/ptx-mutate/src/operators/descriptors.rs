//! Matrix instructions on shared memory: descriptors and modifiers (PTX ISA 9.7.15.5 `wgmma`, 9.7.16.10 `tcgen05.mma`).
use super::flow;
use crate::edit::altered;
use crate::site::{Change, Site};
use ptx_sim::{Entry, Instr, Operand};

/// Fields of a matrix descriptor in shared memory: name and lowest bit. Both generations have them at the same place.
const FIELDS: [(&str, u64); 4] = [("leading", 16), ("stride", 32), ("base", 49), ("swizzle", 62)];
/// Fields of an instruction descriptor of `tcgen05.mma` for 16-bit and 8-bit types: name and lowest bit.
const INSTRUCTION: [(&str, u64); 8] = [
    ("sparse", 2),
    ("type of D", 4),
    ("type of A", 7),
    ("type of B", 10),
    ("negate A", 13),
    ("transpose B", 16),
    ("N", 17),
    ("M", 24),
];

/// Operands of a matrix instruction that hold descriptors: of matrices, of the instruction.
fn descriptors(instr: &Instr, parts: &[&str]) -> (Vec<usize>, Option<usize>) {
    match parts {
        ["wgmma", "mma_async", ..] => ((1..=2).filter(|i| is_name(instr, *i)).collect(), None),
        ["tcgen05", "mma", ..] => ((1..=2).filter(|i| is_name(instr, *i)).collect(), Some(3)),
        _ => (Vec::new(), None),
    }
}

fn is_name(instr: &Instr, operand: usize) -> bool {
    matches!(instr.operands.get(operand), Some(Operand::Name(_)))
}

/// Descriptors and modifiers of a matrix instruction, or a constant that descriptors are made of.
pub(super) fn matrices(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    constants(site, changes);
    let instr = site.instr();
    let (matrices, instruction) = descriptors(instr, parts);
    for operand in matrices {
        let Operand::Name(name) = &instr.operands[operand] else { continue };
        let letter = if operand == 1 { "A" } else { "B" };
        let mut alter = |field: &str, bit: u64| {
            let with = altered(instr, ("xor.b64", 1 << bit), |i| i.operands.get_mut(operand));
            changes.extend(with.map(|with| site.replaced("descriptor", format!("{field} of {letter}"), with)));
        };
        alter("address", 0);
        // The other fields are changed once, where they are made, if that is in sight.
        if !flow::constants(site.entry, site.at, name).iter().any(|at| fields_of(&site.entry.instrs[*at]).is_some()) {
            FIELDS.iter().for_each(|(field, bit)| alter(field, *bit));
        }
    }
    if let Some(operand) = instruction {
        for (field, bit) in INSTRUCTION {
            let with = altered(instr, ("xor.b32", 1 << bit), |i| i.operands.get_mut(operand));
            changes.extend(with.map(|with| site.replaced("instruction_descriptor", field, with)));
        }
    }
    modifiers(site, parts, changes);
}

/// The last operands of `wgmma.mma_async`: whether D is added, signs and transpositions of A and B.
fn modifiers(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    match parts {
        ["wgmma", "mma_async", ..] => {
            let names: &[&str] = if is_name(instr, 1) {
                &["sign of A", "sign of B", "transpose A", "transpose B"]
            } else {
                &["sign of A", "sign of B", "transpose B"]
            };
            for (index, what) in names.iter().enumerate() {
                let Some(Operand::Int(old)) = instr.operands.get(4 + index) else { continue };
                let new = if what.starts_with("sign") { old.wrapping_neg() } else { old ^ 1 };
                let mut with = instr.clone();
                with.operands[4 + index] = Operand::Int(new);
                changes.push(site.replaced("matrix", format!("{what} changed"), vec![with]));
            }
            negated(site, 3, changes);
        }
        ["tcgen05", "mma", ..] => {
            let flag = (4..instr.operands.len()).find(|i| is_name(instr, *i));
            flag.into_iter().for_each(|flag| negated(site, flag, changes));
        }
        _ => {}
    }
}

/// The flag that says whether D is added.
fn negated(site: &Site, operand: usize, changes: &mut Vec<Change>) {
    let mut with = site.instr().clone();
    if let Some(flag @ Operand::Name(_)) = with.operands.get_mut(operand) {
        *flag = Operand::Not(Box::new(flag.clone()));
        changes.push(site.replaced("matrix", "adds D changed", vec![with]));
    }
}

/// The operand with a descriptor's fields: a constant that reaches beyond the address.
fn fields_of(instr: &Instr) -> Option<(usize, u64)> {
    let large = |(index, operand): (usize, &Operand)| match operand {
        Operand::Int(value) if *value >> 32 != 0 => Some((index, *value)),
        _ => None,
    };
    instr.operands.iter().enumerate().find_map(large)
}

/// Whether any matrix instruction's descriptor is made with this instruction's constant.
fn reaches_descriptor(entry: &Entry, at: usize) -> bool {
    entry.instrs.iter().enumerate().any(|(user, instr)| {
        let parts: Vec<&str> = instr.opcode.split('.').collect();
        let (matrices, _) = descriptors(instr, &parts);
        matrices.into_iter().any(|operand| match &instr.operands[operand] {
            Operand::Name(name) => flow::constants(entry, user, name).contains(&at),
            _ => false,
        })
    })
}

fn constants(site: &Site, changes: &mut Vec<Change>) {
    let instr = site.instr();
    let Some((operand, value)) = fields_of(instr) else { return };
    if !matches!(instr.opcode.split('.').next(), Some("mov" | "or" | "add" | "xor")) {
        return;
    }
    if !reaches_descriptor(site.entry, site.at) {
        return;
    }
    for (field, bit) in FIELDS {
        let mut with = instr.clone();
        with.operands[operand] = Operand::Int(value ^ 1 << bit);
        changes.push(site.replaced("descriptor", format!("{field} {value:#x}"), vec![with]));
    }
}
