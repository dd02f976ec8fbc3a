//! An estimate of the time that a cluster takes on a GPU, from what its instructions and copies occupy.
//!
//! Every warp has a time, every unit of a multiprocessor a time from which on it is free, and what happens first by these
//! times is simulated first. So barriers, mbarriers and waits carry time as they do on hardware: who waits goes on when the
//! last arrival has come, and what is on the critical path shows.
//!
//! What is taken to be:
//! - A warp issues one instruction in a cycle, in the order of PTX. One whose operands are missing does not hold up those
//!   behind it, as if ptxas had ordered them ideally, but only up to the next branch or synchronisation: there all that came
//!   before must have begun.
//! - A unit serves what was issued first.
//! - The warpgroups of a CTA take turns on the tensor cores, instruction by instruction. That is what a profile of our Hopper
//!   kernel shows (`kernels/src/mla_decode/sm90/README.md`): scores take as long as they and the output's products together.
//! - A product reads its factors from shared memory while it runs, a copy writes there when it ends, and both share the 128
//!   bytes of a cycle with the warps' loads and stores, conflicts of banks counted.
//! - All of a multiprocessor's loads share its part of the bandwidth, evenly. What a CTA has not touched before comes from
//!   main memory, what it has from L1.
//! - An arrival is seen when a wait has gone through shared memory.
//!
//! Not there are: the instruction cache, conflicts of register banks, delays of branches and of barriers themselves,
//! distributed shared memory's own network, TLBs.
mod memory;
mod step;
mod traffic;
mod units;

use super::next::Next;
use super::warp::Warp;
use crate::ir::Op;
use crate::timing::Rates;
use memory::Access;
use std::collections::VecDeque;
use step::Kind;
pub(crate) use step::Plan;
use units::Multiprocessor;

/// A warp's times.
struct WarpTime {
    /// When it can issue its next instruction.
    cursor: f64,
    /// When the latest of its instructions began.
    begun: f64,
    /// When registers and predicates have their values.
    registers: Vec<f64>,
    preds: Vec<f64>,
    /// When its stores to shared memory, loads and stores of tensor memory, and asynchronous copies are over.
    stored: f64,
    tensor_loads: f64,
    tensor_stores: f64,
    copies: f64,
    waits: bool,
}

/// What was used, in cycles and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Used {
    pub end: f64,
    pub tensor: f64,
    pub shared: f64,
    pub loaded: f64,
    pub stored: f64,
}

/// The time of a cluster.
pub(super) struct Time<'a> {
    plan: &'a Plan<'a>,
    /// Of what is done now.
    now: f64,
    warps: Vec<WarpTime>,
    multiprocessors: Vec<Multiprocessor>,
    /// Products that are over, of each warpgroup of the cluster.
    done: Vec<u64>,
    /// When the work that is put under way next will be over.
    due: f64,
    used: Used,
}

impl<'a> Time<'a> {
    pub fn new(plan: &'a Plan<'a>, ctas: usize, warps: &[Warp]) -> Self {
        let each = warps.len() / ctas;
        let groups = each.div_ceil(4);
        let warp = |warp: &Warp| WarpTime {
            cursor: 0.0,
            begun: 0.0,
            registers: vec![0.0; warp.regs.slots()],
            preds: vec![0.0; warp.regs.preds()],
            stored: 0.0,
            tensor_loads: 0.0,
            tensor_stores: 0.0,
            copies: 0.0,
            waits: false,
        };
        let multiprocessor = |_| Multiprocessor { queues: vec![VecDeque::new(); groups], ..Multiprocessor::default() };
        Self {
            plan,
            now: 0.0,
            warps: warps.iter().map(warp).collect(),
            multiprocessors: (0..ctas).map(multiprocessor).collect(),
            done: vec![0; ctas * groups],
            due: 0.0,
            used: Used::default(),
        }
    }

    fn rates(&self) -> &'a Rates {
        self.plan.rates
    }

    /// A warp cannot go on.
    pub fn block(&mut self, warp: usize) {
        self.warps[warp].waits = true;
    }

    /// A warp can go on, at this instruction: when it does.
    pub fn wake(&mut self, warp: usize, pc: u32) -> f64 {
        let now = self.now;
        let times = &mut self.warps[warp];
        if std::mem::take(&mut times.waits) {
            times.cursor = times.cursor.max(now);
        }
        self.start(warp, pc)
    }

    /// When a warp issues an instruction.
    fn start(&self, warp: usize, pc: u32) -> f64 {
        let (times, step) = (&self.warps[warp], &self.plan.steps[pc as usize]);
        if !step.kind.orders() {
            return times.cursor;
        }
        let start = times.cursor.max(times.begun).max(self.operands(warp, pc));
        match step.kind {
            Kind::Fence => start.max(times.stored),
            Kind::WaitLoads => start.max(times.tensor_loads),
            Kind::WaitStores => start.max(times.tensor_stores),
            _ => start,
        }
    }

    /// When an instruction has its operands.
    fn operands(&self, warp: usize, pc: u32) -> f64 {
        let (times, step) = (&self.warps[warp], &self.plan.steps[pc as usize]);
        let registers = step.sources.iter().map(|slot| times.registers[*slot as usize]);
        let preds = step.pred_sources.iter().map(|slot| times.preds[*slot as usize]);
        registers.chain(preds).fold(0.0, f64::max)
    }

    /// What comes first: one of the warps that can go on, with the times of [`Self::wake`], or other work: of that under way beside them what is over
    /// first, and when.
    pub fn first(&self, warps: impl Iterator<Item = (usize, f64)>, flight: Option<(usize, f64)>) -> Option<Next> {
        let warps = warps.map(|(warp, at)| (at, Next::Warp(warp)));
        let tensor = self.multiprocessors.iter().enumerate();
        let tensor = tensor.filter_map(|(cta, m)| m.next_product().map(|at| (at, Next::Tensor(cta))));
        let flight = flight.map(|(index, due)| (due, Next::Flight(index)));
        tensor.chain(flight).chain(warps).min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, next)| next)
    }

    /// Work that is under way is over now.
    pub fn arrive(&mut self, due: f64) {
        self.now = self.now.max(due);
    }

    /// When the work that is put under way now will be over: what its kind has said, else now.
    pub fn due(&mut self) -> f64 {
        std::mem::take(&mut self.due).max(self.now)
    }

    /// A warp waits until then.
    pub fn hold(&mut self, warp: usize, until: f64) {
        let times = &mut self.warps[warp];
        times.cursor = times.cursor.max(until);
    }

    /// What the cluster used.
    pub fn used(&self) -> Used {
        let stored = self.multiprocessors.iter().map(|m| m.stores).filter(|at| *at > 0.0);
        let end = stored.map(|at| at + self.rates().latency.l2).fold(self.used.end, f64::max);
        Used { end, ..self.used }
    }
}

