//! Which registers have the same number in all lanes of a warp.

use super::sass::{Instruction, Kind, Operand, Slot};

/// What is known of a register or predicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value {
    /// May differ between lanes.
    Varying,
    /// Without its lowest five bits the same in all lanes: the number of a unit.
    Unit,
    /// The same in all lanes of the warp.
    Uniform,
    /// This number.
    Constant(u32),
    /// What is made of numbers and arguments of the launch alone, in a way that has this hash: the same wherever it is made.
    Made(u64),
    /// The same in all lanes if this predicate, the same in all, is true (or, if negated, false); otherwise what was there before.
    If { predicate: Slot, negated: bool },
    /// A mask of the lanes that are here.
    Here,
    /// A predicate: whether (or, if false, whether not) all 32 lanes are here.
    AllHere(bool),
}

impl Value {
    pub fn constant(self) -> Option<u32> {
        if let Self::Constant(number) = self { Some(number) } else { None }
    }

    fn is_uniform(self) -> bool {
        matches!(self, Self::Uniform | Self::Constant(_) | Self::Made(_))
    }
}

/// All of them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Values {
    slots: Vec<Value>,
    /// The first dimension of a cube is a multiple of 32: the others' indices are those of a warp.
    rows_are_planes: bool,
}

/// Arithmetic of a lane, and reads of memory that depend on nothing but the address: the same operands, the same result.
const PLAIN: [&str; 76] = [
    "BMSK",
    "CS2R",
    "F2F",
    "F2FP",
    "F2I",
    "FADD",
    "FCHK",
    "FFMA",
    "FLO",
    "FMNMX",
    "FMNMX3",
    "FMUL",
    "FSEL",
    "FSET",
    "FSETP",
    "HADD2",
    "HFMA2",
    "HMNMX2",
    "HMUL2",
    "HSETP2",
    "I2F",
    "I2FP",
    "I2I",
    "IABS",
    "IADD3",
    "IADD",
    "IMAD",
    "IMNMX",
    "ISETP",
    "LDC",
    "LDCU",
    "LDG",
    "LDS",
    "LEA",
    "LOP3",
    "MOV",
    "MUFU",
    "PLOP3",
    "POPC",
    "PRMT",
    "R2UR",
    "REDUX",
    "S2UR",
    "SEL",
    "SGXT",
    "SHF",
    "SYNCS",
    "UBMSK",
    "UFLO",
    "UIADD3",
    "UIMAD",
    "UISETP",
    "ULDC",
    "ULEA",
    "ULOP3",
    "UMOV",
    "UPLOP3",
    "UPOPC",
    "UPRMT",
    "USEL",
    "USGXT",
    "USHF",
    "VABSDIFF",
    "VIADD",
    "VIADDMNMX",
    "VIMNMX",
    "VIMNMX3",
    "VOTE",
    "VOTEU",
    "UVIADD",
    "UVIMNMX",
    "UFADD",
    "UFMUL",
    "UFFMA",
    "UI2F",
    "UF2F",
];
/// What has no result in a register.
const NO_RESULT: [&str; 13] =
    ["ST", "STG", "STS", "STL", "RED", "BAR", "BSSY", "BSYNC", "NOP", "WARPSYNC", "LDGSTS", "MEMBAR", "YIELD"];
/// What has two predicates as its results.
const TWO_PREDICATES: [&str; 7] = ["ISETP", "FSETP", "HSETP2", "DSETP", "PLOP3", "UISETP", "UPLOP3"];
/// What may have a predicate as its first result, before a register.
const PREDICATE_FIRST: [&str; 4] = ["LOP3", "ULOP3", "SHFL", "R2UR"];

impl Values {
    pub fn new(rows_are_planes: bool) -> Self {
        Self { slots: vec![Value::Varying; Slot::COUNT], rows_are_planes }
    }

    /// What is known where it may be these or the others. Different ones that are each the same in all lanes stay so, unless lanes
    /// that have parted bring them. Whether that is less than before.
    pub fn join(&mut self, other: &Self, parted: bool) -> bool {
        let mut changed = false;
        for (own, other) in self.slots.iter_mut().zip(&other.slots) {
            if own != other && *own != Value::Varying {
                let joined =
                    if !parted && own.is_uniform() && other.is_uniform() { Value::Uniform } else { Value::Varying };
                changed |= joined != *own;
                *own = joined;
            }
        }
        changed
    }

    pub fn of(&self, operand: &Operand) -> Value {
        match (operand.kind, &*operand.slots) {
            (Kind::Number(number), _) => Value::Constant(number),
            (Kind::Register, []) => Value::Constant(0),
            (Kind::Register | Kind::Predicate, [slot]) => self.slots[slot.0],
            (_, slots) if operand.kind != Kind::Other => {
                let uniform = slots.iter().all(|slot| self.slots[slot.0].is_uniform());
                if uniform { Value::Uniform } else { Value::Varying }
            }
            _ => Value::Varying,
        }
    }

