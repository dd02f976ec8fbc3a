//! Work that is under way beside the warps: copies and matrix operations whose results come later.
//!
//! The scheduler does it at random times, a wait for it does it at the latest. Operations without a common queue are
//! done in any order (PTX ISA, "Asynchronous operations").
use super::cta::Env;
use super::order::{Agent, Stamp};
use crate::error::Fault;

/// What is to be done.
pub(super) type Work = Box<dyn for<'e, 'a> FnOnce(&'e mut Env<'a>) -> Result<(), Fault>>;

/// The instruction that runs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Origin {
    /// The warp, counted through the cluster.
    pub warp: usize,
    pub lanes: u32,
    pub pc: u32,
}

struct Flight {
    id: u64,
    from: Origin,
    /// CTAs whose shared memory it uses, a bit for each: they must not end before.
    ctas: u32,
    /// Those of one queue are done in the order in which they were issued.
    queue: Option<u64>,
    /// When it is over, where time is estimated.
    due: f64,
    work: Work,
}

/// A copy that uses the shared memory of CTAs, as far as no warp that has exited knows of its end.
struct Open {
    stamp: Stamp,
    rank: usize,
    from: Origin,
}

/// All work that is under way.
#[derive(Default)]
pub(super) struct Flights {
    flights: Vec<Flight>,
    next: u64,
    open: Vec<Open>,
}

impl Flights {
    pub fn len(&self) -> usize {
        self.flights.len()
    }

    pub fn is_under_way(&self, id: u64) -> bool {
        self.flights.iter().any(|f| f.id == id)
    }

    /// The one that is over first, and when.
    pub fn first(&self) -> Option<(usize, f64)> {
        let all = self.flights.iter().enumerate().map(|(index, flight)| (index, flight.due));
        all.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// It has read its shared memory: the CTA may end.
    pub fn leave_shared(&mut self, id: u64) {
        self.flights.iter_mut().filter(|f| f.id == id).for_each(|f| f.ctas = 0);
    }

    /// A warp of a CTA exits: what it has seen is over before the CTA's end.
    pub fn seen(&mut self, rank: usize, seen: impl Fn(Stamp) -> bool) {
        self.open.retain(|copy| copy.rank != rank || !seen(copy.stamp));
    }

    /// Work that uses a CTA's shared memory when its last warp exits, or may do so: no warp has waited for it.
    pub fn using(&self, rank: usize) -> Option<Origin> {
        let under_way = self.flights.iter().find(|f| f.ctas >> rank & 1 == 1).map(|f| f.from);
        under_way.or_else(|| self.open.iter().find(|copy| copy.rank == rank).map(|copy| copy.from))
    }

    /// Takes out a flight, or the one that must be done before it.
    fn take(&mut self, index: usize) -> Flight {
        let queue = self.flights[index].queue;
        let first = queue.and_then(|q| self.flights.iter().position(|f| f.queue == Some(q)));
        self.flights.remove(first.unwrap_or(index))
    }
}

impl Env<'_> {
    /// Has work done later; its number. `ctas`: whose shared memory it uses.
    pub fn later(&mut self, ctas: u32, queue: Option<u64>, work: Work) -> u64 {
        let id = self.flights.next;
        self.flights.next += 1;
        let due = self.time.as_mut().map_or(0.0, |time| time.due());
        self.flights.flights.push(Flight { id, from: self.origin, ctas, queue, due, work });
        id
    }

    /// A copy uses the shared memory of CTAs, a bit for each: they may end when one of their warps knows that it is over.
    pub fn uses(&mut self, ctas: u32, agent: Agent) {
        let (stamp, from) = (self.shared.order.now(agent), self.origin);
        let ranks = (0..self.ctas.len()).filter(|rank| ctas >> rank & 1 == 1);
        self.flights.open.extend(ranks.map(|rank| Open { stamp, rank, from }));
    }

    /// What comes now is one of the flights.
    pub fn arrive(&mut self, index: usize) {
        if let Some(time) = &mut self.time {
            time.arrive(self.flights.flights[index].due);
        }
    }

    /// Does one of the flights.
    pub fn deliver(&mut self, index: usize) -> Result<(), (Fault, Origin)> {
        let flight = self.flights.take(index);
        (flight.work)(self).map_err(|fault| (fault, flight.from))
    }

    /// Does what must be done for the flight of this number to be over.
    pub fn finish_flight(&mut self, id: u64) -> Result<(), Fault> {
        while let Some(index) = self.flights.flights.iter().position(|f| f.id == id) {
            if let Some(time) = &mut self.time {
                time.hold(self.origin.warp, self.flights.flights[index].due);
            }
            self.deliver(index).map_err(|(fault, _)| fault)?;
        }
        Ok(())
    }
}
