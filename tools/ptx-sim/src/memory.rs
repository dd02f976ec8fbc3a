//! Memory: global allocations with bounds, windows of generic addresses.
use crate::error::Fault;
use crate::parse::Variable;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Where shared memory lies in generic addresses (PTX ISA 5.1 and `cvta`).
pub(crate) const SHARED_WINDOW: u64 = 0x0000_1000_0000_0000;
/// Where parameters lie in generic addresses.
pub(crate) const PARAM_WINDOW: u64 = 0x0000_2000_0000_0000;
/// Where the executing thread's local memory lies in generic addresses.
pub(crate) const LOCAL_WINDOW: u64 = 0x0000_3000_0000_0000;
/// Where the variables of modules lie.
pub(crate) const VARIABLES: u64 = 0x0000_4000_0000_0000;
/// Where the first allocation starts.
const GLOBAL_BASE: u64 = 0x0000_7000_0000_0000;
/// The addresses of a device are so many bits.
const DEVICE_BITS: u32 = 40;
/// Bytes between allocations.
const GAP: u64 = 1 << 20;
/// Freed allocations that error messages can still name.
const MOST_FREED: usize = 4096;

pub(crate) fn align_up(value: u64, align: u64) -> u64 {
    value.div_ceil(align.max(1)) * align.max(1)
}

/// The addresses of a module's variables.
pub(crate) fn variable_addresses(variables: &[Variable]) -> Vec<u64> {
    let mut end = VARIABLES;
    let mut place = |variable: &Variable| {
        let start = align_up(end, variable.align.max(256));
        end = start + variable.bytes + 1;
        start
    };
    variables.iter().map(&mut place).collect()
}

/// An allocation of global memory, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer(u64);

#[derive(Clone)]
struct Allocation {
    base: u64,
    bytes: u64,
    /// Empty after the allocation was freed.
    words: Arc<[AtomicU32]>,
    freed: bool,
    /// Whether it is another device's.
    foreign: bool,
    /// Whether a kernel of another device than its own has accessed it.
    reached: Arc<AtomicBool>,
}

/// An allocation that kernels of other devices may access, too.
#[derive(Clone)]
pub struct Shared(Allocation);

/// How an access is ordered (PTX ISA, "Memory Consistency Model").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strength {
    /// It orders nothing.
    Weak,
    /// A strong one within the device.
    Device,
    /// A strong one of the scope of the system.
    System,
}

impl Strength {
    pub fn is_strong(self) -> bool {
        self != Self::Weak
    }
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
    /// Whether allocations of other devices are among them.
    has_foreign: bool,
}

