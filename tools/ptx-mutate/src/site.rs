//! A place in a kernel, and what can stand there instead.
use crate::edit::Edit;
use ptx_sim::{Entry, Instr};

/// A change before it has a name: operator, change, edit.
pub(crate) type Change = (&'static str, String, Edit);

/// A kernel while it is searched for places to change.
pub(crate) struct Site<'a> {
    pub entry: &'a Entry,
    pub at: usize,
}

impl<'a> Site<'a> {
    pub fn instr(&self) -> &'a Instr {
        &self.entry.instrs[self.at]
    }

    /// The parts of the opcode.
    pub fn parts(&self) -> Vec<&'a str> {
        self.instr().opcode.split('.').collect()
    }

    /// Nothing in the instruction's place.
    pub fn removed(&self, operator: &'static str) -> Change {
        (operator, "removed".to_string(), Edit { at: self.at, with: Vec::new() })
    }

    /// Other instructions in its place.
    pub fn replaced(&self, operator: &'static str, change: impl Into<String>, with: Vec<Instr>) -> Change {
        (operator, change.into(), Edit { at: self.at, with })
    }

    /// The same instruction with another opcode.
    pub fn opcode(&self, operator: &'static str, opcode: &str) -> Change {
        let change = format!("{}->{opcode}", self.instr().opcode);
        self.replaced(operator, change, vec![Instr { opcode: opcode.to_string(), ..self.instr().clone() }])
    }
}
