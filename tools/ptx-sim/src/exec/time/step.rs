//! What instructions cost: which unit they take for how long, when their results are there, and what they wait for.
//!
//! PTX is not what a GPU executes. Moves, unpacking and address conversions count as nothing, for ptxas removes most of them;
//! 64-bit integers count twice; all else counts as one instruction of its unit.
use crate::ir::tcgen05::Tcgen05;
use crate::ir::{
    FloatBinary, FloatUnary, Inst, Int, IntBinary, IntUnary, Kernel, LaneOp, MatrixOp, Op, PredSlot, Slot, Ternary,
};
use crate::timing::Rates;

/// Units of one of the four parts of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Float,
    Integer,
    Special,
    Shuffle,
    Double,
    Tensor,
}

/// How many there are.
pub(super) const UNITS: usize = 6;

/// What an instruction does to time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Nothing: its result is there when its sources are.
    Free,
    /// Takes a unit for some cycles, and has its result after others.
    Arithmetic {
        unit: Unit,
        cycles: f64,
        latency: f64,
    },
    /// Loads, stores and atomics, which depend on addresses.
    Memory,
    /// Comes after all that the warp has issued before, and before all that follows.
    Ordered,
    /// The same; its results are there as late as those of shared memory.
    OrderedShared,
    /// The same, once stores to shared memory are done.
    Fence,
    /// Tensor memory: waits for loads, for stores.
    WaitLoads,
    WaitStores,
    /// `tcgen05.ld`, `.st`: bytes of a warp.
    TensorLoad {
        bytes: f64,
    },
    TensorStore {
        bytes: f64,
    },
}

impl Kind {
    /// Whether all that the warp has issued must have begun.
    pub fn orders(self) -> bool {
        !matches!(self, Self::Free | Self::Arithmetic { .. } | Self::Memory)
    }
}

/// An instruction.
#[derive(Debug)]
pub(super) struct Step {
    pub kind: Kind,
    pub sources: Box<[Slot]>,
    pub results: Box<[Slot]>,
    pub pred_sources: Box<[PredSlot]>,
    pub pred_results: Box<[PredSlot]>,
}

/// A kernel on a GPU.
pub(crate) struct Plan<'a> {
    pub(super) rates: &'a Rates,
    pub(super) steps: Vec<Step>,
}

impl<'a> Plan<'a> {
    pub fn new(kernel: &Kernel, rates: &'a Rates) -> Self {
        Self { rates, steps: kernel.code.iter().map(|inst| step(inst, rates)).collect() }
    }
}

fn step(inst: &Inst, rates: &Rates) -> Step {
    let results = results(&inst.op);
    let mut sources = inst.uses.to_vec();
    // A register that is read, too, is named once more.
    for result in &results {
        if let Some(at) = sources.iter().position(|slot| slot == result) {
            sources.swap_remove(at);
        }
    }
    let (mut pred_sources, pred_results) = preds(&inst.op);
    pred_sources.extend(inst.guard.map(|guard| guard.slot));
    Step {
        kind: kind(&inst.op, rates),
        sources: sources.into(),
        results: results.into(),
        pred_sources: pred_sources.into(),
        pred_results: pred_results.into(),
    }
}

