//! Several devices: what each of them has that others may access, and which of them do.
use crate::code::Code;
use crate::config::Config;
use crate::gpu::Gpu;
use ptx_sim::Shared;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The primary contexts have this number and those behind it.
const CONTEXT: usize = 0xc0de;
/// Handles of a device are so many bits, its number is above them.
const HANDLE_BITS: u32 = 40;

thread_local! {
    /// The device whose context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What the devices know of one another.
pub struct Peers {
    /// The allocations of each.
    allocations: Vec<Mutex<BTreeMap<u64, Shared>>>,
    /// Pairs of whom the first may access the memory of the second.
    enabled: Mutex<BTreeSet<(usize, usize)>>,
    since: Instant,
}

impl Peers {
    fn new(devices: usize) -> Self {
        let allocations = (0..devices).map(|_| Mutex::default()).collect();
        Self { allocations, enabled: Mutex::default(), since: Instant::now() }
    }

    /// Since when there are several devices; none of one alone, whose launches have nobody to wait for.
    pub fn beside(&self) -> Option<Instant> {
        (self.allocations.len() > 1).then_some(self.since)
    }

    /// A device has allocated.
    pub fn allocated(&self, device: usize, address: u64, shared: Option<Shared>) {
        if let Some(shared) = shared.filter(|_| self.beside().is_some()) {
            locked(&self.allocations[device]).insert(address, shared);
        }
    }

    /// A device has freed.
    pub fn freed(&self, device: usize, address: u64) {
        locked(&self.allocations[device]).remove(&address);
    }

    /// The memory of others that kernels of a device may access.
    pub fn reachable(&self, device: usize) -> Vec<Shared> {
        let enabled = locked(&self.enabled);
        let peers = enabled.iter().filter(|(from, _)| *from == device).map(|(_, to)| *to);
        peers.flat_map(|peer| locked(&self.allocations[peer]).values().cloned().collect::<Vec<_>>()).collect()
    }
}

/// All devices of the machine.
pub struct Devices {
    /// The settings.
    pub config: Config,
    gpus: Vec<Mutex<Gpu>>,
    peers: Arc<Peers>,
}

impl Devices {
    /// Devices on which nothing has happened.
    pub fn new(config: Config) -> Self {
        let peers = Arc::new(Peers::new(config.devices));
        let gpu = |device| Mutex::new(Gpu::new(config.clone(), device, peers.clone()));
        Self { gpus: (0..config.devices).map(gpu).collect(), peers, config }
    }

    /// The device of this number.
    ///
    /// # Errors
    /// [`Code::InvalidDevice`].
    pub fn number(&self, device: i32) -> Result<usize, Code> {
        usize::try_from(device).ok().filter(|device| *device < self.gpus.len()).ok_or(Code::InvalidDevice)
    }

    /// The context of a device.
    pub fn context(&self, device: usize) -> usize {
        CONTEXT + device
    }

    fn of_context(&self, context: usize) -> Result<usize, Code> {
        let device = context.checked_sub(CONTEXT).filter(|device| *device < self.gpus.len());
        device.ok_or(Code::InvalidContext)
    }

    /// Makes a context the current one of this thread, or none, which is 0.
    ///
    /// # Errors
    /// [`Code::InvalidContext`].
    pub fn set_current(&self, context: usize) -> Result<(), Code> {
        let device = if context == 0 { None } else { Some(self.of_context(context)?) };
        CURRENT.set(device);
        Ok(())
    }

    /// The device of this thread's context. Where there is one device alone, programs need not have set it.
    pub fn current(&self) -> Option<usize> {
        CURRENT.get().or((self.gpus.len() == 1).then_some(0))
    }

    /// Locks the device of a handle, or without one that of this thread's context.
    ///
    /// # Errors
    /// [`Code::InvalidContext`], [`Code::InvalidHandle`].
    pub fn lock(&self, handle: Option<usize>) -> Result<MutexGuard<'_, Gpu>, Code> {
        let device = match handle {
            Some(handle) => handle >> HANDLE_BITS,
            None => self.current().ok_or(Code::InvalidContext)?,
        };
        self.gpus.get(device).map(locked).ok_or(Code::InvalidHandle)
    }

    /// Lets the kernels of this thread's device access the memory of a context's.
    ///
    /// # Errors
    /// [`Code::InvalidContext`], also of the device itself; [`Code::PeerAccessAlreadyEnabled`].
    pub fn enable_peer(&self, context: usize) -> Result<(), Code> {
        let (from, to) = (self.current().ok_or(Code::InvalidContext)?, self.of_context(context)?);
        if from == to {
            return Err(Code::InvalidContext);
        }
        let is_new = locked(&self.peers.enabled).insert((from, to));
        if is_new { Ok(()) } else { Err(Code::PeerAccessAlreadyEnabled) }
    }

    /// Takes that back.
    ///
    /// # Errors
    /// [`Code::InvalidContext`], [`Code::PeerAccessNotEnabled`].
    pub fn disable_peer(&self, context: usize) -> Result<(), Code> {
        let pair = (self.current().ok_or(Code::InvalidContext)?, self.of_context(context)?);
        if locked(&self.peers.enabled).remove(&pair) { Ok(()) } else { Err(Code::PeerAccessNotEnabled) }
    }
}

/// The first handle of a device, but 16 times smaller.
pub fn first_handle(device: usize) -> usize {
    device << (HANDLE_BITS - 4)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
