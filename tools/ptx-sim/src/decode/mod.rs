//! Text operations to [`Op`]s: names become slots, labels become indices, types are checked once.
mod alu;
mod atomic;
mod bulk;
mod convert;
mod lane;
mod matrix;
mod memory;
mod names;
mod sync;
mod tcgen05;
mod wgmma;

use crate::error::{CudaLine, Fault, Place, SimError};
use crate::ir::tcgen05::Tcgen05;
use crate::ir::{Inst, Kernel, MatrixOp, Op};
use crate::parse::{Instr, Module};
use names::Names;
use std::collections::{BTreeMap, HashSet};

/// Decodes one kernel.
///
/// # Errors
/// [`Fault::NoEntry`], [`Fault::UnknownInstruction`], [`Fault::BadOperand`].
pub(crate) fn decode(module: &Module, name: &str) -> Result<Kernel, SimError> {
    let entry = module.entries.iter().find(|e| e.name == name).ok_or_else(|| Fault::NoEntry(name.to_string()))?;
    let mut names = Names::new(module, entry);
    let mut code = Vec::with_capacity(entry.instrs.len() + 1);
    for instr in &entry.instrs {
        let inst = instruction(&mut names, instr).map_err(|kind| SimError { kind, place: place(module, instr) })?;
        code.push(inst);
    }
    if let Some(inst) = tcgen05::mixed_groups(&code) {
        let instr = "tcgen05".to_string();
        let kind =
            Fault::BadOperand { instruction: instr, operand: "two values of .cta_group in one kernel".to_string() };
        return Err(SimError { kind, place: Box::new(Place { line: inst.line, ..Place::default() }) });
    }
    // A body without a last `ret` ends, too.
    let line = entry.instrs.last().map_or(0, |i| i.line);
    code.push(Inst { guard: None, op: Op::Exit, touches: [].into(), uses: [].into(), line, loc: None });
    keep_touches(&mut code);
    Ok(names.kernel(entry, code))
}

/// Each instruction of a module that does not decode: its opcode and how often it occurs.
pub fn unknown_instructions(module: &Module) -> BTreeMap<String, usize> {
    let mut unknown = BTreeMap::new();
    for entry in &module.entries {
        let mut names = Names::new(module, entry);
        for instr in &entry.instrs {
            if instruction(&mut names, instr).is_err() {
                *unknown.entry(instr.opcode.clone()).or_default() += 1;
            }
        }
    }
    unknown
}

/// The place of an instruction in PTX and CUDA.
fn place(module: &Module, instr: &Instr) -> Box<Place> {
    Box::new(Place { line: instr.line, cuda: cuda_lines(&module.files, instr.loc), ..Place::default() })
}

/// The CUDA lines of a location.
pub(crate) fn cuda_lines(files: &BTreeMap<u32, String>, loc: Option<crate::parse::Loc>) -> Vec<CudaLine> {
    let Some(loc) = loc else { return Vec::new() };
    let outer = loc.inlined_at;
    std::iter::once((loc.file, loc.line))
        .chain(outer)
        .filter_map(|(file, line)| files.get(&file).map(|name| CudaLine { file: name.clone(), line }))
        .collect()
}

fn instruction(names: &mut Names, instr: &Instr) -> Result<Inst, Fault> {
    names.touched.clear();
    let guard = instr.guard.as_ref().map(|g| names.guard(instr, g)).transpose()?;
    let parts: Vec<&str> = instr.opcode.split('.').collect();
    let mut d = Decoder { names, instr, at: 0 };
    let op = d.op(&parts)?.ok_or_else(|| Fault::UnknownInstruction(instr.opcode.clone()))?;
    if d.at != instr.operands.len() {
        return Err(d.bad(&format!("{} operands, expected {}", instr.operands.len(), d.at)));
    }
    let touched = std::mem::take(&mut names.touched);
    let (uses, touches) = (touched.clone().into(), touched.into());
    Ok(Inst { guard, op, touches, uses, line: instr.line, loc: instr.loc })
}

/// Of the registers that instructions touch only those of `wgmma` and of `tcgen05.ld` are looked at.
fn keep_touches(code: &mut [Inst]) {
    let mut watched = HashSet::new();
    for inst in code.iter_mut() {
        if let Op::Matrix(op) = &inst.op
            && let MatrixOp::Async(_) = **op
        {
            watched.extend(std::mem::take(&mut inst.touches));
        }
        if let Op::Tcgen05(op) = &inst.op
            && let Tcgen05::Load { dsts, .. } = &**op
        {
            watched.extend(dsts);
        }
    }
    for inst in code {
        inst.touches = inst.touches.iter().copied().filter(|slot| watched.contains(slot)).collect();
    }
}

/// One instruction while it is decoded; operands are taken in order.
struct Decoder<'n, 'm> {
    names: &'n mut Names<'m>,
    instr: &'n Instr,
    at: usize,
}

impl Decoder<'_, '_> {
    fn bad(&self, operand: &str) -> Fault {
        Fault::BadOperand { instruction: self.instr.opcode.clone(), operand: operand.to_string() }
    }

    /// `None` if no family knows the modifiers.
    fn op(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        if let Some(op) = self.alu(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.lane(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.convert(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.atomic(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.memory(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.matrix(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.wgmma(parts)? {
            return Ok(Some(op));
        }
        if let Some(op) = self.tcgen05(parts)? {
            return Ok(Some(op));
        }
        self.sync(parts)
    }
}