    pub fn is_uniform(&self, operand: &Operand) -> bool {
        self.of(operand).is_uniform()
    }

    /// Where a condition holds, or does not.
    pub fn assume(&mut self, condition: &Operand, holds: bool) {
        let known =
            condition.slots.first().map(|&predicate| Value::If { predicate, negated: condition.negated == holds });
        self.slots.iter_mut().filter(|value| Some(**value) == known).for_each(|value| *value = Value::Uniform);
    }

    /// After an instruction. `together`: all lanes that have not ended execute it.
    pub fn step(&mut self, one: &Instruction, together: bool) {
        if NO_RESULT.contains(&one.base()) {
            return;
        }
        if one.base() == "R2P" {
            (512..520).for_each(|slot| self.slots[slot] = Value::Varying);
            return;
        }
        let results = results(one);
        let (results, operands) = one.operands.split_at(results.min(one.operands.len()));
        let mut value = self.result(one, operands);
        if value == Value::Uniform && !together {
            // Each part of the lanes may have another one.
            value = Value::Varying;
        }
        let written = results.iter().filter(|result| matches!(result.kind, Kind::Register | Kind::Predicate));
        for (place, result) in written.enumerate() {
            // Of a result of several registers the first is named.
            let Some(&first) = result.slots.first() else { continue };
            for slot in (first.0..first.0 + width(one, first)).map(Slot).filter(|slot| slot.0 < Slot::COUNT) {
                let part = match value {
                    Value::Made(hash) => Value::Made(hash.wrapping_add((4096 * place + slot.0 - first.0) as u64)),
                    value => self.fitting(value, slot, together),
                };
                self.write(slot, part, one);
            }
        }
    }

    /// A result as it fits its register.
    fn fitting(&self, value: Value, slot: Slot, together: bool) -> Value {
        match value {
            Value::AllHere(_) if !slot.is_predicate() => Value::Varying,
            // A warp has one.
            Value::Varying | Value::Unit if slot.is_of_warp() && together => Value::Uniform,
            value => value,
        }
    }

    fn write(&mut self, slot: Slot, value: Value, one: &Instruction) {
        let old = self.slots[slot.0];
        let guard = one.guard.as_ref().filter(|guard| !guard.is_fixed());
        let new = match guard.map(|guard| (guard, &*guard.slots)) {
            None => value,
            Some((guard, &[predicate])) if self.is_uniform(guard) && value.is_uniform() => match old {
                _ if old == value => value,
                _ if old.is_uniform() => Value::Uniform,
                Value::If { predicate: other, negated } if other == predicate => {
                    if negated == guard.negated {
                        old
                    } else {
                        Value::Uniform
                    }
                }
                _ => Value::If { predicate, negated: guard.negated },
            },
            Some(_) if old == value => value,
            Some(_) => Value::Varying,
        };
        if slot.is_predicate() {
            let depends = |value: &Value| matches!(value, Value::If { predicate, .. } if *predicate == slot);
            self.slots.iter_mut().filter(|value| depends(value)).for_each(|value| *value = Value::Varying);
        }
        self.slots[slot.0] = new;
    }

    /// What an instruction makes of these operands.
    fn result(&self, one: &Instruction, operands: &[Operand]) -> Value {
        let all =
            || operands.iter().enumerate().all(|(index, operand)| self.is_uniform_in(operand, one.reads_pair(index)));
        let uniform = |yes| if yes { Value::Uniform } else { Value::Varying };
        let text = |name: &str| operands.first().is_some_and(|operand| operand.name == name);
        match one.base() {
            "S2R" if text("SR_TID.X") => Value::Unit,
            "S2R" if text("SR_TID.Y") || text("SR_TID.Z") => uniform(self.rows_are_planes),
            "S2R" | "S2UR"
                if text("SR_CgaCtaId") || operands.iter().any(|operand| operand.name.starts_with("SR_CTAID")) =>
            {
                Value::Made(hash(&operands[0].name))
            }
            "S2R" => Value::Varying,
            "VOTE" | "VOTEU" if operands.iter().all(|operand| operand.is_fixed() && !operand.negated) => Value::Here,
            "VOTE" | "VOTEU" | "REDUX" | "S2UR" => Value::Uniform,
            "SHFL" => uniform(one.has("IDX") && operands[1..].iter().all(|operand| self.is_uniform(operand))),
            "CS2R" => {
                if text("SRZ") {
                    Value::Constant(0)
                } else {
                    Value::Uniform
                }
            }
            base if !PLAIN.contains(&base) => Value::Varying,
            _ => self.special(one, operands).or_else(|| self.made(one, operands)).unwrap_or_else(|| uniform(all())),
        }
    }

