//! Names to slots: registers by scope, constants, special registers, symbols (PTX ISA 5.1, 5.4, 10).
use super::Decoder;
use crate::error::Fault;
use crate::ir::{Addr, Inst, Kernel, PredSlot, PredSource, SINK, Slot, Special};
use crate::memory::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, align_up, variable_addresses};
use crate::parse::{Entry, Guard, Instr, Module, Operand, RegType};
use std::collections::HashMap;

/// Where a name of a scope lives.
#[derive(Clone, Copy)]
enum Place {
    Register(Slot),
    Pred(PredSlot),
}

/// The names of a kernel.
pub(super) struct Names<'m> {
    entry: &'m Entry,
    scopes: Vec<HashMap<&'m str, Place>>,
    /// Of parameters, local and global variables: in their own space.
    addresses: HashMap<&'m str, u64>,
    shared_by_name: HashMap<&'m str, u64>,
    constants: HashMap<u64, Slot>,
    specials: Vec<(Slot, Special)>,
    params: Vec<(u64, u64)>,
    static_shared: u64,
    local: u64,
    /// Bits of each register.
    widths: HashMap<Slot, u32>,
    slots: Slot,
    preds: PredSlot,
    /// Registers of the instruction that is decoded.
    pub(super) touched: Vec<Slot>,
}

impl<'m> Names<'m> {
    pub(super) fn new(module: &'m Module, entry: &'m Entry) -> Self {
        let mut names = Self {
            entry,
            scopes: Vec::new(),
            addresses: HashMap::new(),
            shared_by_name: HashMap::new(),
            constants: HashMap::new(),
            specials: Vec::new(),
            params: Vec::new(),
            static_shared: 0,
            local: 0,
            widths: HashMap::new(),
            slots: SINK + 1,
            preds: 0,
            touched: Vec::new(),
        };
        for scope in &entry.scopes {
            let mut registers: Vec<_> = scope.registers.iter().collect();
            registers.sort_by_key(|(name, _)| *name);
            let places = registers.into_iter().map(|(name, ty)| (name.as_str(), names.place(*ty)));
            let places = places.collect();
            names.scopes.push(places);
        }
        let mut offset = 0;
        for param in &entry.params {
            offset = align_up(offset, param.align);
            names.addresses.insert(&param.name, offset);
            names.params.push((offset, param.bytes));
            offset += param.bytes;
        }
        for variable in &entry.local {
            names.local = align_up(names.local, variable.align);
            names.addresses.insert(&variable.name, names.local);
            names.local += variable.bytes;
        }
        for (variable, address) in module.globals.iter().zip(variable_addresses(&module.globals)) {
            names.addresses.insert(&variable.name, address);
        }
        names.shared(module);
        names
    }

    fn place(&mut self, ty: RegType) -> Place {
        match ty {
            RegType::Pred => {
                self.preds += 1;
                Place::Pred(self.preds - 1)
            }
            RegType::Bits(bits) => {
                let slot = self.fresh();
                self.widths.insert(slot, bits);
                Place::Register(slot)
            }
        }
    }

    /// Bits of a register.
    pub(super) fn width(&self, slot: Slot) -> u32 {
        self.widths.get(&slot).copied().unwrap_or(64)
    }

    fn fresh(&mut self) -> Slot {
        self.slots += 1;
        self.slots - 1
    }

    /// Static variables from address 0; dynamic shared memory behind them, aligned to 16 bytes at least.
    fn shared(&mut self, module: &'m Module) {
        let mut offset = 0;
        let all = || module.shared.iter().chain(&self.entry.shared);
        for variable in all().filter(|v| v.bytes > 0) {
            offset = align_up(offset, variable.align);
            self.shared_by_name.insert(&variable.name, offset);
            offset += variable.bytes;
        }
        let align = all().filter(|v| v.bytes == 0).map(|v| v.align).max().unwrap_or(1);
        self.static_shared = align_up(offset, align.max(16));
        for variable in module.shared.iter().filter(|v| v.bytes == 0) {
            self.shared_by_name.insert(&variable.name, self.static_shared);
        }
    }

    /// The name in its scope or those around it.
    fn look_up(&self, instr: &Instr, name: &str) -> Option<Place> {
        let mut scope = Some(instr.scope);
        while let Some(s) = scope {
            if let Some(place) = self.scopes[s].get(name) {
                return Some(*place);
            }
            scope = self.entry.scopes[s].parent;
        }
        None
    }

    fn label(&self, instr: &Instr, name: &str) -> Option<u32> {
        let mut scope = Some(instr.scope);
        while let Some(s) = scope {
            if let Some(at) = self.entry.scopes[s].labels.get(name) {
                return Some(*at as u32);
            }
            scope = self.entry.scopes[s].parent;
        }
        None
    }

