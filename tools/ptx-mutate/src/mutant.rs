//! What a mutant is, and the list of all of a kernel.
use crate::edit::Edit;
use crate::operators::{self, MapField};
use crate::site::Site;
use ptx_sim::{Instr, Loc, Module, TensorMap};
use std::collections::HashMap;

/// A kernel with one change.
#[derive(Debug, Clone)]
pub struct Mutant {
    /// `L123 wait_group 0->1`: line of the PTX text, operator, change; `map 2 swizzle 128->none`: of a tensor map, the
    /// parameter's number. Unique in a kernel.
    pub id: String,
    /// What kind of change it is.
    pub operator: &'static str,
    /// The change, in words or as `old->new`.
    pub change: String,
    /// The instruction, as the PTX text has it, or the tensor map.
    pub ptx: String,
    /// Line of the PTX text, from 1; 0 for a tensor map.
    pub line: u32,
    /// The last `.loc` above it.
    pub loc: Option<Loc>,
    /// The change itself.
    pub alteration: Alteration,
}

/// What is changed.
#[derive(Debug, Clone)]
pub enum Alteration {
    /// An instruction.
    Code(Edit),
    /// A tensor map among the parameters.
    Map(MapEdit),
}

/// A change of a tensor map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapEdit {
    /// The parameter's number.
    pub param: usize,
    /// What of it.
    pub field: MapField,
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
            let alteration = Alteration::Code(edit);
            found.push(Mutant { id, operator, change, ptx, line: instr.line, loc: instr.loc, alteration });
        }
    }
    found
}

/// All mutants of a launch's tensor maps, which come with the numbers of their parameters.
pub fn map_mutants(maps: &[(usize, TensorMap)]) -> Vec<Mutant> {
    let of = |(param, map): &(usize, TensorMap)| {
        let fields = MapField::all(map).into_iter();
        fields.map(|field| mutant_of_map(MapEdit { param: *param, field }, map)).collect::<Vec<_>>()
    };
    maps.iter().flat_map(of).collect()
}

fn mutant_of_map(edit: MapEdit, map: &TensorMap) -> Mutant {
    let change = edit.field.describe(map);
    Mutant {
        id: format!("map {} {change}", edit.param),
        operator: "map",
        change,
        ptx: format!("parameter {}: boxes {:?} of {:?}, {:?}", edit.param, map.boxes, map.elem, map.swizzle),
        line: 0,
        loc: None,
        alteration: Alteration::Map(edit),
    }
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