fn results(op: &Op) -> Vec<Slot> {
    match op {
        Op::Mov { dst, .. }
        | Op::IntBinary { dst, .. }
        | Op::IntUnary { dst, .. }
        | Op::FloatBinary { dst, .. }
        | Op::FloatUnary { dst, .. }
        | Op::Fma { dst, .. }
        | Op::Ternary { dst, .. }
        | Op::Bfi { dst, .. }
        | Op::Lane { dst, .. }
        | Op::Carry { dst, .. }
        | Op::Cvt { dst, .. }
        | Op::CvtPair { dst, .. }
        | Op::Pack { dst, .. }
        | Op::Selp { dst, .. }
        | Op::Timer { dst }
        | Op::Redux { dst, .. }
        | Op::Match { dst, .. }
        | Op::MapAddress { dst, .. }
        | Op::Shuffle { dst, .. }
        | Op::Ballot { dst, .. }
        | Op::ActiveMask { dst }
        | Op::Elect { dst, .. }
        | Op::MbarrierArrive { dst, .. } => vec![*dst],
        Op::Unpack { dsts, .. } | Op::Load { dsts, .. } => dsts.to_vec(),
        Op::Atom(op) => op.dsts.to_vec(),
        Op::Matrix(op) => match &**op {
            MatrixOp::Product(product) => product.d.to_vec(),
            MatrixOp::WmmaLoad(access) => access.registers.to_vec(),
            MatrixOp::Load(rows) => rows.registers.to_vec(),
            _ => Vec::new(),
        },
        Op::Tcgen05(op) => match &**op {
            Tcgen05::Load { dsts, .. } => dsts.to_vec(),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// Predicates that an operation reads and writes.
fn preds(op: &Op) -> (Vec<PredSlot>, Vec<PredSlot>) {
    match op {
        Op::Selp { pred, .. } => (vec![pred.slot], Vec::new()),
        Op::Setp { dst, other, combine, .. } => {
            let read = combine.iter().map(|(_, source)| source.slot).collect();
            (read, std::iter::once(*dst).chain(*other).collect())
        }
        Op::Testp { dst, .. } | Op::PredConst { dst, .. } | Op::MbarrierWait { dst, .. } => (Vec::new(), vec![*dst]),
        Op::PredMov { dst, a } | Op::Vote { dst, a, .. } => (vec![a.slot], vec![*dst]),
        Op::PredLogic { dst, a, b, .. } => (vec![a.slot, b.slot], vec![*dst]),
        Op::Ballot { a, .. } => (vec![a.slot], Vec::new()),
        Op::Elect { elected, .. } => (Vec::new(), vec![*elected]),
        Op::Shuffle { in_range, .. } => (Vec::new(), in_range.iter().copied().collect()),
        Op::Match { pred, .. } => (Vec::new(), pred.iter().copied().collect()),
        _ => (Vec::new(), Vec::new()),
    }
}

fn is_wide(ty: Int) -> bool {
    matches!(ty, Int::U64 | Int::S64)
}

fn kind(op: &Op, rates: &Rates) -> Kind {
    let (lanes, latency) = (&rates.lanes, &rates.latency);
    // A part of a multiprocessor has a quarter of its lanes.
    let on = |unit, rate: f64, latency| Kind::Arithmetic { unit, cycles: 128.0 / rate, latency };
    let times = |kind, factor: f64| match kind {
        Kind::Arithmetic { unit, cycles, latency } => Kind::Arithmetic { unit, cycles: cycles * factor, latency },
        other => other,
    };
    let float = on(Unit::Float, lanes.float, latency.arithmetic);
    let integer = on(Unit::Integer, lanes.integer, latency.arithmetic);
    let multiply = on(Unit::Float, lanes.integer, latency.arithmetic);
    let special = on(Unit::Special, lanes.special, latency.special);
    let conversion = on(Unit::Integer, lanes.conversion, latency.special);
    let slow = on(Unit::Special, lanes.slow, latency.special);
    let double = on(Unit::Double, lanes.double, latency.special);
    let shuffle = on(Unit::Shuffle, lanes.shuffle, latency.shared);
    match op {
        Op::Mov { .. }
        | Op::Unpack { .. }
        | Op::Pack { bits: 32, .. }
        | Op::PredMov { .. }
        | Op::PredConst { .. }
        | Op::MapAddress { .. }
        | Op::ActiveMask { .. }
        | Op::Nop => Kind::Free,
        Op::FloatBinary { op: FloatBinary::Div, .. } => times(special, 2.0),
        Op::FloatBinary { op: FloatBinary::Add | FloatBinary::Sub | FloatBinary::Mul, .. } => float,
        Op::FloatUnary { op, .. } => match op {
            FloatUnary::Neg | FloatUnary::Abs => Kind::Free,
            FloatUnary::Saturate => float,
            _ => special,
        },
        Op::Fma { .. } => float,
        Op::IntBinary { op, ty, .. } => match op {
            IntBinary::MulLo | IntBinary::MulHi | IntBinary::MulWide => {
                times(multiply, if is_wide(*ty) { 3.0 } else { 1.0 })
            }
            // No unit divides: some twenty instructions, one of them a reciprocal.
            IntBinary::Div | IntBinary::Rem => times(integer, 20.0),
            _ if is_wide(*ty) => times(integer, 2.0),
            _ => integer,
        },
        Op::IntUnary { op: IntUnary::Popc | IntUnary::Clz | IntUnary::Brev, .. } => slow,
        Op::Ternary { op: Ternary::MadLo(_) | Ternary::MadWide(_), .. } => multiply,
        Op::Lane { op: LaneOp::Half(_) | LaneOp::Rounded { .. }, .. } => float,
        Op::Lane { op: LaneOp::Double(..), .. } => double,
        Op::Lane { op: LaneOp::Pair { .. } | LaneOp::Fp8Pair { .. } | LaneOp::Fp8FromPair { .. }, .. }
        | Op::Cvt { .. }
        | Op::CvtPair { .. } => conversion,
        Op::Redux { .. } | Op::Match { .. } => slow,
        Op::Shuffle { .. } => shuffle,
        Op::Load { .. } | Op::Store { .. } | Op::Atom(_) | Op::CpAsync { .. } => Kind::Memory,
        Op::Matrix(op) => of_matrix(op, rates),
        Op::Tcgen05(op) => of_tensor_memory(op),
        Op::ProxyFence => Kind::Fence,
        Op::MbarrierArrive { .. } | Op::MbarrierWait { .. } => Kind::OrderedShared,
        Op::Branch { .. }
        | Op::Exit
        | Op::Trap
        | Op::CpAsyncCommit
        | Op::CpAsyncWait { .. }
        | Op::BarSync { .. }
        | Op::ClusterArrive { .. }
        | Op::ClusterWait { .. }
        | Op::MbarrierInitFence
        | Op::WarpSync { .. }
        | Op::MbarrierInit { .. }
        | Op::MbarrierComplete { .. }
        | Op::MbarrierInvalidate { .. }
        | Op::MbarrierExpect { .. }
        | Op::MbarrierArriveCopies { .. }
        | Op::Bulk(_)
        | Op::Registers { .. } => Kind::Ordered,
        // Integers, predicates, votes, selections, packing.
        _ => integer,
    }
}

fn of_matrix(op: &MatrixOp, rates: &Rates) -> Kind {
    match op {
        MatrixOp::Product(product) => {
            let shape = product.shape;
            let scale = product.a_elem.bits() as f64 / 16.0;
            let rate = rates.products * rates.synchronous_products / 4.0;
            let cycles = (shape.m * shape.n * shape.k) as f64 * scale / rate;
            Kind::Arithmetic { unit: Unit::Tensor, cycles, latency: rates.latency.product }
        }
        MatrixOp::Load(_) | MatrixOp::Store(_) | MatrixOp::WmmaLoad(_) | MatrixOp::WmmaStore(_) => Kind::Memory,
        _ => Kind::Ordered,
    }
}

fn of_tensor_memory(op: &Tcgen05) -> Kind {
    match op {
        Tcgen05::Load { dsts, .. } => Kind::TensorLoad { bytes: 128.0 * dsts.len() as f64 },
        Tcgen05::Store { srcs, .. } => Kind::TensorStore { bytes: 128.0 * srcs.len() as f64 },
        Tcgen05::WaitLoads => Kind::WaitLoads,
        Tcgen05::WaitStores => Kind::WaitStores,
        _ => Kind::Ordered,
    }
}
