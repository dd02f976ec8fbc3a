//! Decoded kernels: operations whose operands are slots of a warp's register file.
//!
//! Every source is a slot. Constants, symbols' addresses and special registers that do not change while a thread lives
//! are slots, too, filled when the warp starts. A register holds its value zero-extended to 64 bits; predicates are
//! kept apart, as one mask of lanes each.
mod bulk;
mod lane;
mod matrix;
mod op;
pub(crate) mod tcgen05;

pub(crate) use bulk::{BulkOp, Target, TensorBox};
pub(crate) use lane::{
    Carry, CarryKind, Clamp, Class, Conversion, DoubleKind, Fp8, HalfKind, HalfOp, IntOp, LaneOp, RoundedKind, Set,
};
pub(crate) use matrix::{AsyncProduct, Elem, Layout, MatrixOp, Product, Rows, Shape, SourceA, WmmaAccess};
pub(crate) use op::{Op, Scope};

use crate::parse::Loc;

/// Index of a register in the warp's register file.
pub(crate) type Slot = u32;
/// Index of a predicate.
pub(crate) type PredSlot = u32;

/// The slot for unused results (`_`).
pub(crate) const SINK: Slot = 0;

/// A predicate read, maybe negated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PredSource {
    pub slot: PredSlot,
    pub negated: bool,
}

/// A kernel ready to run.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub code: Vec<Inst>,
    /// Slots of the register file, constants included.
    pub slots: usize,
    pub preds: usize,
    pub constants: Vec<(Slot, u64)>,
    pub specials: Vec<(Slot, Special)>,
    /// Offset and size of each parameter.
    pub params: Vec<(u64, u64)>,
    /// Bytes of local memory of each thread.
    pub local: u64,
    /// Bytes of static shared memory; dynamic shared memory follows.
    pub static_shared: u64,
    pub required_threads: Option<[u32; 3]>,
    pub max_threads: Option<[u32; 3]>,
    pub max_registers: Option<u32>,
    /// CTAs of a cluster.
    pub cluster: Option<[u32; 3]>,
}

impl Kernel {
    /// Whether it has `tcgen05` instructions.
    pub fn uses_tensor_memory(&self) -> bool {
        self.code.iter().any(|inst| matches!(inst.op, Op::Tcgen05(_)))
    }
}

/// An instruction.
#[derive(Debug, Clone)]
pub(crate) struct Inst {
    pub guard: Option<PredSource>,
    pub op: Op,
    /// Registers that a `wgmma` has, too, unless it is one itself.
    pub touches: Box<[Slot]>,
    /// All registers that it reads and writes, as often as it names them.
    pub uses: Box<[Slot]>,
    pub line: u32,
    pub loc: Option<Loc>,
}

/// Special registers that are constant in a thread (PTX ISA 10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    LaneId,
    WarpId,
    /// `%lanemask_lt` and so on: the comparison's name.
    LaneMask(&'static str),
    ClusterId(usize),
    NclusterId(usize),
    ClusterCtaid(usize),
    ClusterNctaid(usize),
    ClusterCtarank,
    ClusterNctarank,
    /// The address of a byte of the CTA's shared memory.
    Shared(u64),
}

/// Integer types. Untyped bits count as unsigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Int {
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
}

/// Types that `cvt`, `setp` and memory know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ty {
    U8,
    S8,
    Int(Int),
    F16,
    Bf16,
    F32,
    F64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntBinary {
    Add,
    Sub,
    MulLo,
    MulHi,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntUnary {
    Not,
    Neg,
    Abs,
    Popc,
    Clz,
    Brev,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatBinary {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    CopySign,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatUnary {
    Neg,
    Abs,
    Saturate,
    Exp2,
    Log2,
    Recip,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Tanh,
}

/// Rounding (PTX ISA 6.5, rounding modifiers).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ternary {
    MadLo(Int),
    MadWide(Int),
    BfeU32,
    BfeS32,
    BfeU64,
    BfeS64,
    Prmt,
    ShfLeft { wrap: bool },
    ShfRight { wrap: bool },
    Lop3(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// True also where an operand is NaN.
    Unordered(&'static Compare),
    /// Neither is NaN.
    Num,
    /// One is NaN.
    Nan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    /// The CTA's own shared memory.
    Shared,
    /// That of the cluster's CTAs (`.shared::cluster`).
    Cluster,
    Param,
    Generic,
    Local,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addr {
    pub base: Slot,
    pub offset: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Atom {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomTy {
    Int(Int),
    F32,
    F64,
    Half { bf16: bool, packed: bool },
}

/// `atom` or `red`; of `red` there are no destinations.
#[derive(Debug, Clone)]
pub(crate) struct AtomOp {
    pub op: Atom,
    pub ty: AtomTy,
    pub space: Space,
    pub dsts: Box<[Slot]>,
    pub addr: Addr,
    /// More than one of vectors.
    pub a: Box<[Slot]>,
    pub b: Slot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VoteMode {
    Any,
    All,
    Uni,
}