/// A warp issues an instruction, for these lanes.
pub(super) fn issue(warp: &Warp, time: &mut Time, op: &Op, (pc, mask): (u32, u32)) {
    let access = match time.plan.steps[pc as usize].kind {
        Kind::Memory if mask != 0 => Some(Access::of(warp, op, mask)),
        _ => None,
    };
    time.issue(warp, pc, access);
    if let Op::CpAsyncWait { .. } = op {
        time.hold(warp.agent.index(), time.warps[warp.agent.index()].copies);
    }
}

impl Time<'_> {
    fn issue(&mut self, warp: &Warp, pc: u32, access: Option<Access>) {
        let plan = self.plan;
        let (index, step) = (warp.agent.index(), &plan.steps[pc as usize]);
        let operands = self.operands(index, pc);
        if step.kind == Kind::Free {
            self.results(index, pc, operands);
            return;
        }
        let (cta, part) = (warp.rank, warp.index % 4);
        let at = self.start(index, pc).max(self.multiprocessors[cta].parts[part].issue);
        self.multiprocessors[cta].parts[part].issue = at + 1.0;
        self.now = self.now.max(at);
        self.warps[index].cursor = at + 1.0;
        let latency = &plan.rates.latency;
        let (begun, ready) = match step.kind {
            Kind::Arithmetic { unit, cycles, latency } => {
                let free = &mut self.multiprocessors[cta].parts[part].units[unit as usize];
                let begins = free.max(at);
                *free = begins + cycles;
                let begins = begins.max(operands);
                (begins, begins + latency)
            }
            Kind::Memory => match access {
                Some(access) => self.access(index, cta, (at, operands), &access),
                None => (at, at),
            },
            Kind::OrderedShared => (at, at + latency.shared),
            Kind::TensorLoad { bytes } => {
                let end = self.tensor_memory(cta, part, bytes) + latency.tensor_memory;
                self.warps[index].tensor_loads = end;
                (at, end)
            }
            Kind::TensorStore { bytes } => {
                let end = self.tensor_memory(cta, part, bytes) + latency.tensor_memory;
                self.warps[index].tensor_stores = end;
                (at, end)
            }
            _ => (at, at + latency.arithmetic),
        };
        let times = &mut self.warps[index];
        times.begun = if step.kind.orders() { at } else { times.begun.max(begun) };
        // A warp ends when what it has loaded is there.
        let over = if step.kind == Kind::Memory { ready } else { begun };
        self.used.end = self.used.end.max(over);
        self.results(index, pc, ready);
    }

    fn results(&mut self, warp: usize, pc: u32, ready: f64) {
        let step = &self.plan.steps[pc as usize];
        let times = &mut self.warps[warp];
        step.results.iter().for_each(|slot| times.registers[*slot as usize] = ready);
        step.pred_results.iter().for_each(|slot| times.preds[*slot as usize] = ready);
    }

    fn tensor_memory(&mut self, cta: usize, part: usize, bytes: f64) -> f64 {
        let cycles = bytes / self.rates().tensor_memory_bytes.max(1.0);
        let free = &mut self.multiprocessors[cta].parts[part].tensor_memory;
        *free = free.max(self.now) + cycles;
        *free
    }

    /// An access that is issued and has its operands at these times: when it begins, and when its results are there.
    fn access(&mut self, warp: usize, cta: usize, (at, operands): (f64, f64), access: &Access) -> (f64, f64) {
        let latency = &self.plan.rates.latency;
        let mut begun = at.max(operands);
        let mut ready = begun + latency.arithmetic;
        if access.wavefronts > 0 {
            let bytes = f64::from(access.wavefronts) * self.rates().shared_bytes;
            let end = self.shared(cta, at, bytes).max(begun);
            begun = begun.max(end - f64::from(access.wavefronts));
            ready = end + latency.shared;
            if access.writes {
                self.warps[warp].stored = ready;
            }
        }
        if access.sectors.is_empty() {
            return (begun, ready);
        }
        if access.writes && !access.copies {
            let end = self.store(cta, access.bytes());
            return (begun, end.max(begun));
        }
        let lines = &mut self.multiprocessors[cta].lines;
        let new = access.sectors.iter().filter(|sector| lines.insert(**sector)).count();
        ready = begun + latency.l1;
        if new > 0 {
            let end = self.load(cta, (new as u64 * memory::SECTOR) as f64);
            ready = ready.max(end.max(begun) + latency.memory);
        }
        if access.copies {
            let copies = &mut self.warps[warp].copies;
            *copies = copies.max(ready);
        }
        (begun, ready)
    }
}
