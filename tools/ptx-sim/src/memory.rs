//! Memory: global allocations with bounds, shared memory that knows what was written, windows of generic addresses.
use crate::error::Fault;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Where shared memory lies in generic addresses (PTX ISA 5.1 and `cvta`).
pub(crate) const SHARED_WINDOW: u64 = 0x0000_1000_0000_0000;
/// Where parameters lie in generic addresses.
pub(crate) const PARAM_WINDOW: u64 = 0x0000_2000_0000_0000;
/// Where the first allocation starts.
const GLOBAL_BASE: u64 = 0x0000_7000_0000_0000;
/// Bytes between allocations that belong to nobody.
const GAP: u64 = 1 << 20;

pub(crate) fn align_up(value: u64, align: u64) -> u64 {
    value.div_ceil(align.max(1)) * align.max(1)
}

/// An allocation of global memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer(usize);

struct Allocation {
    base: u64,
    bytes: u64,
    words: Vec<AtomicU32>,
    freed: bool,
}

/// Global memory. CTAs on several threads share it, so it is made of atomic words.
#[derive(Default)]
pub struct Memory {
    allocations: Vec<Allocation>,
    /// Taken for atomics of 64 bits, which span two words.
    wide: Mutex<()>,
}

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates a copy of `bytes`, aligned as `cudaMalloc` does (256 bytes). Its end is exact.
    pub fn alloc(&mut self, bytes: &[u8]) -> Buffer {
        let end = self.allocations.last().map_or(GLOBAL_BASE, |a| a.base + a.bytes + GAP);
        let word = |chunk: &[u8]| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU32::new(u32::from_le_bytes(word))
        };
        let words = bytes.chunks(4).map(word).collect();
        let base = align_up(end, 256);
        self.allocations.push(Allocation { base, bytes: bytes.len() as u64, words, freed: false });
        Buffer(self.allocations.len() - 1)
    }

    /// Frees an allocation: an access to it is an error from now on.
    pub fn free(&mut self, buffer: Buffer) {
        self.allocations[buffer.0].freed = true;
    }

    /// The bytes of an allocation.
    pub fn read(&self, buffer: Buffer) -> Vec<u8> {
        let a = &self.allocations[buffer.0];
        let mut bytes: Vec<u8> = a.words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(a.bytes as usize);
        bytes
    }

    /// The address of an allocation.
    pub fn address(&self, buffer: Buffer) -> u64 {
        self.allocations[buffer.0].base
    }

    /// The allocation around `bytes` at `address`, and the offset in it. The address is a multiple of `bytes`.
    fn find(&self, access: &str, address: u64, bytes: u64) -> Result<(&Allocation, usize), Fault> {
        let after = self.allocations.partition_point(|a| a.base <= address);
        if let Some(a) = self.allocations[..after].last()
            && !a.freed
            && address - a.base <= a.bytes.saturating_sub(bytes)
            && a.bytes >= bytes
        {
            return Ok((a, (address - a.base) as usize));
        }
        let nearest = self.nearest(after, address);
        Err(Fault::OutOfBounds { access: access.to_string(), address, bytes, nearest })
    }

    fn nearest(&self, after: usize, address: u64) -> String {
        let neighbours = after.saturating_sub(1)..(after + 1).min(self.allocations.len());
        let distance = |a: &Allocation| {
            if address < a.base { a.base - address } else { (address + 1).saturating_sub(a.base + a.bytes) }
        };
        let Some(index) = neighbours.min_by_key(|&i| distance(&self.allocations[i])) else {
            return "there are no allocations".to_string();
        };
        let a = &self.allocations[index];
        let state = if a.freed { "freed allocation" } else { "allocation" };
        let at = address.wrapping_sub(a.base) as i64;
        format!("nearest is {state} {index} of {} bytes at {:#x}, offset {at}", a.bytes, a.base)
    }

    /// Loads 1, 2, 4 or 8 bytes; the address is a multiple of their number.
    pub(crate) fn load(&self, address: u64, bytes: u64) -> Result<u64, Fault> {
        let (a, at) = self.find("global load", address, bytes)?;
        let word = |i: usize| u64::from(a.words[i].load(Ordering::Relaxed));
        Ok(match bytes {
            8 => word(at / 4) | word(at / 4 + 1) << 32,
            4 => word(at / 4),
            _ => word(at / 4) >> (8 * (at % 4)) & ((1 << (8 * bytes)) - 1),
        })
    }

    /// Stores 1, 2, 4 or 8 bytes; the address is a multiple of their number.
    pub(crate) fn store(&self, address: u64, bytes: u64, value: u64) -> Result<(), Fault> {
        let (a, at) = self.find("global store", address, bytes)?;
        match bytes {
            8 => {
                a.words[at / 4].store(value as u32, Ordering::Relaxed);
                a.words[at / 4 + 1].store((value >> 32) as u32, Ordering::Relaxed);
            }
            4 => a.words[at / 4].store(value as u32, Ordering::Relaxed),
            _ => {
                let shift = 8 * (at % 4) as u32;
                let mask = ((1u32 << (8 * bytes)) - 1) << shift;
                let bits = (value as u32) << shift & mask;
                let _ = a.words[at / 4].fetch_update(Ordering::Relaxed, Ordering::Relaxed, |w| Some(w & !mask | bits));
            }
        }
        Ok(())
    }

    /// Replaces a value of 4 or 8 bytes atomically and returns the old one.
    pub(crate) fn update(&self, address: u64, bytes: u64, f: impl Fn(u64) -> u64) -> Result<u64, Fault> {
        let (a, at) = self.find("global atomic", address, bytes)?;
        if bytes == 4 {
            let word = &a.words[at / 4];
            let mut old = word.load(Ordering::SeqCst);
            while let Err(now) =
                word.compare_exchange(old, f(u64::from(old)) as u32, Ordering::SeqCst, Ordering::SeqCst)
            {
                old = now;
            }
            return Ok(u64::from(old));
        }
        let _guard = self.wide.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.load(address, 8)?;
        self.store(address, 8, f(old))?;
        Ok(old)
    }
}

