//! Memory: global allocations with bounds, shared memory that knows what was written, windows of generic addresses.
use crate::error::Fault;
use std::ops::Range;
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
/// Freed allocations that error messages can still name.
const MOST_FREED: usize = 4096;

pub(crate) fn align_up(value: u64, align: u64) -> u64 {
    value.div_ceil(align.max(1)) * align.max(1)
}

/// An allocation of global memory, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer(u64);

struct Allocation {
    base: u64,
    bytes: u64,
    /// Empty after the allocation was freed.
    words: Vec<AtomicU32>,
    freed: bool,
}

impl Allocation {
    fn end(&self) -> u64 {
        self.base + self.bytes
    }
}

/// Global memory. CTAs on several threads share it, so it is made of atomic words.
#[derive(Default)]
pub struct Memory {
    /// Sorted by address; freed ones stay for the error messages.
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
        let base = self.allocations.last().map_or(GLOBAL_BASE, |a| align_up(a.end() + GAP, 256));
        self.insert(self.allocations.len(), base, bytes)
    }

    /// Allocates a copy of `bytes` at an address, which is a multiple of 16 (pointers of a recorded launch).
    ///
    /// # Errors
    /// [`Fault::BadAllocation`] where the address cannot be had.
    pub fn alloc_at(&mut self, address: u64, bytes: &[u8]) -> Result<Buffer, Fault> {
        let size = bytes.len() as u64;
        let bad = |problem: &str| Fault::BadAllocation { address, bytes: size, problem: problem.to_string() };
        if !address.is_multiple_of(16) {
            return Err(bad("the address is no multiple of 16"));
        }
        let end = address.checked_add(size).ok_or_else(|| bad("it ends past the last address"))?;
        let windows = [SHARED_WINDOW, PARAM_WINDOW].map(|start| start..start + (1 << 44));
        if address == 0 || windows.iter().any(|w| address < w.end && end > w.start) {
            return Err(bad("the addresses belong to shared memory, to parameters or to nobody"));
        }
        self.allocations.retain(|a| !a.freed || a.end() <= address || a.base >= end.max(address + 1));
        if self.allocations.iter().any(|a| a.base < end.max(address + 1) && address < a.end().max(a.base + 1)) {
            return Err(bad("it overlaps an allocation"));
        }
        let at = self.allocations.partition_point(|a| a.base < address);
        Ok(self.insert(at, address, bytes))
    }

    fn insert(&mut self, at: usize, base: u64, bytes: &[u8]) -> Buffer {
        let word = |chunk: &[u8]| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU32::new(u32::from_le_bytes(word))
        };
        let words = bytes.chunks(4).map(word).collect();
        self.allocations.insert(at, Allocation { base, bytes: bytes.len() as u64, words, freed: false });
        Buffer(base)
    }

    /// Frees an allocation: an access to it is an error from now on.
    pub fn free(&mut self, buffer: Buffer) {
        if let Ok(i) = self.allocations.binary_search_by_key(&buffer.0, |a| a.base) {
            self.allocations[i].freed = true;
            self.allocations[i].words = Vec::new();
        }
        let mut surplus = self.allocations.iter().filter(|a| a.freed).count().saturating_sub(MOST_FREED);
        self.allocations.retain(|a| {
            let forget = a.freed && surplus > 0;
            surplus -= usize::from(forget);
            !forget
        });
    }

    /// The bytes of an allocation; none after it was freed.
    pub fn read(&self, buffer: Buffer) -> Vec<u8> {
        let Ok(i) = self.allocations.binary_search_by_key(&buffer.0, |a| a.base) else { return Vec::new() };
        let a = &self.allocations[i];
        let mut bytes: Vec<u8> = a.words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(a.bytes as usize);
        bytes
    }

    /// The address of an allocation.
    pub fn address(&self, buffer: Buffer) -> u64 {
        buffer.0
    }

    /// The allocation that an address lies in, or just behind, with its size.
    pub fn around(&self, address: u64) -> Option<(Buffer, u64)> {
        let after = self.allocations.partition_point(|a| a.base <= address);
        let a = self.allocations[..after].last()?;
        (!a.freed && address <= a.end()).then_some((Buffer(a.base), a.bytes))
    }

    /// The address ranges of all allocations that were not freed, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.allocations.iter().filter(|a| !a.freed).map(|a| a.base..a.end())
    }

    /// A copy of `bytes` bytes from an address on.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`] if they are not all in one allocation.
    pub fn copy_from(&self, address: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        let (a, at) = self.find("copy from global memory", address, bytes)?;
        let byte = |i: usize| (a.words[i / 4].load(Ordering::Relaxed) >> (8 * (i % 4))) as u8;
        Ok((at..at + bytes as usize).map(byte).collect())
    }

    /// Writes bytes from an address on.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`] if they are not all in one allocation.
    pub fn copy_to(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let (a, at) = self.find("copy to global memory", address, bytes.len() as u64)?;
        let mut done = 0;
        while done < bytes.len() {
            let (word, offset) = ((at + done) / 4, (at + done) % 4);
            let count = (4 - offset).min(bytes.len() - done);
            let mut value = a.words[word].load(Ordering::Relaxed).to_le_bytes();
            value[offset..offset + count].copy_from_slice(&bytes[done..done + count]);
            a.words[word].store(u32::from_le_bytes(value), Ordering::Relaxed);
            done += count;
        }
        Ok(())
    }

    /// The allocation around `bytes` at `address`, and the offset in it.
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
            if address < a.base { a.base - address } else { (address + 1).saturating_sub(a.end()) }
        };
        let Some(index) = neighbours.min_by_key(|&i| distance(&self.allocations[i])) else {
            return "there are no allocations".to_string();
        };
        let a = &self.allocations[index];
        let state = if a.freed { "freed allocation" } else { "allocation" };
        let at = address.wrapping_sub(a.base) as i64;
        format!("nearest is the {state} of {} bytes at {:#x}, offset {at}", a.bytes, a.base)
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

    /// Bytes that something has written.
    pub fn bytes(&self, access: &str, address: u64, bytes: u64) -> Result<&[u8], Fault> {
        let range = self.range(access, address, bytes)?;
        if let Some(i) = self.written[range.clone()].iter().position(|w| !w) {
            return Err(Fault::Uninitialised { address: address + i as u64 });
        }
        Ok(&self.bytes[range])
    }

    /// Loads 1 to 8 bytes.
    pub fn load(&self, address: u64, bytes: u64) -> Result<u64, Fault> {
        let found = self.bytes("shared load", address, bytes)?;
        let mut value = [0; 8];
        value[..found.len()].copy_from_slice(found);
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
