//! What a mutant is, and the list of all of a kernel.
use crate::edit::Edit;
use crate::operators;
use ptx_sim::{Entry, Instr, Loc, Module};
use std::collections::HashMap;

/// A kernel with one change.
#[derive(Debug, Clone)]
pub struct Mutant {
    /// `L123 wait_group 0->1`: line of the PTX text, operator, change. Unique in a kernel.
    pub id: String,
    /// What kind of change it is.
    pub operator: &'static str,
    /// The change, in words or as `old->new`.
    pub change: String,
    /// The instruction, as the PTX text has it.
    pub ptx: String,
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The last `.loc` above it.
    pub loc: Option<Loc>,
    /// The change itself.
    pub edit: Edit,
}

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

/// All mutants of a kernel, in the order of its text.
pub fn mutants(module: &Module, entry: usize, text: &str) -> Vec<Mutant> {
    let Some(entry) = module.entries.get(entry) else { return Vec::new() };
    let lines: Vec<&str> = text.lines().collect();
    let mut seen: HashMap<String, u32> = HashMap::new();
    let mut found = Vec::new();
    for at in 0..entry.instrs.len() {
        let instr = &entry.instrs[at];
        for (operator, change, edit) in operators::all(&Site { entry, at }) {
            let mut id = format!("L{} {operator} {change}", instr.line);
            let times = seen.entry(id.clone()).or_default();
            *times += 1;
            // Two instructions of one line.
            if *times > 1 {
                id = format!("{id} #{times}");
            }
            let ptx = statement(&lines, instr);
            found.push(Mutant { id, operator, change, ptx, line: instr.line, loc: instr.loc, edit });
        }
    }
    found
}

/// The text of an instruction: its line, and those after it up to the semicolon.
fn statement(lines: &[&str], instr: &Instr) -> String {
    let mut text = String::new();
    for line in lines.iter().skip(instr.line as usize - 1).take(4) {
        let part = line.split("//").next().unwrap_or_default();
        text = format!("{text} {}", part.split_whitespace().collect::<Vec<_>>().join(" "));
        if part.contains(';') {
            break;
        }
    }
    text.trim().to_string()
}
