//! Changes to the instructions of a kernel. PTX lines stay what they are: what is put in has the line of its neighbour.
use ptx_sim::{Entry, Instr, Module, Operand, RegType};

/// Registers that an edit may use; no kernel has them.
const REGISTERS: [(&str, RegType); 2] = [(WORD, RegType::Bits(32)), (LONG, RegType::Bits(64))];
/// A register of 32 bits.
pub const WORD: &str = "%mutant_word";
/// A register of 64 bits.
pub const LONG: &str = "%mutant_long";

/// An instruction and what stands in its place.
#[derive(Debug, Clone)]
pub struct Edit {
    /// Index of the instruction.
    pub at: usize,
    /// What replaces it; nothing removes it.
    pub with: Vec<Instr>,
}

/// The module with an edit in one of its kernels.
pub fn apply(module: &Module, entry: usize, edit: &Edit) -> Module {
    let mut module = module.clone();
    let Some(entry) = module.entries.get_mut(entry) else { return module };
    replace(entry, edit);
    module
}

fn replace(entry: &mut Entry, edit: &Edit) {
    for label in entry.scopes.iter_mut().flat_map(|scope| scope.labels.values_mut()) {
        // A label of the instruction itself leads to what replaces it.
        if *label > edit.at {
            *label = *label + edit.with.len() - 1;
        }
    }
    entry.instrs.splice(edit.at..=edit.at, edit.with.iter().cloned());
    if let Some(scope) = entry.scopes.first_mut() {
        scope.registers.extend(REGISTERS.map(|(name, ty)| (name.to_string(), ty)));
    }
}

/// An instruction with the place of another one.
pub fn beside(instr: &Instr, opcode: &str, operands: Vec<Operand>) -> Instr {
    Instr { guard: None, opcode: opcode.to_string(), operands, ..instr.clone() }
}

/// The name of a register as an operand.
pub fn name(name: &str) -> Operand {
    Operand::Name(name.to_string())
}

/// Puts `opcode value` between a source and its instruction: `operand` (of 32 or 64 bits) becomes `operand opcode value`.
/// `place` finds the operand in the instruction.
pub fn altered(
    instr: &Instr,
    (opcode, value): (&str, u64),
    place: impl Fn(&mut Instr) -> Option<&mut Operand>,
) -> Option<Vec<Instr>> {
    let mut changed = instr.clone();
    let operand = place(&mut changed)?;
    let register = if opcode.ends_with("64") { LONG } else { WORD };
    let source = std::mem::replace(operand, name(register));
    if !matches!(source, Operand::Name(_) | Operand::Int(_)) {
        return None;
    }
    let before = beside(instr, opcode, vec![name(register), source, Operand::Int(value)]);
    Some(vec![before, changed])
}
