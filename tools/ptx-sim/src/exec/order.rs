//! The order of accesses to shared memory, by vector clocks (PTX ISA, "Memory Consistency Model").
//!
//! Agents are the warps of a cluster and the operations that run beside them: a tensor copy, a group of `wgmma`. An
//! agent's life is cut into epochs; a new one begins where it releases. Its clock says up to which epoch of each other
//! agent all that happened is ordered before what it does now. Barriers carry clocks from one agent to another, so an
//! order that only the schedule of this run gave does not count.
//!
//! A clock knows two things of each agent: up to where its accesses have been *seen*, and up to where its generic
//! writes have been *fenced*, that is made visible to the async proxy by `fence.proxy.async` of somebody who had seen
//! them. What a release carries has both.
//!
//! An operation that runs beside the warps:
//! 1. [`Order::begin_async`] when it is issued, [`Order::also_after`] for further warps that issue it together;
//! 2. [`Shared::claim_read`], [`Shared::claim_write`] of what it will touch, with the agent that came from 1 (checks
//!    against all that came before; until somebody acquires the operation, others' accesses are errors);
//! 3. later, in any order with other operations, the data: [`Shared::peek`] and [`Shared::poke`], without checks;
//! 4. [`Order::end_async`]: the clock that whoever waits for it acquires, through an mbarrier or [`Order::acquire`].
//!
//! [`Shared::claim_read`]: super::shared::Shared::claim_read
//! [`Shared::claim_write`]: super::shared::Shared::claim_write
//! [`Shared::peek`]: super::shared::Shared::peek
//! [`Shared::poke`]: super::shared::Shared::poke

use super::apart::Apart;

/// A warp of the cluster, or an operation that runs beside the warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Agent(u16);

impl Agent {
    /// A warp, counted through all CTAs of the cluster.
    pub fn warp(index: usize) -> Self {
        Self(index as u16)
    }

    /// The agent as a number.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// How an agent reaches memory (PTX ISA, "Proxies"). `cp.async` copies are generic, bulk copies and matrix
/// instructions are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proxy {
    Generic,
    Async,
}

/// An agent in one of its epochs. Epoch 0 is before everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Stamp {
    pub agent: Agent,
    pub epoch: u32,
}

/// What is known to be over: an epoch for each agent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    seen: Vec<u32>,
    fenced: Vec<u32>,
    /// Up to where accesses are over, though what they wrote need not be seen: a write may follow, and no read.
    over: Vec<u32>,
}

fn raise(to: &mut Vec<u32>, from: &[u32]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    to.iter_mut().zip(from).for_each(|(a, b)| *a = (*a).max(*b));
}

fn covers(epochs: &[u32], stamp: Stamp) -> bool {
    stamp.epoch <= epochs.get(stamp.agent.index()).copied().unwrap_or(0)
}

impl Clock {
    /// Whether what the stamp stands for is over.
    pub(super) fn has_seen(&self, stamp: Stamp) -> bool {
        covers(&self.seen, stamp)
    }

    /// Whether it knows nothing.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Whether it knows all that the other has seen.
    pub fn covers(&self, other: &Self) -> bool {
        other.seen.iter().enumerate().all(|(agent, epoch)| self.seen.get(agent).copied().unwrap_or(0) >= *epoch)
    }

    /// Knows what the other knows, too.
    pub fn join(&mut self, other: &Self) {
        raise(&mut self.seen, &other.seen);
        raise(&mut self.fenced, &other.fenced);
        raise(&mut self.over, &other.over);
    }

    /// Knows only that what the other knows of is over.
    pub fn join_over(&mut self, other: &Self) {
        raise(&mut self.over, &other.seen);
        raise(&mut self.over, &other.over);
    }
}

struct Actor {
    clock: Clock,
    proxy: Proxy,
    /// An operation that is under way.
    busy: bool,
    /// What it is, and the warp that it comes from: changes when the agent is used again.
    what: &'static str,
    warp: usize,
    /// Line where each epoch began.
    starts: Vec<u32>,
    /// Of a warp.
    apart: Apart,
}

