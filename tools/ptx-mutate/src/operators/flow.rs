//! Where a register's value comes from.
use ptx_sim::{Entry, Instr, Operand};

/// The block that declares a register which an instruction names.
fn scope_of(entry: &Entry, instr: &Instr, name: &str) -> Option<usize> {
    let mut scope = Some(instr.scope);
    while let Some(s) = scope {
        if entry.scopes[s].registers.contains_key(name) {
            return Some(s);
        }
        scope = entry.scopes[s].parent;
    }
    None
}

/// The instructions that define a register: the nearest one above in the same block, else all.
fn definitions(entry: &Entry, at: usize, name: &str) -> Vec<usize> {
    let user = &entry.instrs[at];
    let Some(scope) = scope_of(entry, user, name) else { return Vec::new() };
    let defines = |i: &usize| {
        let instr = &entry.instrs[*i];
        matches!(instr.operands.first(), Some(Operand::Name(n)) if n == name)
            && scope_of(entry, instr, name) == Some(scope)
    };
    let near = (0..at).rev().take_while(|i| entry.instrs[*i].scope == user.scope).find(defines);
    near.map_or_else(|| (0..entry.instrs.len()).filter(defines).collect(), |i| vec![i])
}

/// Instructions with a constant that a register's value is made of, through moves, sums and bits.
pub(super) fn constants(entry: &Entry, at: usize, name: &str) -> Vec<usize> {
    let (mut todo, mut seen, mut found) = (vec![(at, name.to_string())], vec![], vec![]);
    while let Some((at, name)) = todo.pop() {
        for definition in definitions(entry, at, &name) {
            if seen.contains(&definition) {
                continue;
            }
            seen.push(definition);
            let instr = &entry.instrs[definition];
            let family = instr.opcode.split('.').next().unwrap_or_default();
            if !matches!(family, "mov" | "add" | "or" | "and" | "xor" | "cvt" | "shl" | "selp") {
                continue;
            }
            for operand in &instr.operands[1..] {
                match operand {
                    Operand::Int(_) if family != "and" && family != "shl" => found.push(definition),
                    Operand::Name(source) => todo.push((definition, source.clone())),
                    Operand::Vector(parts) => {
                        let names = parts.iter().filter_map(|p| if let Operand::Name(n) = p { Some(n) } else { None });
                        todo.extend(names.map(|n| (definition, n.clone())));
                    }
                    _ => {}
                }
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}