/// Taken for atomics and strong accesses of 64 bits, which span two words. One for all, since memories share allocations.
static WIDE: Mutex<()> = Mutex::new(());

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// The variables of a module with their initial values.
    pub(crate) fn of_variables(variables: &[Variable]) -> Self {
        let mut memory = Self::new();
        for (variable, address) in variables.iter().zip(variable_addresses(variables)) {
            let mut bytes = variable.initial.clone();
            bytes.resize(variable.bytes as usize, 0);
            memory.insert(memory.allocations.len(), address, &bytes);
        }
        memory
    }

    /// Allocates a copy of `bytes`, aligned as `cudaMalloc` does (256 bytes). Its end is exact.
    pub fn alloc(&mut self, bytes: &[u8]) -> Buffer {
        self.alloc_after(0, bytes)
    }

    /// The same, at an address of its own for each device: the first allocation of a memory decides.
    pub fn alloc_after(&mut self, device: u64, bytes: &[u8]) -> Buffer {
        let first = GLOBAL_BASE + (device << DEVICE_BITS);
        let base = self.allocations.last().map_or(first, |a| align_up(a.end() + GAP, 256));
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
        let windows = [SHARED_WINDOW, PARAM_WINDOW, LOCAL_WINDOW, VARIABLES].map(|start| start..start + (1 << 44));
        if address == 0 || windows.iter().any(|w| address < w.end && end > w.start) {
            return Err(bad("the addresses belong to another state space or to no allocation"));
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
        self.allocations.insert(
            at,
            Allocation {
                base,
                bytes: bytes.len() as u64,
                words,
                freed: false,
                foreign: false,
                reached: Arc::default(),
            },
        );
        Buffer(base)
    }

    /// An allocation for the memory of another device.
    pub fn share(&self, buffer: Buffer) -> Option<Shared> {
        let at = self.allocations.binary_search_by_key(&buffer.0, |a| a.base).ok()?;
        Some(Shared(Allocation { foreign: true, ..self.allocations[at].clone() }))
    }

    /// Adds allocations of other devices, whose addresses are others.
    pub fn borrow_from(&mut self, shared: impl IntoIterator<Item = Shared>) {
        let before = self.allocations.len();
        self.allocations.extend(shared.into_iter().map(|shared| shared.0));
        self.has_foreign = self.allocations.len() > before;
        if self.has_foreign {
            self.allocations.sort_by_key(|a| a.base);
        }
    }

    /// Forgets those of other devices.
    pub fn give_back(&mut self) {
        if self.has_foreign {
            self.allocations.retain(|a| !a.foreign);
            self.has_foreign = false;
        }
    }

    /// Whether there are allocations of other devices.
    pub(crate) fn has_foreign(&self) -> bool {
        self.has_foreign
    }

    /// Notes an access by a kernel. What kernels of two devices access, all of them access with the scope of the system: nothing
    /// else makes their accesses morally strong, and they run beside one another.
    pub(crate) fn reach(&self, access: &'static str, address: u64, strength: Strength) -> Result<(), Fault> {
        let after = self.allocations.partition_point(|a| a.base <= address);
        let Some(a) = self.allocations[..after].last() else { return Ok(()) };
        match strength {
            Strength::System if a.foreign => a.reached.store(true, Ordering::Relaxed),
            Strength::System => {}
            _ if a.foreign || a.reached.load(Ordering::Relaxed) => return Err(Fault::PeerRace { access, address }),
            _ => {}
        }
        Ok(())
    }

    /// Frees an allocation: an access to it is an error from now on.
    pub fn free(&mut self, buffer: Buffer) {
        if let Ok(i) = self.allocations.binary_search_by_key(&buffer.0, |a| a.base) {
            self.allocations[i].freed = true;
            self.allocations[i].words = Arc::default();
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

    /// Loads up to 32 bytes; within words of four the address is a multiple of their number.
    #[inline]
    pub(crate) fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let (a, at) = self.find("global load", address, into.len() as u64)?;
        if at.is_multiple_of(4) {
            for (i, part) in into.chunks_mut(4).enumerate() {
                let word = a.words[at / 4 + i].load(Ordering::Relaxed).to_le_bytes();
                part.copy_from_slice(&word[..part.len()]);
            }
            return Ok(());
        }
        for (i, byte) in into.iter_mut().enumerate() {
            *byte = (a.words[(at + i) / 4].load(Ordering::Relaxed) >> (8 * ((at + i) % 4))) as u8;
        }
        Ok(())
    }

    /// Stores whole words of four bytes, or one or two bytes within a word.
    #[inline]
    pub(crate) fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let (a, at) = self.find("global store", address, from.len() as u64)?;
        for (i, part) in from.chunks(4).enumerate() {
            let word = &a.words[at / 4 + i];
            let mut value = [0; 4];
            value[..part.len()].copy_from_slice(part);
            let value = u32::from_le_bytes(value);
            if part.len() == 4 {
                word.store(value, Ordering::Relaxed);
                continue;
            }
            // Other CTAs may write the word's other bytes.
            let shift = 8 * (at % 4) as u32;
            let mask = ((1u32 << (8 * part.len())) - 1) << shift;
            let bits = value << shift & mask;
            let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |w| Some(w & !mask | bits));
        }
        Ok(())
    }

    /// As [`load`](Self::load), at once for 8 bytes.
    pub(crate) fn load_strong(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let _guard = (into.len() == 8).then(|| WIDE.lock().unwrap_or_else(PoisonError::into_inner));
        self.load(address, into)
    }

    /// As [`store`](Self::store), at once for 8 bytes.
    pub(crate) fn store_strong(&self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let _guard = (from.len() == 8).then(|| WIDE.lock().unwrap_or_else(PoisonError::into_inner));
        self.store(address, from)
    }

    /// Replaces a value of 2, 4 or 8 bytes atomically and returns the old one.
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
        if bytes == 2 {
            let shift = 8 * (at % 4) as u32;
            let word = &a.words[at / 4];
            let new =
                |w: u32| Some(w & !(0xffff << shift) | (f(u64::from(w >> shift & 0xffff)) as u32 & 0xffff) << shift);
            let old = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, new).unwrap_or_default();
            return Ok(u64::from(old >> shift & 0xffff));
        }
        let _guard = WIDE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut old = [0; 8];
        self.load(address, &mut old)?;
        let old = u64::from_le_bytes(old);
        self.store(address, &f(old).to_le_bytes())?;
        Ok(old)
    }
}