    fn constant(&mut self, bits: u64) -> Slot {
        if let Some(slot) = self.constants.get(&bits) {
            return *slot;
        }
        let slot = self.fresh();
        self.constants.insert(bits, slot);
        slot
    }

    fn special(&mut self, special: Special) -> Slot {
        if let Some((slot, _)) = self.specials.iter().find(|(_, s)| *s == special) {
            return *slot;
        }
        let slot = self.fresh();
        self.specials.push((slot, special));
        slot
    }

    pub(super) fn guard(&self, instr: &Instr, guard: &Guard) -> Result<PredSource, Fault> {
        match self.look_up(instr, &guard.register) {
            Some(Place::Pred(slot)) => Ok(PredSource { slot, negated: guard.negated }),
            _ => Err(Fault::BadOperand { instruction: instr.opcode.clone(), operand: format!("@{}", guard.register) }),
        }
    }

    pub(super) fn kernel(self, entry: &Entry, code: Vec<Inst>) -> Kernel {
        let mut constants: Vec<_> = self.constants.into_iter().map(|(bits, slot)| (slot, bits)).collect();
        constants.sort_unstable();
        Kernel {
            code,
            slots: self.slots as usize,
            preds: self.preds as usize,
            constants,
            specials: self.specials,
            params: self.params,
            local: self.local,
            static_shared: self.static_shared,
            required_threads: entry.required_threads,
            max_threads: entry.max_threads,
            max_registers: entry.max_registers,
            cluster: entry.cluster,
        }
    }
}

/// Special registers that keep their value.
fn special(name: &str) -> Option<Special> {
    let axis = |rest: &str| ["x", "y", "z"].iter().position(|a| *a == rest);
    let (base, rest) = name.split_once('.').unwrap_or((name, ""));
    Some(match base {
        "%tid" => Special::Tid(axis(rest)?),
        "%ntid" => Special::Ntid(axis(rest)?),
        "%ctaid" => Special::Ctaid(axis(rest)?),
        "%nctaid" => Special::Nctaid(axis(rest)?),
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%lanemask_eq" => Special::LaneMask("eq"),
        "%lanemask_lt" => Special::LaneMask("lt"),
        "%lanemask_le" => Special::LaneMask("le"),
        "%lanemask_gt" => Special::LaneMask("gt"),
        "%lanemask_ge" => Special::LaneMask("ge"),
        "%clusterid" => Special::ClusterId(axis(rest)?),
        "%nclusterid" => Special::NclusterId(axis(rest)?),
        "%cluster_ctaid" => Special::ClusterCtaid(axis(rest)?),
        "%cluster_nctaid" => Special::ClusterNctaid(axis(rest)?),
        "%cluster_ctarank" => Special::ClusterCtarank,
        "%cluster_nctarank" => Special::ClusterNctarank,
        _ => return None,
    })
}

impl Decoder<'_, '_> {
    /// The next operand.
    pub(super) fn operand(&mut self) -> Result<&Operand, Fault> {
        let operand = self.instr.operands.get(self.at).ok_or_else(|| self.bad("missing"))?;
        self.at += 1;
        Ok(operand)
    }

    pub(super) fn remaining(&self) -> usize {
        self.instr.operands.len() - self.at
    }

    pub(super) fn peek(&self) -> Option<&Operand> {
        self.instr.operands.get(self.at)
    }

    pub(super) fn slot_of(&mut self, operand: &Operand) -> Result<Slot, Fault> {
        match operand {
            Operand::Int(bits) => Ok(self.names.constant(*bits)),
            Operand::F32(bits) => Ok(self.names.constant(u64::from(*bits))),
            Operand::F64(bits) => Ok(self.names.constant(*bits)),
            Operand::Name(name) if name == "WARP_SZ" => Ok(self.names.constant(32)),
            Operand::Name(name) => match self.names.look_up(self.instr, name) {
                Some(Place::Register(slot)) => {
                    self.names.touched.push(slot);
                    Ok(slot)
                }
                Some(Place::Pred(_)) => Err(self.bad(name)),
                None => {
                    let names = &mut *self.names;
                    let shared = names.shared_by_name.get(name.as_str()).map(|offset| Special::Shared(*offset));
                    if let Some(special) = special(name).or(shared) {
                        return Ok(names.special(special));
                    }
                    match names.addresses.get(name.as_str()).copied() {
                        Some(address) => Ok(names.constant(address)),
                        None => Err(self.bad(name)),
                    }
                }
            },
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    /// The next operand as a source. Constants are cut to `bits`, so that they look like registers.
    pub(super) fn source(&mut self, bits: u32) -> Result<Slot, Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Int(value) if bits < 64 => Ok(self.names.constant(value & ((1 << bits) - 1))),
            operand => self.slot_of(operand),
        }
    }