    /// Copies, comparisons of the lanes that are here, and what depends on the number of a plane alone.
    fn special(&self, one: &Instruction, operands: &[Operand]) -> Option<Value> {
        let values: Vec<Value> = operands.iter().map(|operand| self.of(operand)).collect();
        let is_plain = operands.iter().all(|operand| !operand.negated);
        let compared = (one.has("EQ"), one.has("NE"));
        match (one.base(), &values[..]) {
            ("MOV" | "UMOV", [value, ..]) if is_plain => Some(*value),
            ("IMAD", [Value::Constant(0), Value::Constant(0), value])
                if (one.has("MOV") || one.has("U32")) && is_plain =>
            {
                Some(*value)
            }
            ("ISETP", [Value::Here, Value::Constant(u32::MAX), rest @ ..])
                if rest.len() == 1 && operands[2].is_fixed() =>
            {
                match compared {
                    (true, _) => Some(Value::AllHere(true)),
                    (_, true) => Some(Value::AllHere(false)),
                    _ => None,
                }
            }
            ("SHF", [Value::Constant(0), Value::Constant(5..32), Value::Unit]) if one.has("R") => Some(Value::Uniform),
            ("LOP3", [Value::Unit, Value::Constant(mask), Value::Constant(0), Value::Constant(0xc0), ..])
                if mask & 31 == 0 =>
            {
                Some(Value::Uniform)
            }
            // Above and below a multiple of 32.
            ("ISETP", [Value::Unit, Value::Constant(bound), rest @ ..])
                if rest.len() == 1 && operands[2].is_fixed() =>
            {
                let first = one.has("GE") || one.has("LT");
                let last = one.has("GT") || one.has("LE");
                ((first && bound % 32 == 0) || (last && bound % 32 == 31)).then_some(Value::Uniform)
            }
            _ => None,
        }
    }

    /// What is made of numbers and arguments alone.
    fn made(&self, one: &Instruction, operands: &[Operand]) -> Option<Value> {
        let is_read = matches!(one.base(), "LDG" | "LDS" | "SYNCS" | "R2UR" | "VOTE" | "VOTEU" | "REDUX" | "SHFL");
        // Nobody writes what is read as a constant.
        if is_read && !one.has("CONSTANT") {
            return None;
        }
        let mut parts = Vec::new();
        for (index, operand) in operands.iter().enumerate() {
            if operand.kind == Kind::Other && !operand.is_modifier() {
                return None;
            }
            parts.push((operand.negated, hash(&operand.form())));
            let second = operand.slots.first().filter(|_| operand.kind == Kind::Register && one.reads_pair(index));
            for slot in operand.slots.iter().copied().chain(second.map(|slot| Slot(slot.0 + 1))) {
                parts.push((
                    false,
                    match self.slots.get(slot.0)? {
                        Value::Constant(number) => u64::from(*number),
                        Value::Made(hash) => *hash,
                        _ => return None,
                    },
                ));
            }
        }
        Some(Value::Made(hash(&(&one.opcode, parts))))
    }

    /// Whether an operand is the same in all lanes, with its second register if it is a pair.
    fn is_uniform_in(&self, operand: &Operand, is_pair: bool) -> bool {
        let second = match (operand.kind, &*operand.slots) {
            (Kind::Register, [slot]) if is_pair => self.slots.get(slot.0 + 1).is_none_or(|value| value.is_uniform()),
            _ => true,
        };
        operand.is_fixed() || (second && (self.is_uniform(operand) || operand.is_modifier()))
    }
}

fn hash(of: &impl std::hash::Hash) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// How many of the operands are results: first come those.
fn results(one: &Instruction) -> usize {
    let is_predicate = |index: usize| one.operands.get(index).is_some_and(|operand| operand.kind == Kind::Predicate);
    let base = one.base();
    match base {
        _ if TWO_PREDICATES.contains(&base) => 2,
        "FCHK" | "S2R" => 1,
        "VOTE" | "VOTEU" if is_predicate(0) => 1,
        "VOTE" | "VOTEU" => 2,
        "SEL" | "FSEL" | "USEL" => 1,
        _ if is_predicate(0) && PREDICATE_FIRST.contains(&base) => 2,
        // With a carry, and with what is no plain arithmetic whatever may be a result.
        _ if PLAIN.contains(&base) => 1 + (1..one.operands.len()).take_while(|&index| is_predicate(index)).count(),
        _ => 2,
    }
}

/// The registers of a result: at least so many as it has.
fn width(one: &Instruction, first: Slot) -> usize {
    let opcode = &*one.opcode;
    match one.base() {
        _ if first.is_predicate() => 1,
        "S2R" | "SHFL" => 1,
        "I2F" if !one.has("F64") => 1,
        "HGMMA" | "LDTM" => 256 - first.0.min(255),
        _ if opcode.contains("256") => 8,
        _ if opcode.contains("128") => 4,
        base if !PLAIN.contains(&base) => 4,
        _ if one.has_pairs() || one.base() == "CS2R" => 2,
        _ => 1,
    }
}
