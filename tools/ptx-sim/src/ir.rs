//! Decoded kernels: operations whose operands are slots of a warp's register file.
//!
//! Every source is a slot. Constants, symbols' addresses and special registers that do not change while a thread lives
//! are slots, too, filled when the warp starts. A register holds its value zero-extended to 64 bits; predicates are
//! kept apart, as one mask of lanes each.
use crate::parse::Loc;

/// Index of a register in the warp's register file.
pub(crate) type Slot = u32;
/// Index of a predicate.
pub(crate) type PredSlot = u32;

/// The slot for results that nobody wants (`_`).
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
    /// Bytes of static shared memory; dynamic shared memory follows.
    pub static_shared: u64,
    pub required_threads: Option<[u32; 3]>,
    pub max_threads: Option<[u32; 3]>,
}

/// An instruction.
#[derive(Debug, Clone)]
pub(crate) struct Inst {
    pub guard: Option<PredSource>,
    pub op: Op,
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
    Zero,
    One,
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
}

/// Rounding (PTX ISA 9.7.3, 6.5.2).
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
    Shared,
    Param,
    Generic,
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomTy {
    Int(Int),
    F32,
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

/// Operations. The names are those of PTX; PTX ISA 9.7 has the semantics.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Mov {
        dst: Slot,
        a: Slot,
    },
    IntBinary {
        op: IntBinary,
        ty: Int,
        dst: Slot,
        a: Slot,
        b: Slot,
    },
    IntUnary {
        op: IntUnary,
        ty: Int,
        dst: Slot,
        a: Slot,
    },
    FloatBinary {
        op: FloatBinary,
        ftz: bool,
        dst: Slot,
        a: Slot,
        b: Slot,
    },
    FloatUnary {
        op: FloatUnary,
        ftz: bool,
        dst: Slot,
        a: Slot,
    },
    Fma {
        round: Round,
        ftz: bool,
        dst: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Ternary {
        op: Ternary,
        dst: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Bfi {
        wide: bool,
        dst: Slot,
        a: Slot,
        b: Slot,
        pos: Slot,
        len: Slot,
    },
    Cvt {
        to: Ty,
        from: Ty,
        round: Round,
        sat: bool,
        dst: Slot,
        a: Slot,
    },
    /// Two floats to a packed pair; `high` comes first in PTX.
    CvtPair {
        to: Ty,
        dst: Slot,
        high: Slot,
        low: Slot,
    },
    /// `mov.b32 d, {a, b}`: parts of `bits` each, the lowest first.
    Pack {
        bits: u32,
        dst: Slot,
        parts: Box<[Slot]>,
    },
    Unpack {
        bits: u32,
        dsts: Box<[Slot]>,
        a: Slot,
    },
    Selp {
        dst: Slot,
        a: Slot,
        b: Slot,
        pred: PredSource,
    },
    Setp {
        cmp: Compare,
        ty: Ty,
        ftz: bool,
        dst: PredSlot,
        other: Option<PredSlot>,
        a: Slot,
        b: Slot,
        combine: Option<(Logic, PredSource)>,
    },
    PredMov {
        dst: PredSlot,
        a: PredSource,
    },
    PredConst {
        dst: PredSlot,
        value: bool,
    },
    PredLogic {
        op: Logic,
        dst: PredSlot,
        a: PredSource,
        b: PredSource,
    },
    Timer {
        dst: Slot,
    },
    Load {
        space: Space,
        ty: Ty,
        dsts: Box<[Slot]>,
        addr: Addr,
    },
    Store {
        space: Space,
        ty: Ty,
        srcs: Box<[Slot]>,
        addr: Addr,
    },
    Atom {
        op: Atom,
        ty: AtomTy,
        space: Space,
        dst: Slot,
        addr: Addr,
        a: Slot,
        b: Slot,
    },
    CpAsync {
        bytes: u64,
        dst: Addr,
        src: Addr,
        size: Option<Slot>,
    },
    CpAsyncCommit,
    /// Waits until at most `pending` groups are under way.
    CpAsyncWait {
        pending: usize,
    },
    LdMatrix {
        transposed: bool,
        dsts: Box<[Slot]>,
        addr: Addr,
    },
    Branch {
        target: u32,
    },
    Exit,
    BarSync {
        id: Slot,
        count: Option<Slot>,
        waits: bool,
    },
    WarpSync {
        mask: Slot,
    },
    Shuffle {
        mode: ShuffleMode,
        dst: Slot,
        in_range: Option<PredSlot>,
        a: Slot,
        b: Slot,
        c: Slot,
        mask: Slot,
    },
    Vote {
        mode: VoteMode,
        dst: PredSlot,
        a: PredSource,
        mask: Slot,
    },
    Ballot {
        dst: Slot,
        a: PredSource,
        mask: Slot,
    },
    ActiveMask {
        dst: Slot,
    },
    MbarrierInit {
        addr: Addr,
        count: Slot,
    },
    /// `expect`: bytes added to the transaction count first.
    MbarrierArrive {
        dst: Slot,
        addr: Addr,
        count: Option<Slot>,
        expect: Option<Slot>,
    },
    MbarrierExpect {
        addr: Addr,
        bytes: Slot,
    },
    MbarrierWait {
        dst: PredSlot,
        addr: Addr,
        parity: Slot,
        blocks: bool,
    },
    /// Arrives once the thread's earlier `cp.async` copies are done.
    MbarrierArriveCopies {
        addr: Addr,
        counted: bool,
    },
    Nop,
}
