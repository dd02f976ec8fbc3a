//! Named barriers and mbarriers of a CTA (PTX ISA, `bar` and `mbarrier`).
use crate::error::Fault;
use std::collections::HashMap;

/// A named barrier: arrivals of the current generation.
#[derive(Default, Clone)]
struct Named {
    arrived: u64,
    /// Threads that it waits for, if the program said so.
    expected: Option<u64>,
    generation: u64,
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
    pub fn arrive(&mut self, id: u64, expected: Option<u64>) -> Result<u64, Fault> {
        let error = |problem: String| Fault::Barrier { id, problem };
        let live = self.live;
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
        barrier.complete(live);
        Ok(generation)
    }

    /// A warp has exited: barriers over the whole CTA do not wait for it.
    pub fn leave(&mut self) {
        self.live -= 32;
        for barrier in &mut self.named {
            barrier.complete(self.live);
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
    fn complete(&mut self, live: u64) {
        if self.arrived > 0 && self.arrived == self.expected.unwrap_or(live) {
            self.arrived = 0;
            self.generation += 1;
        }
    }
}

/// An mbarrier object.
pub(crate) struct Mbarrier {
    expected: u64,
    pending: u64,
    /// Bytes that are announced and have not arrived.
    transactions: i64,
    /// Completed phases; its lowest bit is the parity.
    pub phase: u64,
}

impl Mbarrier {
    pub fn expect(&mut self, bytes: u64) {
        self.transactions += bytes as i64;
    }

    pub fn arrive(&mut self, address: u64, count: u64) -> Result<(), Fault> {
        if count > self.pending {
            let problem = format!("{count} arrivals, {} are pending", self.pending);
            return Err(Fault::Mbarrier { address, problem });
        }
        self.pending -= count;
        if self.pending == 0 && self.transactions == 0 {
            self.pending = self.expected;
            self.phase += 1;
        }
        Ok(())
    }
}

/// The mbarriers of a CTA by address. Their bytes in shared memory mean nothing to the program.
#[derive(Default)]
pub(crate) struct Mbarriers {
    objects: HashMap<u64, Mbarrier>,
}

impl Mbarriers {
    pub fn init(&mut self, address: u64, count: u64) -> Result<(), Fault> {
        let problem = if !address.is_multiple_of(8) {
            "its address is no multiple of 8".to_string()
        } else if !(1..1 << 20).contains(&count) {
            format!("a count of {count}, expected 1 to 2^20 - 1")
        } else {
            self.objects.insert(address, Mbarrier { expected: count, pending: count, transactions: 0, phase: 0 });
            return Ok(());
        };
        Err(Fault::Mbarrier { address, problem })
    }

    pub fn get(&mut self, address: u64) -> Result<&mut Mbarrier, Fault> {
        let problem = "not initialised".to_string();
        self.objects.get_mut(&address).ok_or(Fault::Mbarrier { address, problem })
    }

    /// Whether the phase of a parity is over.
    pub fn passed(&self, address: u64, parity: u64) -> bool {
        self.objects.get(&address).is_none_or(|b| b.phase & 1 != parity)
    }

    /// "phase 0, 3 of 128 arrivals pending, 0 bytes".
    pub fn state(&self, address: u64) -> String {
        self.objects.get(&address).map_or("gone".to_string(), |b| {
            format!("phase {}, {} of {} arrivals pending, {} bytes", b.phase, b.pending, b.expected, b.transactions)
        })
    }
}
