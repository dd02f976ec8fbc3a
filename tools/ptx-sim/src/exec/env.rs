//! What the warps of a cluster share.
use super::barriers::{Barriers, ClusterBarrier};
use super::flights::{Flights, Origin};
use super::global::Global;
use super::mbarriers::Mbarriers;
use super::order::Agent;
use super::shared::Shared;
use super::tcgen05::cores::TensorCores;
use super::time::Time;
use super::warpgroup::Warpgroup;
use crate::adversary::Adversary;
use crate::coverage::Coverage;
use crate::error::Fault;
use crate::memory::VARIABLES;
use std::time::{Duration, Instant};

/// Of so many turns of a warp that accesses what other devices see one is followed by a pause.
const PAUSES: u64 = 256;

/// Such turns, one after the other, that are not yet thought to be a wait.
const PATIENCE: u64 = 512;

/// Microseconds of a pause at most.
const MOST_PAUSE: u64 = 1000;

/// What is to be done beside the warps.
pub(super) type Work = Box<dyn for<'e, 'a> FnOnce(&'e mut Env<'a>) -> Result<(), Fault>>;

/// What the warps of a CTA share.
pub(super) struct Cta {
    pub position: [u32; 3],
    pub barriers: Barriers,
    /// Registers, for each lane of a warp, that warps have given back (`setmaxnreg.dec`).
    pub free_registers: u32,
    /// Warps that have not exited.
    pub live: usize,
}

/// What the warps of a cluster share.
pub(super) struct Env<'a> {
    pub global: Global<'a>,
    pub coverage: Option<&'a Coverage>,
    /// The module's variables: who touches them is not noted.
    pub variables: Global<'a>,
    pub params: &'a [u8],
    pub shared: Shared,
    pub ctas: Vec<Cta>,
    pub cluster: ClusterBarrier,
    pub mbarriers: Mbarriers,
    pub flights: Flights<Work>,
    /// Warp instructions so far.
    pub executed: u64,
    /// Floating or integer operations of matrix instructions so far; a multiply-add is two.
    pub matrix_flops: u64,
    pub tensor: TensorCores,
    /// Bytes that `tcgen05.ld`, `.st` and `.cp` moved.
    pub tensor_bytes: u64,
    /// Warps of a CTA.
    pub warps: usize,
    /// The warpgroups of all CTAs, as many for each.
    pub warpgroups: Vec<Warpgroup>,
    /// The instruction that runs.
    pub origin: Origin,
    pub random: Random,
    pub adversary: Adversary,
    /// Which lane is elected, by its place among the members.
    pub election: u64,
    /// Since when there are other launches beside this one, on the clock of this machine.
    pub beside: Option<Instant>,
    /// Whether memory was accessed with the scope of the system since this was last looked at.
    pub touches_peers: bool,
    /// Turns of warps, one after the other, in each of which it was.
    pub waiting: u64,
    /// Where the time is estimated.
    pub time: Option<Box<Time<'a>>>,
}

impl<'a> Env<'a> {
    /// What timers say: warp instructions; beside other launches, whose instructions are not counted together, nanoseconds.
    pub fn timer(&self) -> u64 {
        self.beside.map_or(self.executed, |since| since.elapsed().as_nanos() as u64)
    }

    /// Between two accesses that others see, time passes: now and then so much that a launch on another device gets far. Warps that
    /// have nothing but such accesses for long wait for one, which may need the processor.
    pub fn pause(&mut self) {
        if self.beside.is_none() {
            return;
        }
        self.waiting = if std::mem::take(&mut self.touches_peers) { self.waiting + 1 } else { 0 };
        if self.waiting > PATIENCE {
            std::thread::yield_now();
        } else if self.waiting > 0 && self.random.below(PAUSES) == 0 {
            std::thread::sleep(Duration::from_micros(self.random.below(MOST_PAUSE)));
        }
    }

    /// The memory of a global address: the module's variables have one of their own.
    pub fn memory(&self, address: u64) -> &Global<'a> {
        if address >> 44 == VARIABLES >> 44 { &self.variables } else { &self.global }
    }

    /// Whether a warpgroup's products can be waited for, up to this one: all warps have issued it, and it is over.
    pub fn has_products(&self, warpgroup: usize, issued: u64) -> bool {
        let over = self.time.as_ref().is_none_or(|time| time.has_done(warpgroup, issued));
        over && self.warpgroups[warpgroup].passed(issued)
    }

    /// Has work done later; its number. `ctas`: whose shared memory it uses.
    pub fn later(&mut self, ctas: u32, queue: Option<u64>, work: Work) -> u64 {
        let due = self.time.as_mut().map_or(0.0, |time| time.due());
        self.flights.add(self.origin, (ctas, queue), due, work)
    }

    /// A copy uses the shared memory of CTAs, a bit for each: they may end when one of their warps knows that it is over.
    pub fn uses(&mut self, ctas: u32, agent: Agent) {
        let (stamp, from) = (self.shared.order.now(agent), self.origin);
        for rank in (0..self.ctas.len()).filter(|rank| ctas >> rank & 1 == 1) {
            self.flights.open(stamp, rank, from);
        }
    }

    /// The lane that is elected among these.
    pub fn leader(&self, members: u32) -> usize {
        let mut lanes = (0..32).filter(|lane| members >> lane & 1 == 1);
        let skip = if self.adversary.lanes { self.election % u64::from(members.count_ones().max(1)) } else { 0 };
        lanes.nth(skip as usize).unwrap_or(0)
    }

    /// What comes now is one of the flights.
    pub fn arrive(&mut self, index: usize) {
        if let Some(time) = &mut self.time {
            time.arrive(self.flights.due(index));
        }
    }

    /// Does one of the flights.
    pub fn deliver(&mut self, index: usize) -> Result<(), (Fault, Origin)> {
        let flight = self.flights.take(index);
        // What it has done later comes from the same instruction.
        let running = std::mem::replace(&mut self.origin, flight.from);
        let done = (flight.work)(self);
        self.origin = running;
        done.map_err(|fault| (fault, flight.from))
    }

    /// Does what must be done for the flight of this number to be over.
    pub fn finish_flight(&mut self, id: u64) -> Result<(), Fault> {
        while let Some((index, due)) = self.flights.find(id) {
            if let Some(time) = &mut self.time {
                time.hold(self.origin.warp, due);
            }
            self.deliver(index).map_err(|(fault, _)| fault)?;
        }
        Ok(())
    }
}

/// xorshift64*: a small generator, so that a seed means the same everywhere.
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Zero is the one state that the generator never leaves.
        Self(seed | 1)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    }
}
