//! mbarrier objects (PTX ISA, "mbarrier").
//!
//! A phase is complete when no arrival is pending and the transaction count is zero. Arrivals release, and a wait that
//! sees the phase complete acquires. Between CTAs of a cluster both need `.cluster` (PTX ISA, "Scope"): what a release of
//! `.cta` has done in another CTA is not visible. That it is over is taken from it all the same, as CUTLASS does where
//! consumers give a stage back: a copy may overwrite what was read, but nobody may read what was written. Copies and `tcgen05.commit` release to the cluster by themselves,
//! and their bytes are there for who has waited with either scope.
use super::order::{Agent, Clock, Order, Proxy, Stamp};
use super::shared::Shared;
use crate::error::Fault;
use crate::ir::Scope;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Counts lie below this (PTX ISA, "Size and alignment of mbarrier object" ff.).
const LIMIT: i64 = 1 << 20;

/// An mbarrier object.
pub(crate) struct Mbarrier {
    expected: u64,
    pending: u64,
    /// Bytes that are announced and have not arrived.
    transactions: i64,
    /// Completed phases; its lowest bit is the parity.
    pub phase: u64,
    /// What the arrivals of the current phase release, and those of the completed ones.
    clock: Clock,
    done: Clock,
    /// What an acquire of the cluster gets besides: releases of threads of other CTAs.
    far: Clock,
    far_done: Clock,
    /// Who initialised it, and whether the async proxy and other CTAs know.
    born: Stamp,
    announced: bool,
}

impl Mbarrier {
    fn complete(&mut self) {
        if self.pending == 0 && self.transactions == 0 {
            self.pending = self.expected;
            self.phase += 1;
            self.done.join(&self.clock);
            self.far_done.join(&self.far);
        }
    }

    fn transact(&mut self, address: u64, bytes: i64) -> Result<(), Fault> {
        self.transactions += bytes;
        if self.transactions.abs() < LIMIT {
            return Ok(());
        }
        let problem = format!("a transaction count of {}, expected less than 2^20 either way", self.transactions);
        Err(Fault::Mbarrier { address, problem })
    }

    /// `expect_tx`: announces bytes.
    pub fn expect(&mut self, address: u64, bytes: u64) -> Result<(), Fault> {
        self.transact(address, bytes as i64)
    }

    /// `complete_tx`: announced bytes have arrived.
    pub fn complete_bytes(&mut self, address: u64, bytes: u64, clock: &Clock) -> Result<(), Fault> {
        self.clock.join(clock);
        self.transact(address, -(bytes as i64))?;
        self.complete();
        Ok(())
    }

    /// One more arrival is pending in this phase: that of `cp.async.mbarrier.arrive` itself.
    pub fn add_pending(&mut self) {
        self.pending += 1;
    }

    /// Arrivals by someone with this clock.
    pub fn arrive(&mut self, address: u64, count: u64, clock: &Clock) -> Result<(), Fault> {
        if count > self.pending {
            let problem = format!("{count} arrivals, {} are pending", self.pending);
            return Err(Fault::Mbarrier { address, problem });
        }
        self.clock.join(clock);
        self.pending -= count;
        self.complete();
        Ok(())
    }

    /// What threads of another CTA release with the arrival that follows, to this scope.
    pub fn release_far(&mut self, scope: Option<Scope>, clock: &Clock) {
        if scope.is_some() {
            self.clock.join_over(clock);
        }
        if scope == Some(Scope::Cluster) {
            self.far.join(clock);
        }
    }

    /// Whether the phase of this parity is the one before the current one.
    pub fn passed(&self, parity: u64) -> bool {
        self.phase & 1 != parity
    }

    /// What a wait that succeeded acquires.
    pub fn acquire(&self, scope: Scope, into: &mut Clock) {
        into.join(&self.done);
        if scope == Scope::Cluster {
            into.join(&self.far_done);
        }
    }
}

/// The mbarriers of a cluster by address. Their bytes in shared memory mean nothing to the program.
#[derive(Default)]
pub(crate) struct Mbarriers {
    objects: HashMap<u64, Mbarrier>,
}

impl Mbarriers {
    pub fn init(&mut self, shared: &mut Shared, by: Agent, address: u64, count: u64) -> Result<(), Fault> {
        let problem = if !address.is_multiple_of(8) {
            "its address is no multiple of 8".to_string()
        } else if !(1..1 << 20).contains(&count) {
            format!("a count of {count}, expected 1 to 2^20 - 1")
        } else if let Entry::Vacant(place) = self.objects.entry(address) {
            shared.become_mbarrier(by, address)?;
            place.insert(Mbarrier {
                expected: count,
                pending: count,
                transactions: 0,
                phase: 0,
                clock: Clock::default(),
                done: Clock::default(),
                far: Clock::default(),
                far_done: Clock::default(),
                born: shared.order.now(by),
                announced: false,
            });
            return Ok(());
        } else {
            "initialised again without mbarrier.inval".to_string()
        };
        Err(Fault::Mbarrier { address, problem })
    }

    /// `mbarrier.inval`.
    pub fn invalidate(&mut self, shared: &mut Shared, by: Agent, address: u64) -> Result<(), Fault> {
        self.get(&shared.order, by, address)?;
        self.objects.remove(&address);
        shared.leave_mbarrier(by, address)
    }

    /// `fence.mbarrier_init`: the async proxy may use what this agent has initialised.
    pub fn announce(&mut self, by: Agent) {
        self.objects.values_mut().filter(|o| o.born.agent == by).for_each(|o| o.announced = true);
    }

    /// The object, for an agent that must know that it was initialised.
    pub fn get(&mut self, order: &Order, by: Agent, address: u64) -> Result<&mut Mbarrier, Fault> {
        let bad = |problem: String| Fault::Mbarrier { address, problem };
        let object = self.objects.get_mut(&address).ok_or_else(|| bad("not initialised".to_string()))?;
        if !order.seen(by, object.born) {
            return Err(bad(format!("its use is not ordered after mbarrier.init by {}", order.describe(object.born))));
        }
        if order.proxy(by) == Proxy::Async && !object.announced && !order.fenced(by, object.born) {
            let problem =
                "used by the async proxy without fence.mbarrier_init or fence.proxy.async after mbarrier.init";
            return Err(bad(problem.to_string()));
        }
        Ok(object)
    }

    /// The object, if there is one.
    pub fn find(&self, address: u64) -> Option<&Mbarrier> {
        self.objects.get(&address)
    }

    /// "phase 0, 3 of 128 arrivals pending, 0 bytes".
    pub fn state(&self, address: u64) -> String {
        self.objects.get(&address).map_or("gone".to_string(), |b| {
            format!("phase {}, {} of {} arrivals pending, {} bytes", b.phase, b.pending, b.expected, b.transactions)
        })
    }
}
