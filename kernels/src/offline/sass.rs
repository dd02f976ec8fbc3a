//! Machine code, as `nvdisasm -c` prints it, instruction by instruction.

use std::collections::HashMap;

/// A program: a kernel and the functions that it calls.
#[derive(Debug, Default)]
pub(super) struct Program {
    pub instructions: Vec<Instruction>,
    /// The instruction behind each label.
    labels: HashMap<String, usize>,
    /// The instruction at each address.
    addresses: HashMap<u32, usize>,
}

/// An instruction.
#[derive(Debug)]
pub(super) struct Instruction {
    pub address: u32,
    /// The predicate under which a lane executes it.
    pub guard: Option<Operand>,
    /// With its modifiers: `SHFL.BFLY`.
    pub opcode: String,
    pub operands: Vec<Operand>,
    /// Labels among the operands, or of an indirect branch.
    targets: Vec<String>,
}

/// An operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Operand {
    /// As written, without a sign.
    pub name: String,
    pub kind: Kind,
    /// Behind a minus, a `!` or `~`, which belongs to a number.
    pub negated: bool,
    /// What it reads, or writes, where it stands among the results.
    pub slots: Vec<Slot>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A register or predicate, also one that is always zero or true, which is no slot.
    Register,
    Predicate,
    /// A number.
    Number(u32),
    /// Memory at an address.
    Memory,
    /// Memory that is the same for all: kernel arguments.
    Constant,
    Other,
}

/// A register or predicate of a lane, or of a warp (`UR4`, `UP0`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(pub usize);

impl Slot {
    /// How many there are.
    pub const COUNT: usize = 528;

    fn named(name: &str) -> Option<Self> {
        let of = |prefix: &str, first: usize, count: usize| {
            let number: usize = name.strip_prefix(prefix)?.parse().ok()?;
            (number < count).then_some(Self(first + number))
        };
        of("R", 0, 256).or_else(|| of("UR", 256, 256)).or_else(|| of("P", 512, 8)).or_else(|| of("UP", 520, 8))
    }

    /// Whether a warp has one of it.
    pub fn is_of_warp(self) -> bool {
        (256..512).contains(&self.0) || self.0 >= 520
    }

    pub fn is_predicate(self) -> bool {
        self.0 >= 512
    }
}

impl Program {
    /// Reads the text.
    pub fn read(text: &str) -> Self {
        let mut program = Self::default();
        for line in text.lines() {
            let index = program.instructions.len();
            if let Some(instruction) = Instruction::read(line) {
                program.addresses.insert(instruction.address, index);
                program.instructions.push(instruction);
            } else if let Some(label) = line.strip_suffix(':') {
                program.labels.insert(label.into(), index);
            }
        }
        program
    }

    /// The instruction at an address.
    pub fn at(&self, address: u32) -> Option<usize> {
        self.addresses.get(&address).copied()
    }

    /// The instructions that this one names.
    pub fn targets(&self, instruction: &Instruction) -> Vec<usize> {
        instruction.targets.iter().filter_map(|label| self.labels.get(label)).copied().collect()
    }

    /// Instructions where something else than what stands above them may come from.
    pub fn is_target(&self) -> Vec<bool> {
        let mut is_target = vec![false; self.instructions.len() + 1];
        self.labels.values().for_each(|&index| is_target[index] = true);
        is_target
    }
}

impl Instruction {
    /// A line `/*0a10*/ @!P0 LDL.LU R4, [R1] ;`.
    pub fn read(line: &str) -> Option<Self> {
        let (address, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
        let (text, comment) = text.split_once(';')?;
        let mut text = text.trim();
        let mut guard = None;
        if let Some(rest) = text.strip_prefix('@') {
            let (word, rest) = rest.split_once(' ')?;
            guard = Some(Operand::read(word));
            text = rest.trim();
        }
        let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
        let listed = operands.split("(*").nth(1).unwrap_or(comment);
        let operands = operands.split("(*").next().unwrap_or_default();
        let pieces: Vec<&str> = operands.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
        let named = pieces.iter().filter_map(|word| word.strip_prefix("`(")?.strip_suffix(')'));
        let listed = listed.split([' ', ',', '"', '*', ')']).filter(|word| word.starts_with(".L"));
        Some(Self {
            address: u32::from_str_radix(address, 16).ok()?,
            guard,
            opcode: opcode.into(),
            targets: named.chain(listed).map(String::from).collect(),
            operands: pieces.into_iter().map(Operand::read).collect(),
        })
    }

    /// The opcode without modifiers.
    pub fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// Whether this is one of the opcode's modifiers.
    pub fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').skip(1).any(|word| word == modifier)
    }

    /// Whether it names a place of its own function, not another function.
    pub fn names_label(&self) -> bool {
        self.targets.iter().any(|label| label.starts_with(".L"))
    }

    /// The number of the barrier `B0` among the operands.
    pub fn barrier(&self) -> Option<usize> {
        self.operands.iter().find_map(|operand| operand.name.strip_prefix('B')?.parse().ok())
    }