/// The clocks of a cluster.
pub(crate) struct Order {
    actors: Vec<Actor>,
    warps: usize,
    /// Line of the instruction that runs.
    pub line: u32,
    /// The lanes that run it, and those that they speak for when they release.
    pub lanes: u32,
    pub speak_for: u32,
    /// Changes with every clock.
    pub(super) version: u32,
}

impl Order {
    pub fn new(warps: usize) -> Self {
        let actor = |index: usize| {
            let mut clock = Clock { seen: vec![0; warps], fenced: vec![0; warps], over: Vec::new() };
            clock.seen[index] = 1;
            let starts = vec![0, 0];
            let apart = Apart::default();
            Actor { clock, proxy: Proxy::Generic, busy: false, what: "warp", warp: index, starts, apart }
        };
        Self {
            actors: (0..warps).map(actor).collect(),
            warps,
            line: 0,
            lanes: u32::MAX,
            speak_for: u32::MAX,
            version: 1,
        }
    }

    fn actor(&mut self, agent: Agent) -> &mut Actor {
        self.version = self.version.wrapping_add(1);
        &mut self.actors[agent.index()]
    }

    pub(super) fn proxy(&self, agent: Agent) -> Proxy {
        self.actors[agent.index()].proxy
    }

    pub(super) fn now(&self, agent: Agent) -> Stamp {
        Stamp { agent, epoch: self.actors[agent.index()].clock.seen[agent.index()] }
    }

    /// Whether what the stamp stands for is ordered before what the agent does now.
    pub(super) fn seen(&self, by: Agent, stamp: Stamp) -> bool {
        stamp.agent == by || covers(&self.actors[by.index()].clock.seen, stamp)
    }

    /// Whether it is over, at least, before what the agent does now.
    pub(super) fn over(&self, by: Agent, stamp: Stamp) -> bool {
        self.seen(by, stamp) || covers(&self.actors[by.index()].clock.over, stamp)
    }

    /// Whether the async proxy sees the stamp's writes, as far as the agent knows.
    pub(super) fn fenced(&self, by: Agent, stamp: Stamp) -> bool {
        self.proxy(stamp.agent) == Proxy::Async || covers(&self.actors[by.index()].clock.fenced, stamp)
    }

    /// Begins an epoch.
    fn next(&mut self, agent: Agent) {
        let line = self.line;
        let actor = self.actor(agent);
        actor.clock.seen[agent.index()] += 1;
        actor.starts.push(line);
    }

    /// An agent accesses memory.
    #[inline]
    pub(super) fn note(&mut self, agent: Agent) {
        if agent.index() < self.warps {
            let actor = &mut self.actors[agent.index()];
            actor.apart.note(actor.clock.seen[agent.index()], self.lanes);
        }
    }

    /// Lanes of a warp meet: each is ordered after what the others have done.
    pub fn meet(&mut self, agent: Agent, lanes: u32) {
        if self.actors[agent.index()].apart.meet(lanes) {
            self.next(agent);
        }
    }

    /// What the lanes that run know of what their agent has done and seen.
    fn known(&self, agent: Agent) -> Clock {
        let actor = &self.actors[agent.index()];
        let (mut clock, until) = (actor.clock.clone(), actor.apart.until(self.speak_for));
        for epochs in [&mut clock.seen, &mut clock.fenced] {
            epochs.iter_mut().skip(agent.index()).take(1).for_each(|epoch| *epoch = (*epoch).min(until));
        }
        clock
    }

    /// The agent releases: who acquires the clock afterwards is ordered after all that the agent has done, but for what other
    /// lanes than those that run have done apart.
    pub fn release(&mut self, agent: Agent, into: &mut Clock) {
        into.join(&self.known(agent));
        self.next(agent);
    }

