//! `cp.async`: copies that are under way until their thread waits for them (PTX ISA, `cp.async`).
//!
//! The source is read at once. The destination belongs to the copy until the wait, whatever it held: who reads too
//! early gets an error and not by chance the right bytes. All copies of a warp between two commits are one agent.
use super::order::{Agent, Clock, Order, Proxy};
use super::registers::LANES;
use super::shared::Shared;
use crate::error::Fault;
use std::collections::VecDeque;

/// Bytes on their way to shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Copy {
    pub dst: u64,
    pub bytes: [u8; 16],
    pub count: usize,
}

/// A copy and the agent that it belongs to.
pub(super) type Issued = (Agent, Copy);

/// The copies of one lane.
#[derive(Default)]
struct Lane {
    open: Vec<Issued>,
    groups: VecDeque<Vec<Issued>>,
}

/// The copies of a warp.
pub(crate) struct Copies {
    lanes: [Lane; LANES],
    /// The agent of the copies since the last commit.
    open: Option<Agent>,
    /// How many copies of each agent are under way.
    under_way: Vec<(Agent, usize)>,
    /// Flights of copies that an mbarrier waits for, and the clock of all that there ever were.
    arriving: Vec<u64>,
    landed: Clock,
}

impl Default for Copies {
    fn default() -> Self {
        let lanes = std::array::from_fn(|_| Lane::default());
        Self { lanes, open: None, under_way: Vec::new(), arriving: Vec::new(), landed: Clock::default() }
    }
}

impl Copies {
    /// The agent for a copy instruction of this warp.
    pub fn agent(&mut self, order: &mut Order, warp: Agent) -> Agent {
        match self.open {
            Some(agent) => {
                order.also_after(agent, warp);
                agent
            }
            None => {
                let agent = order.begin_async(warp, Proxy::Generic, "cp.async");
                self.open = Some(agent);
                self.under_way.push((agent, 0));
                agent
            }
        }
    }

    pub fn start(&mut self, lane: usize, agent: Agent, copy: Copy, shared: &mut Shared) -> Result<(), Fault> {
        shared.claim_write(agent, copy.dst, copy.count as u64)?;
        self.lanes[lane].open.push((agent, copy));
        if let Some((_, count)) = self.under_way.iter_mut().find(|(a, _)| *a == agent) {
            *count += 1;
        }
        Ok(())
    }

    pub fn commit(&mut self, lane: usize) {
        self.open = None;
        let group = std::mem::take(&mut self.lanes[lane].open);
        self.lanes[lane].groups.push_back(group);
    }

    /// Takes out a lane's oldest groups until `pending` are left.
    pub fn oldest(&mut self, lane: usize, pending: usize) -> Vec<Issued> {
        let groups = &mut self.lanes[lane].groups;
        let count = groups.len().saturating_sub(pending);
        groups.drain(..count).flatten().collect()
    }

    /// Takes out all that the lane has started.
    pub fn all(&mut self, lane: usize) -> Vec<Issued> {
        self.open = None;
        let lane = &mut self.lanes[lane];
        let groups = std::mem::take(&mut lane.groups);
        groups.into_iter().flatten().chain(std::mem::take(&mut lane.open)).collect()
    }

    /// Notes that copies are over, or will be without this warp: what a wait for them acquires.
    pub fn settle(&mut self, copies: &[Issued], order: &mut Order, clock: &mut Clock) {
        let mut last = None;
        for (agent, _) in copies {
            // The clock is the same for all copies of an agent.
            if last != Some(*agent) {
                clock.join(order.clock(*agent));
            }
            last = Some(*agent);
            let Some(at) = self.under_way.iter().position(|(a, _)| a == agent) else { continue };
            self.under_way[at].1 -= 1;
            if self.under_way[at].1 == 0 && self.open != Some(*agent) {
                order.end_async(*agent);
                self.under_way.swap_remove(at);
            }
        }
    }

    /// What all copies release that an mbarrier waits for, with these.
    pub fn landed_with(&mut self, clock: &Clock) -> Clock {
        self.landed.join(clock);
        self.landed.clone()
    }

    /// Copies that come by themselves, as the flight of this number, for an mbarrier.
    pub fn arrive_later(&mut self, flight: u64) {
        self.arriving.push(flight);
    }

    /// The flights that a wait must finish, and what it acquires with them.
    pub fn take_arriving(&mut self, clock: &mut Clock) -> Vec<u64> {
        clock.join(&self.landed);
        std::mem::take(&mut self.arriving)
    }
}

/// Brings the bytes.
pub(super) fn land(copies: &[Issued], shared: &mut Shared) -> Result<(), Fault> {
    copies.iter().try_for_each(|(_, copy)| shared.poke(copy.dst, &copy.bytes[..copy.count]))
}