    /// The next operand as a destination register.
    pub(super) fn dest(&mut self) -> Result<Slot, Fault> {
        let instr = self.instr;
        self.operand()?;
        self.dest_of(&instr.operands[self.at - 1])
    }

    fn dest_of(&mut self, operand: &Operand) -> Result<Slot, Fault> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(SINK),
            Operand::Name(name) => match self.names.look_up(self.instr, name) {
                Some(Place::Register(slot)) => {
                    self.names.touched.push(slot);
                    Ok(slot)
                }
                _ => Err(self.bad(name)),
            },
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    /// A destination with an optional predicate: `d` or `d|p`.
    pub(super) fn dest_pair(&mut self) -> Result<(Slot, Option<PredSlot>), Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Pair(d, p) => Ok((self.dest_of(d)?, Some(self.pred_of(p)?.slot))),
            single => Ok((self.dest_of(single)?, None)),
        }
    }

    fn pred_of(&self, operand: &Operand) -> Result<PredSource, Fault> {
        match operand {
            Operand::Name(name) => match self.names.look_up(self.instr, name) {
                Some(Place::Pred(slot)) => Ok(PredSource { slot, negated: false }),
                _ => Err(self.bad(name)),
            },
            Operand::Not(inner) => self.pred_of(inner).map(|p| PredSource { negated: !p.negated, ..p }),
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    /// The next operand as a predicate read.
    pub(super) fn pred(&mut self) -> Result<PredSource, Fault> {
        let instr = self.instr;
        self.operand()?;
        self.pred_of(&instr.operands[self.at - 1])
    }

    /// Predicate destinations: `p` or `p|q`.
    pub(super) fn pred_pair(&mut self) -> Result<(PredSlot, Option<PredSlot>), Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Pair(p, q) => Ok((self.pred_of(p)?.slot, Some(self.pred_of(q)?.slot))),
            single => Ok((self.pred_of(single)?.slot, None)),
        }
    }

    /// The next operand's parts as sources: `{a, b}`, or one alone.
    pub(super) fn sources(&mut self, bits: u32) -> Result<Box<[Slot]>, Fault> {
        let instr = self.instr;
        match self.peek() {
            Some(Operand::Vector(_)) => {
                self.at += 1;
                let Operand::Vector(parts) = &instr.operands[self.at - 1] else { return Err(self.bad("vector")) };
                let cut = |part: &Operand| match part {
                    Operand::Int(value) if bits < 64 => Operand::Int(value & ((1 << bits) - 1)),
                    other => other.clone(),
                };
                parts.iter().map(|part| self.slot_of(&cut(part))).collect()
            }
            _ => Ok([self.source(bits)?].into()),
        }
    }

    /// The next operand's parts as destinations.
    pub(super) fn dests(&mut self) -> Result<Box<[Slot]>, Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Vector(parts) => parts.iter().map(|part| self.dest_of(part)).collect(),
            single => Ok([self.dest_of(single)?].into()),
        }
    }

    /// The next operand as an address.
    pub(super) fn address(&mut self) -> Result<Addr, Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Address { base, offset, coords } if coords.is_empty() => {
                Ok(Addr { base: self.slot_of(base)?, offset: *offset as u64 })
            }
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    /// The next operand as a branch target.
    pub(super) fn target(&mut self) -> Result<u32, Fault> {
        let instr = self.instr;
        self.operand()?;
        match &instr.operands[self.at - 1] {
            Operand::Name(name) => self.names.label(instr, name).ok_or_else(|| self.bad(name)),
            other => Err(self.bad(&format!("{other:?}"))),
        }
    }

    /// A constant that the instruction itself needs to know.
    pub(super) fn immediate(&mut self) -> Result<u64, Fault> {
        match self.operand()? {
            Operand::Int(bits) => Ok(*bits),
            other => {
                let text = format!("{other:?}");
                Err(self.bad(&text))
            }
        }
    }

    /// The window of a state space in generic addresses.
    pub(super) fn window(&mut self, space: &str) -> Option<Slot> {
        Some(match space {
            "shared" | "shared::cta" | "shared::cluster" => self.names.constant(SHARED_WINDOW),
            "param" => self.names.constant(PARAM_WINDOW),
            "local" => self.names.constant(LOCAL_WINDOW),
            _ => return None,
        })
    }
}