    /// Whether this one of what is read is a number in two registers.
    pub fn reads_pair(&self, index: usize) -> bool {
        // Of a product of 32 bits each the sum has 64.
        if self.has("WIDE") { index == 2 } else { self.has_pairs() }
    }

    /// Whether there are numbers in two registers.
    pub fn has_pairs(&self) -> bool {
        let names = self.opcode.contains("WIDE") || self.opcode.contains("64") || self.opcode.starts_with('D');
        names && self.base() != "SYNCS"
    }
}

impl Operand {
    fn read(word: &str) -> Self {
        let bare = word.trim_start_matches(['-', '!', '~', '|', '+']);
        let mut slots = Vec::new();
        let names = bare.split(|char: char| !char.is_ascii_alphanumeric() && char != '.' && char != '_');
        for name in names {
            let mut parts = name.split('.');
            let Some(slot) = parts.next().and_then(Slot::named) else { continue };
            slots.push(slot);
            if parts.any(|part| part == "64") {
                slots.push(Slot(slot.0 + 1));
            }
        }
        let first = bare.split(['.', '|']).next().unwrap_or_default();
        let kind = match first {
            _ if bare.starts_with("c[") || bare.starts_with("cx[") => Kind::Constant,
            _ if bare.contains('[') => Kind::Memory,
            "RZ" | "URZ" => Kind::Register,
            "PT" | "UPT" => Kind::Predicate,
            _ if !slots.is_empty() => {
                if slots[0].is_predicate() {
                    Kind::Predicate
                } else {
                    Kind::Register
                }
            }
            _ => number(word).map_or(Kind::Other, Kind::Number),
        };
        Self {
            name: bare.into(),
            kind,
            negated: !matches!(kind, Kind::Number(_)) && word.starts_with(['-', '!', '~']),
            slots,
        }
    }

    /// What is written, without the registers.
    pub fn form(&self) -> String {
        let words = self.name.split(['.', '[', ']', '+', '|']);
        words.filter(|word| Slot::named(word).is_none() && *word != "reuse").collect::<Vec<_>>().join(".")
    }

    /// Whether it says how something is done, or is a number with a fraction.
    pub fn is_modifier(&self) -> bool {
        self.kind == Kind::Other
            && self.name.starts_with(|char: char| char.is_ascii_digit() || char == 'I' || char == 'Q')
    }

    /// Whether it is the register that is always zero, or the predicate that is always true.
    pub fn is_fixed(&self) -> bool {
        self.slots.is_empty() && matches!(self.kind, Kind::Register | Kind::Predicate)
    }
}

/// `0x1f`, `-0x1`, `12`.
fn number(word: &str) -> Option<u32> {
    let (negative, digits) = word.strip_prefix('-').map_or((false, word), |rest| (true, rest));
    let number = match digits.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { number.wrapping_neg() } else { number })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_is_read() {
        let line = "        /*0a10*/              @!P0 LDG.E.64 R4, desc[UR6][R2.64+0x8] ;";
        let read = Instruction::read(line).expect("an instruction");
        assert_eq!((read.address, read.opcode.as_str(), read.base()), (0xa10, "LDG.E.64", "LDG"));
        let guard = read.guard.expect("a guard");
        assert_eq!((guard.negated, &*guard.slots), (true, &[Slot(512)][..]));
        assert_eq!((read.operands[0].kind, &*read.operands[0].slots), (Kind::Register, &[Slot(4)][..]));
        assert_eq!(read.operands[1].kind, Kind::Memory);
        assert_eq!(read.operands[1].slots, [Slot(262), Slot(2), Slot(3)]);
    }

    #[test]
    fn operands_are_told_apart() {
        for (word, kind, slots) in [
            ("RZ", Kind::Register, vec![]),
            ("!PT", Kind::Predicate, vec![]),
            ("-0x1", Kind::Number(u32::MAX), vec![]),
            ("|R3|", Kind::Register, vec![Slot(3)]),
            ("R3.reuse", Kind::Register, vec![Slot(3)]),
            ("UP2", Kind::Predicate, vec![Slot(522)]),
            ("c[0x0][0x160]", Kind::Constant, vec![]),
            ("c[0x0][UR4]", Kind::Constant, vec![Slot(260)]),
            ("SR_TID.X", Kind::Other, vec![]),
        ] {
            let operand = Operand::read(word);
            assert_eq!((operand.kind, operand.slots), (kind, slots), "{word}");
        }
    }

    #[test]
    fn branches_lead_to_labels() {
        let text = "\
.L_x_0:
        /*0000*/              @!P0 BRA `(.L_x_1) ;
        /*0010*/                   BRX R4 -0x20 (*\"BRANCH_TARGETS .L_x_0,.L_x_1\"*) ;
.L_x_1:
        /*0020*/                   BRA `(.L_x_0);
";
        let program = Program::read(text);
        let targets: Vec<_> = program.instructions.iter().map(|one| program.targets(one)).collect();
        assert_eq!(targets, [vec![2], vec![0, 2], vec![0]]);
        assert_eq!(program.at(0x20), Some(2));
    }
}
