//! The parts of a parsed module.
use std::collections::{BTreeMap, HashMap};

/// A PTX module.
#[derive(Debug, Default, Clone)]
pub struct Module {
    /// `.version`, as written.
    pub version: String,
    /// `.target`, without its options.
    pub target: String,
    /// The kernels.
    pub entries: Vec<Entry>,
    /// Shared variables of module scope.
    pub shared: Vec<Variable>,
    /// Global and constant variables.
    pub globals: Vec<Variable>,
    /// Source files by the number that `.loc` uses.
    pub files: BTreeMap<u32, String>,
}

/// A variable of shared, local, global or constant memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// The symbol.
    pub name: String,
    /// Alignment in bytes.
    pub align: u64,
    /// Size in bytes; 0 for the unsized array that stands for dynamic shared memory.
    pub bytes: u64,
    /// Declared `.extern`.
    pub external: bool,
    /// The initial value; what it leaves out is zero.
    pub initial: Vec<u8>,
}

/// A kernel parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The symbol.
    pub name: String,
    /// Alignment in bytes.
    pub align: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A kernel.
#[derive(Debug, Default, Clone)]
pub struct Entry {
    /// The symbol.
    pub name: String,
    /// Parameters in order.
    pub params: Vec<Parameter>,
    /// `.maxntid`.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`.
    pub required_threads: Option<[u32; 3]>,
    /// `.maxnreg`.
    pub max_registers: Option<u32>,
    /// `.reqnctapercluster`.
    pub cluster: Option<[u32; 3]>,
    /// Blocks of the body; 0 is the body itself.
    pub scopes: Vec<Scope>,
    /// Shared variables declared in the body.
    pub shared: Vec<Variable>,
    /// Local variables: each thread has its own.
    pub local: Vec<Variable>,
    /// Instructions in order.
    pub instrs: Vec<Instr>,
}

/// A `{}` block: its registers and labels hide those of the blocks around it.
#[derive(Debug, Default, Clone)]
pub struct Scope {
    /// The block around this one.
    pub parent: Option<usize>,
    /// Registers by name.
    pub registers: HashMap<String, RegType>,
    /// Labels: the index of the next instruction.
    pub labels: HashMap<String, usize>,
}

/// The type of a register, as far as its width and class matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegType {
    /// A predicate.
    Pred,
    /// Any type of this many bits.
    Bits(u32),
}

impl RegType {
    /// The register type of a fundamental type with its dot (PTX ISA 5.2).
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Some(match name {
            ".pred" => Self::Pred,
            ".b8" | ".u8" | ".s8" => Self::Bits(8),
            ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Self::Bits(16),
            ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => Self::Bits(32),
            ".b64" | ".u64" | ".s64" | ".f64" => Self::Bits(64),
            ".b128" => Self::Bits(128),
            _ => return None,
        })
    }

    /// Width in bits; a predicate has one.
    pub fn bits(self) -> u32 {
        match self {
            Self::Pred => 1,
            Self::Bits(bits) => bits,
        }
    }
}

/// An instruction.
#[derive(Debug, Clone)]
pub struct Instr {
    /// `@%p` or `@!%p`.
    pub guard: Option<Guard>,
    /// Opcode with all modifiers, as written.
    pub opcode: String,
    /// Operands in order.
    pub operands: Vec<Operand>,
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// The last `.loc` above it.
    pub loc: Option<Loc>,
    /// Which bytes of a load are used, a bit for each (`.pragma "used_bytes_mask"`).
    pub used_bytes: Option<u32>,
    /// The block that it stands in.
    pub scope: usize,
}

/// A predicate that lets a lane execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The predicate register.
    pub register: String,
    /// Executes where it is false.
    pub negated: bool,
}

/// A place in CUDA source. Of inlined code both places are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loc {
    /// File number of `.file`.
    pub file: u32,
    /// Line, from 1.
    pub line: u32,
    /// File and line of the call that was inlined.
    pub inlined_at: Option<(u32, u32)>,
}

/// An operand (PTX ISA 6).
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// A register, a special register, a symbol or a label; `_` is an unused result.
    Name(String),
    /// An integer constant's 64 bits.
    Int(u64),
    /// An f32 constant's bits (`0f3F800000`).
    F32(u32),
    /// An f64 constant's bits.
    F64(u64),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `[base + offset]`, for tensors with coordinates.
    Address {
        /// A register, symbol or constant.
        base: Box<Operand>,
        /// In bytes.
        offset: i64,
        /// `[tensor, {c0, c1}]`.
        coords: Vec<Operand>,
    },
    /// `!%p`.
    Not(Box<Operand>),
    /// `d|p`: two results.
    Pair(Box<Operand>, Box<Operand>),
}
