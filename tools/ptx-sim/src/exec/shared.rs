//! The shared memory of a cluster's CTAs: their bytes, and who may touch them when.
//!
//! An address has the CTA's rank in bits 24 and up, as the shared window of a cluster has it (PTX ISA, `mapa`); in a
//! launch without clusters that is 0.
use super::order::{Agent, Order};
use super::shadow::{Access, Conflict, Shadow};
use crate::error::Fault;

/// Where an address has the rank.
const RANK_SHIFT: u32 = 24;

/// The address of a byte of a CTA's shared memory.
pub(crate) fn address_in(rank: usize, offset: u64) -> u64 {
    (rank as u64) << RANK_SHIFT | offset
}

/// The CTA that an address belongs to, and the place in it.
pub(crate) fn rank_and_offset(address: u64) -> (usize, u64) {
    ((address >> RANK_SHIFT) as usize, address & ((1 << RANK_SHIFT) - 1))
}

pub(crate) struct Shared {
    bytes: Vec<u8>,
    /// Bytes of one CTA.
    size: u64,
    /// CTAs that have ended: their memory is gone.
    ended: Vec<bool>,
    shadow: Shadow,
    pub order: Order,
}

impl Shared {
    /// Memory of `size` bytes for each CTA, and the agents that are their warps.
    pub fn new(ctas: usize, size: u64, initialised: bool, warps: usize) -> Self {
        // Whole words: no word belongs to two CTAs.
        let padded = (size as usize).next_multiple_of(8);
        Self {
            bytes: vec![0; ctas * padded],
            size,
            ended: vec![false; ctas],
            shadow: Shadow::new(ctas * padded, initialised),
            order: Order::new(warps),
        }
    }

    /// A CTA has ended.
    pub fn end(&mut self, rank: usize) {
        self.ended[rank] = true;
    }

    /// Whether an address is one of a CTA that has not ended.
    pub fn reach(&self, access: &str, address: u64) -> Result<(), Fault> {
        self.range(access, address, 1).map(|_| ())
    }

    /// Whether a CTA has ended.
    pub fn has_ended(&self, rank: usize) -> bool {
        self.ended.get(rank).copied().unwrap_or(true)
    }

    fn range(&self, access: &str, address: u64, bytes: u64) -> Result<std::ops::Range<usize>, Fault> {
        let (rank, offset) = rank_and_offset(address);
        let nearest = match self.ended.get(rank) {
            None => format!("the cluster has {} CTAs", self.ended.len()),
            Some(true) => format!("CTA {rank} of the cluster has ended"),
            Some(false) if bytes > self.size || offset > self.size - bytes => {
                format!("the CTA has {} bytes of shared memory", self.size)
            }
            Some(false) => {
                let start = rank * (self.size as usize).next_multiple_of(8) + offset as usize;
                return Ok(start..start + bytes as usize);
            }
        };
        Err(Fault::OutOfBounds { access: access.to_string(), address, bytes, nearest })
    }

    #[inline]
    fn touch(&mut self, by: Agent, access: Access, address: u64, bytes: u64) -> Result<std::ops::Range<usize>, Fault> {
        let name = if matches!(access, Access::Read | Access::StrongRead) { "shared load" } else { "shared store" };
        let range = self.range(name, address, bytes)?;
        self.order.note(by);
        let touched = self.shadow.touch(&self.order, by, access, range.clone());
        touched.map_err(|(byte, conflict)| self.fault(name, address + (byte - range.start) as u64, conflict))?;
        Ok(range)
    }

    fn fault(&self, access: &str, address: u64, conflict: Conflict) -> Fault {
        match conflict {
            Conflict::Uninitialised => Fault::Uninitialised { address },
            Conflict::Mbarrier => {
                Fault::Mbarrier { address: address & !7, problem: format!("{access} of an mbarrier's bytes") }
            }
            Conflict::Unordered { earlier, stamp } => {
                let earlier = format!("the {earlier} by {}", self.order.describe(stamp));
                Fault::Race { access: access.to_string(), address, earlier }
            }
            Conflict::Unfenced { stamp } => Fault::ProxyFence { address, write: self.order.describe(stamp) },
        }
    }

    /// Reads bytes, at once.
    pub fn read(&mut self, by: Agent, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let range = self.touch(by, Access::Read, address, into.len() as u64)?;
        into.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    /// Writes bytes, at once.
    pub fn write(&mut self, by: Agent, address: u64, from: &[u8]) -> Result<(), Fault> {
        let range = self.touch(by, Access::Write, address, from.len() as u64)?;
        self.bytes[range].copy_from_slice(from);
        Ok(())
    }

    /// Loads with `.volatile` or `.relaxed`: no race with stores of that kind and with atomics.
    pub fn read_strong(&mut self, by: Agent, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let range = self.touch(by, Access::StrongRead, address, into.len() as u64)?;
        into.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    /// Stores with `.volatile` or `.relaxed`.
    pub fn write_strong(&mut self, by: Agent, address: u64, from: &[u8]) -> Result<(), Fault> {
        let range = self.touch(by, Access::StrongWrite, address, from.len() as u64)?;
        self.bytes[range].copy_from_slice(from);
        Ok(())
    }

    /// An atomic update of 4 or 8 bytes: the old value. One that does not look at it is a store, and compilers make atomic stores so.
    pub fn update(
        &mut self,
        by: Agent,
        (address, reads): (u64, bool),
        bytes: u64,
        f: impl Fn(u64) -> u64,
    ) -> Result<u64, Fault> {
        let access = if reads { Access::Atomic } else { Access::StrongWrite };
        let range = self.touch(by, access, address, bytes)?;
        let mut old = [0; 8];
        old[..range.len()].copy_from_slice(&self.bytes[range.clone()]);
        let old = u64::from_le_bytes(old);
        let length = range.len();
        self.bytes[range].copy_from_slice(&f(old).to_le_bytes()[..length]);
        Ok(old)
    }

    /// Checks and notes what an operation that is under way reads; the data is there by [`Self::peek`], until the
    /// operation's end.
    pub fn claim_read(&mut self, by: Agent, address: u64, bytes: u64) -> Result<(), Fault> {
        self.touch(by, Access::Read, address, bytes).map(|_| ())
    }

    /// Checks and notes what an operation that is under way writes, at some time, by [`Self::poke`].
    pub fn claim_write(&mut self, by: Agent, address: u64, bytes: u64) -> Result<(), Fault> {
        self.touch(by, Access::Write, address, bytes).map(|_| ())
    }

    /// The bytes, without a check of who asks.
    pub fn peek(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        into.copy_from_slice(&self.bytes[self.range("shared load", address, into.len() as u64)?]);
        Ok(())
    }

    /// Changes bytes that were claimed.
    pub fn poke(&mut self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let range = self.range("shared store", address, from.len() as u64)?;
        self.bytes[range].copy_from_slice(from);
        Ok(())
    }

    /// Eight bytes become an mbarrier: no one may access them otherwise.
    pub fn become_mbarrier(&mut self, by: Agent, address: u64) -> Result<(), Fault> {
        let range = self.touch(by, Access::Write, address, 8)?;
        self.shadow.become_mbarrier(range.start);
        Ok(())
    }

    /// The bytes of an mbarrier can be used again (`mbarrier.inval`).
    pub fn leave_mbarrier(&mut self, by: Agent, address: u64) -> Result<(), Fault> {
        let range = self.range("mbarrier.inval", address, 8)?;
        self.shadow.leave_mbarrier(&self.order, by, range.start);
        Ok(())
    }
}
