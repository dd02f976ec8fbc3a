//! Comparisons, guards and branches (PTX ISA 9.7.6, 9.7.12, 9.7.1 `min`, `max`).
use crate::edit::beside;
use crate::site::{Change, Site};
use ptx_sim::{Instr, Operand};

/// The neighbour of a comparison: one value more or less.
fn neighbour(compare: &str) -> Option<&'static str> {
    Some(match compare {
        "lt" => "le",
        "le" => "lt",
        "gt" => "ge",
        "ge" => "gt",
        "lo" => "ls",
        "ls" => "lo",
        "hi" => "hs",
        "hs" => "hi",
        _ => return None,
    })
}

fn is_integer(ty: &str) -> bool {
    matches!(ty, "u16" | "s16" | "u32" | "s32" | "u64" | "s64" | "b16" | "b32" | "b64")
}

/// Integer comparisons, clamps, guards and branches.
pub(super) fn bounds(site: &Site, parts: &[&str], changes: &mut Vec<Change>) {
    let instr = site.instr();
    if let ["setp", compare, rest @ .., ty] = parts
        && is_integer(ty)
    {
        let modifiers: String = rest.iter().chain([ty]).map(|part| format!(".{part}")).collect();
        if let Some(other) = neighbour(compare) {
            changes.push(site.opcode("bound", &format!("setp.{other}{modifiers}")));
        } else if matches!(*compare, "eq" | "ne") && !constant(instr) {
            let other = if *compare == "eq" { "ne" } else { "eq" };
            changes.push(site.opcode("equality", &format!("setp.{other}{modifiers}")));
        }
    }
    if let ["min" | "max", ty] = parts
        && is_integer(ty)
    {
        let bits: String = ty.chars().filter(char::is_ascii_digit).collect();
        let first = beside(instr, &format!("mov.b{bits}"), instr.operands[..2].to_vec());
        let first = Instr { guard: instr.guard.clone(), ..first };
        changes.push(site.replaced("clamp", "the first operand", vec![first]));
    }
    if instr.guard.is_some() {
        match parts[0] {
            "bra" => changes.push(site.replaced("branch", "never taken", Vec::new())),
            _ => changes.push(site.replaced("guard", "lost", vec![Instr { guard: None, ..instr.clone() }])),
        }
    }
}

/// `setp.eq p, 0, 0`: how inline assembly makes a constant.
fn constant(instr: &Instr) -> bool {
    instr.operands[1..].iter().all(|o| matches!(o, Operand::Int(_)))
}