    /// The agent acquires.
    pub fn acquire(&mut self, agent: Agent, clock: &Clock) {
        let own = clock.seen.get(agent.index()).copied().unwrap_or(0);
        let actor = self.actor(agent);
        actor.clock.join(clock);
        actor.apart.acquire(own);
    }

    /// `fence.proxy.async`: what the agent has done and seen is visible to the async proxy.
    pub fn proxy_fence(&mut self, agent: Agent) {
        let known = self.known(agent);
        raise(&mut self.actor(agent).clock.fenced, &known.seen);
        self.next(agent);
    }

    /// Issues an operation that runs beside its warp: it is ordered after what the warp has done and seen.
    pub fn begin_async(&mut self, issuer: Agent, proxy: Proxy, what: &'static str) -> Agent {
        // An agent is used again only by those who have seen the end of what it was before.
        let known = &self.actors[issuer.index()].clock.seen;
        let free =
            |a: &Actor, i: usize| !a.busy && a.proxy == proxy && known.get(i).copied().unwrap_or(0) >= a.clock.seen[i];
        let found = (self.warps..self.actors.len()).find(|&i| free(&self.actors[i], i));
        let index = found.unwrap_or(self.actors.len());
        let mut clock = self.known(issuer);
        if clock.seen.len() <= index {
            clock.seen.resize(index + 1, 0);
        }
        clock.seen[index] += 1;
        let warp = self.actors[issuer.index()].warp;
        let mut starts = found.map_or_else(|| vec![0], |i| std::mem::take(&mut self.actors[i].starts));
        starts.push(self.line);
        let actor = Actor { clock, proxy, busy: true, what, warp, starts, apart: Apart::default() };
        match found {
            Some(i) => self.actors[i] = actor,
            None => self.actors.push(actor),
        }
        self.next(issuer);
        Agent(index as u16)
    }

    /// The operation is also ordered after what this agent has done and seen.
    pub fn also_after(&mut self, operation: Agent, agent: Agent) {
        let clock = self.known(agent);
        self.actor(operation).clock.join(&clock);
        self.next(agent);
    }

    /// Something that a warp does at once, in another CTA's memory: its stamp, and the clock of those who know of it and of nothing
    /// else. The warp itself does.
    pub fn event(&mut self, by: Agent, what: &'static str) -> (Agent, Clock) {
        let event = self.begin_async(by, Proxy::Generic, what);
        let epoch = self.end_async(event).seen[event.index()];
        let mut clock = Clock::default();
        clock.seen.resize(event.index() + 1, 0);
        clock.seen[event.index()] = epoch;
        self.acquire(by, &clock);
        (event, clock)
    }

    /// What an agent knows, itself included.
    pub fn clock(&self, agent: Agent) -> &Clock {
        &self.actors[agent.index()].clock
    }

    /// The operation is over: its clock, for those who wait for it. The agent must not be used any more.
    pub fn end_async(&mut self, operation: Agent) -> Clock {
        let actor = self.actor(operation);
        actor.busy = false;
        actor.clock.clone()
    }

    /// "warp 3, between PTX lines 20 and 40".
    pub(super) fn describe(&self, stamp: Stamp) -> String {
        let actor = &self.actors[stamp.agent.index()];
        let line = |epoch: u32| actor.starts.get(epoch as usize).copied().unwrap_or(self.line);
        if stamp.agent.index() >= self.warps {
            return format!("{} that warp {} issued at PTX line {}", actor.what, actor.warp, line(stamp.epoch));
        }
        let until = match actor.starts.get(stamp.epoch as usize + 1) {
            Some(line) => format!("its synchronisation at PTX line {line}"),
            None => "now".to_string(),
        };
        match line(stamp.epoch) {
            0 => format!("warp {} before {until}", actor.warp),
            from => format!("warp {} between its synchronisation at PTX line {from} and {until}", actor.warp),
        }
    }
}
