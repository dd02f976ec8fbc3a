//! The operations.
use super::*;
use crate::memory::Strength;

/// For whom an operation on an mbarrier is a release or an acquire (PTX ISA, "Scope").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Cta,
    Cluster,
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
    /// What the others do not cover; of unused sources nothing is read.
    Lane {
        op: LaneOp,
        dst: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Carry {
        op: Carry,
        dst: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Testp {
        class: Class,
        ty: Ty,
        dst: PredSlot,
        a: Slot,
    },
    Cvt {
        how: Conversion,
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
        strength: Strength,
        ty: Ty,
        /// Width of the registers, which a signed value fills with its sign.
        bits: u32,
        /// A bit for each byte that the kernel uses.
        used: u32,
        dsts: Box<[Slot]>,
        addr: Addr,
    },
    Store {
        space: Space,
        strength: Strength,
        ty: Ty,
        srcs: Box<[Slot]>,
        addr: Addr,
    },
    Atom(Box<AtomOp>),
    Redux {
        op: Atom,
        signed: bool,
        dst: Slot,
        a: Slot,
        mask: Slot,
    },
    Match {
        all: bool,
        dst: Slot,
        pred: Option<PredSlot>,
        a: Slot,
        mask: Slot,
    },
    Trap,
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
    /// The warp's lanes together.
    Matrix(Box<MatrixOp>),
    Branch {
        target: u32,
    },
    Exit,
    BarSync {
        id: Slot,
        count: Option<Slot>,
        waits: bool,
    },
    ClusterArrive {
        releases: bool,
        aligned: bool,
    },
    ClusterWait {
        aligned: bool,
    },
    /// `fence.proxy.async`.
    ProxyFence,
    /// `fence.mbarrier_init`.
    MbarrierInitFence,
    /// `mapa`: the address in the shared memory of the CTA of a rank.
    MapAddress {
        dst: Slot,
        addr: Addr,
        rank: Slot,
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
        releases: Option<Scope>,
    },
    /// Bytes that are announced have come without a copy.
    MbarrierComplete {
        addr: Addr,
        bytes: Slot,
    },
    MbarrierInvalidate {
        addr: Addr,
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
        acquires: Option<Scope>,
    },
    /// Arrives once the thread's earlier `cp.async` copies are done.
    MbarrierArriveCopies {
        addr: Addr,
        counted: bool,
    },
    Tcgen05(Box<tcgen05::Tcgen05>),
    Bulk(Box<BulkOp>),
    /// `setmaxnreg`: registers of each thread from now on.
    Registers {
        count: u32,
        more: bool,
    },
    /// `elect.sync`: one lane of the mask.
    Elect {
        dst: Slot,
        elected: PredSlot,
        mask: Slot,
    },
    Nop,
}