/// The shared memory of a CTA. Reading a byte that nothing wrote is an error.
pub(crate) struct Shared {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Shared {
    pub fn new(bytes: u64, initialised: bool) -> Self {
        Self { bytes: vec![0; bytes as usize], written: vec![initialised; bytes as usize] }
    }

    fn range(&self, access: &str, address: u64, bytes: u64) -> Result<std::ops::Range<usize>, Fault> {
        let size = self.bytes.len() as u64;
        if bytes > size || address > size - bytes {
            let nearest = format!("the CTA has {size} bytes of shared memory");
            return Err(Fault::OutOfBounds { access: access.to_string(), address, bytes, nearest });
        }
        Ok(address as usize..(address + bytes) as usize)
    }

    /// Loads 1 to 8 bytes.
    pub fn load(&self, address: u64, bytes: u64) -> Result<u64, Fault> {
        let range = self.range("shared load", address, bytes)?;
        if let Some(i) = self.written[range.clone()].iter().position(|w| !w) {
            return Err(Fault::Uninitialised { address: address + i as u64 });
        }
        let mut value = [0; 8];
        value[..range.len()].copy_from_slice(&self.bytes[range]);
        Ok(u64::from_le_bytes(value))
    }

    /// Stores 1 to 8 bytes.
    pub fn store(&mut self, address: u64, bytes: u64, value: u64) -> Result<(), Fault> {
        let range = self.range("shared store", address, bytes)?;
        self.bytes[range.clone()].copy_from_slice(&value.to_le_bytes()[..range.len()]);
        self.written[range].fill(true);
        Ok(())
    }

    /// Makes bytes unreadable until they are written: an asynchronous copy is on its way there.
    pub fn forget(&mut self, address: u64, bytes: u64) -> Result<(), Fault> {
        let range = self.range("asynchronous copy", address, bytes)?;
        self.written[range].fill(false);
        Ok(())
    }
}

/// A shared address, given as one of the shared or of the generic space.
pub(crate) fn shared_address(address: u64) -> u64 {
    if address >> 44 == SHARED_WINDOW >> 44 { address - SHARED_WINDOW } else { address }
}
