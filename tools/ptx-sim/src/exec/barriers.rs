//! Named barriers of a CTA and the barrier of a cluster (PTX ISA, `bar` and `barrier.cluster`).
use super::order::{Agent, Clock, Order};
use crate::error::Fault;

/// A named barrier: arrivals of the current generation.
#[derive(Default)]
struct Named {
    arrived: u64,
    /// Threads that it waits for, if the program said so.
    expected: Option<u64>,
    generation: u64,
    /// What the arrivals release, and who acquires it.
    clock: Clock,
    waiting: Vec<Agent>,
}

/// A warp's arrival.
pub(super) struct Arrival {
    pub by: Agent,
    pub count: Option<u64>,
    pub waits: bool,
}

/// The 16 named barriers.
pub(crate) struct Barriers {
    named: [Named; 16],
    /// Threads of the warps that have not exited.
    pub live: u64,
}

impl Barriers {
    pub fn new(live: u64) -> Self {
        Self { named: std::array::from_fn(|_| Named::default()), live }
    }

    /// A warp arrives; the generation that it belongs to.
    pub fn arrive(&mut self, order: &mut Order, id: u64, arrival: &Arrival) -> Result<u64, Fault> {
        let error = |problem: String| Fault::Barrier { id, problem };
        let (live, expected) = (self.live, arrival.count);
        let barrier = self.named.get_mut(id as usize).ok_or_else(|| error("there are 16 barriers".into()))?;
        if let Some(count) = expected.filter(|c| c % 32 != 0 || *c == 0) {
            return Err(error(format!("a count of {count}, expected a multiple of 32")));
        }
        if barrier.arrived > 0 && barrier.expected != expected {
            return Err(error(format!("a count of {expected:?} after one of {:?}", barrier.expected)));
        }
        let generation = barrier.generation;
        barrier.expected = expected;
        barrier.arrived += 32;
        if barrier.arrived > expected.unwrap_or(live) {
            return Err(error(format!("{} threads arrived, {:?} were expected", barrier.arrived, expected)));
        }
        order.release(arrival.by, &mut barrier.clock);
        if arrival.waits {
            barrier.waiting.push(arrival.by);
        }
        barrier.complete(order, live);
        Ok(generation)
    }

    /// A warp has exited: barriers over the whole CTA do not wait for it.
    pub fn leave(&mut self, order: &mut Order) {
        self.live -= 32;
        for barrier in &mut self.named {
            barrier.complete(order, self.live);
        }
    }

    /// Whether the generation is complete.
    pub fn passed(&self, id: u64, generation: u64) -> bool {
        self.named[id as usize].generation > generation
    }

    /// "64 of 128 threads".
    pub fn state(&self, id: u64) -> String {
        let barrier = &self.named[id as usize];
        format!("{} of {} threads", barrier.arrived, barrier.expected.unwrap_or(self.live))
    }
}

impl Named {
    fn complete(&mut self, order: &mut Order, live: u64) {
        if self.arrived > 0 && self.arrived == self.expected.unwrap_or(live) {
            self.arrived = 0;
            self.generation += 1;
            for agent in self.waiting.drain(..) {
                order.acquire(agent, &self.clock);
            }
            self.clock = Clock::default();
        }
    }
}

/// The barrier of a cluster: threads arrive and, later, wait.
pub(crate) struct ClusterBarrier {
    arrived: u64,
    live: u64,
    pub generation: u64,
    clock: Clock,
    done: Clock,
}

impl ClusterBarrier {
    pub fn new(threads: u64) -> Self {
        Self { arrived: 0, live: threads, generation: 0, clock: Clock::default(), done: Clock::default() }
    }

    /// Threads of a warp arrive. Without `releases` (`.relaxed`) nothing is ordered by it.
    pub fn arrive(&mut self, order: &mut Order, by: Agent, threads: u64, releases: bool) {
        if releases {
            order.release(by, &mut self.clock);
        }
        self.arrived += threads;
        self.complete();
    }

    /// Threads have exited, some after they arrived: the barrier does not wait for them.
    pub fn leave(&mut self, threads: u32, arrived: u32) {
        self.live -= u64::from(threads);
        self.arrived -= u64::from(arrived);
        self.complete();
    }

    fn complete(&mut self) {
        if self.arrived > 0 && self.arrived == self.live {
            self.arrived = 0;
            self.generation += 1;
            self.done.join(&self.clock);
        }
    }

    pub fn wait(&self, order: &mut Order, by: Agent) {
        order.acquire(by, &self.done);
    }

    /// "64 of 128 threads".
    pub fn state(&self) -> String {
        format!("{} of {} threads", self.arrived, self.live)
    }
}
