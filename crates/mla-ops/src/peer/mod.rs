//! [`PeerRank`]: sums over the devices of one process, by way of one another's memory.

#[cfg(feature = "cuda")]
mod backend;
#[cfg(feature = "cuda")]
mod memory;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use crate::MlaError;
use crate::check::Check;

const OP: &str = "all_reduce";
/// The operation's name where a group is made.
const GROUP: &str = "PeerRank::group";

/// How long a rank waits for the others, unless it is told otherwise.
#[cfg(feature = "cuda")]
const PATIENCE: Duration = Duration::from_secs(20);
/// How long it can be told to wait at most, and at least.
const MOST_PATIENCE: Duration = Duration::from_secs(1800);
const LEAST_PATIENCE: Duration = Duration::from_micros(10);

/// A rank of the devices of one process that read and write one another's memory (NVIDIA GPUs with peer access: by NVLink, or by
/// PCIe where the driver allows it).
///
/// Sums go without the host and without NCCL: each rank writes its rows into a *mailbox* in the memory of every other, and adds up
/// what it finds in its own. That is one launch, which reads `x` once and sends it to all others, and so pays for rows of a
/// decode step; for many rows a ring does (NCCL's).
///
/// Clones are the same rank. The mailboxes go with the last rank of the group, when its devices have done what was launched; graphs
/// with such sums must have gone before.
///
/// ```
/// use burn::tensor::Device;
/// use mla_ops::{MlaError, PeerRank};
///
/// // Two CUDA devices would give two ranks, of which each calls `all_reduce` on its own thread.
/// let refused = PeerRank::group(&[Device::flex(), Device::flex()]);
/// assert!(matches!(refused, Err(MlaError::UnsupportedDevice { .. })));
/// ```
#[derive(Clone)]
pub struct PeerRank {
    group: Arc<Group>,
    rank: usize,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the kernel's"))]
    patience: Duration,
}

/// What all ranks have in common.
struct Group {
    devices: Vec<Device>,
    /// In the order of the ranks.
    #[cfg(feature = "cuda")]
    memory: Vec<memory::RankMemory>,
}

impl PeerRank {
    /// The ranks of these devices, in their order: 2 to 8 CUDA devices, each once, all of which may access the memory of all others.
    /// Each gets a mailbox of 8 MiB for each rank, which CubeCL's pools do not count.
    ///
    /// # Errors
    /// [`MlaError::Value`] of another number of devices, or of one that is there twice; [`MlaError::UnsupportedDevice`] of one that is
    /// not CUDA's, that may not access the memory of another (both are named), or that fails; [`MlaError::DeviceLimit`] where there is
    /// no memory for a mailbox.
    pub fn group(devices: &[Device]) -> Result<Vec<Self>, MlaError> {
        for device in devices {
            if !crate::is_cuda(device) {
                let reason = "ranks that access one another's memory are CUDA devices (feature `cuda`)".to_string();
                return Err(unsupported(device, reason));
            }
        }
        if let Some(twice) = (1..devices.len()).find(|at| devices[..*at].contains(&devices[*at])) {
            let (actual, expected) = (format!("{:?} twice", devices[twice]), "each device once".to_string());
            return Err(MlaError::Value { op: GROUP, argument: "devices", actual, expected });
        }
        Self::of(devices)
    }

    #[cfg(feature = "cuda")]
    fn of(devices: &[Device]) -> Result<Vec<Self>, MlaError> {
        let bytes = mla_kernels::all_reduce::mailbox_bytes(devices.len()).map_err(|_| MlaError::Value {
            op: GROUP,
            argument: "devices",
            actual: format!("{} devices", devices.len()),
            expected: "2 to 8".to_string(),
        })?;
        let memory = memory::allocate(devices, bytes)?;
        let group = Arc::new(Group { devices: devices.to_vec(), memory });
        Ok((0..devices.len()).map(|rank| Self { group: group.clone(), rank, patience: PATIENCE }).collect())
    }

    #[cfg(not(feature = "cuda"))]
    fn of(devices: &[Device]) -> Result<Vec<Self>, MlaError> {
        // There is no CUDA device in this build.
        let actual = format!("{} devices", devices.len());
        Err(MlaError::Value { op: GROUP, argument: "devices", actual, expected: "2 to 8 CUDA devices".into() })
    }

    /// The number of this rank: its device's place among those of the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.group.devices.len()
    }

    /// The rank's device.
    pub fn device(&self) -> &Device {
        &self.group.devices[self.rank]
    }

    /// The most bytes of `x` that [`all_reduce`](Self::all_reduce) takes: 2 MiB.
    pub fn capacity(&self) -> usize {
        #[cfg(feature = "cuda")]
        return mla_kernels::all_reduce::CAPACITY;
        #[cfg(not(feature = "cuda"))]
        0
    }

    /// The same rank, whose later sums wait so long for the others before they give up: 20 s by default, 10 us at least and 30 minutes
    /// at most. A graph waits as long as the rank did when it was captured.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience: patience.clamp(LEAST_PATIENCE, MOST_PATIENCE), ..self }
    }

    /// The sum of `x` `[N, width]`, f32, f16 or bf16, over all ranks: a new tensor of that shape and dtype on this rank's device. Terms
    /// are added in f32, in the order of the ranks, and the sum is rounded once: all ranks get the same bits.
    ///
    /// Every rank calls it as often, with the same shapes and dtypes in the same order, and one call of a rank is over on the device
    /// before the next one begins there: the calls of a rank come from one thread, whose work CubeCL keeps in order. It may be recorded
    /// by [`capture`](crate::capture()); then the graph is replayed by all ranks, as one call.
    ///
    /// The device waits for the other ranks, not the host, which hands over at once what it has launched. Where one does not come within the patience, the sum is NaN, and so may be
    /// later ones: the group is of no use any more.
    ///
    /// # Errors
    /// Another dtype; a tensor on another device than the rank's; more than [`capacity`](Self::capacity) ([`MlaError::Value`]). What one
    /// rank refuses, all do, since they are called alike; the group goes on.
    pub fn all_reduce(&self, x: Tensor<2>) -> Result<Tensor<2>, MlaError> {
        let check = Check::new(OP, "x", &x)?;
        check.float("x", &x)?;
        if x.device() != *self.device() {
            let (actual, expected) = (format!("{:?}", x.device()), format!("{:?}", self.device()));
            return Err(MlaError::Device { op: OP, argument: "x", actual, expected, like: "the rank" });
        }
        let bytes = x.shape().num_elements().saturating_mul(x.dtype().size());
        let words = || format!("at most {} bytes", self.capacity());
        check.value("x", bytes <= self.capacity(), format!("{bytes} bytes"), words)?;
        if bytes == 0 {
            return Ok(x);
        }
        Ok(self.launch(x))
    }

    #[cfg(feature = "cuda")]
    fn launch(&self, x: Tensor<2>) -> Tensor<2> {
        // At most 30 minutes, which the units of 1024 ns of the kernel have room for.
        let patience = (self.patience.as_nanos() >> 10).clamp(1, u128::from(u32::MAX >> 1)) as u32;
        let mut mailboxes = [0; mla_kernels::all_reduce::MOST_RANKS];
        for (address, memory) in mailboxes.iter_mut().zip(&self.group.memory) {
            [*address, _] = memory.addresses();
        }
        let [_, epochs] = self.group.memory[self.rank].addresses();
        let call = backend::Call { epochs, mailboxes, rank: self.rank, ranks: self.ranks(), patience };
        backend::all_reduce(x, call)
    }

    #[cfg(not(feature = "cuda"))]
    fn launch(&self, x: Tensor<2>) -> Tensor<2> {
        x
    }

    /// For tests of their wrap-around: the next call's epoch is the one behind this. No rank may be at work.
    ///
    /// # Errors
    /// [`MlaError::UnsupportedDevice`] where a device fails.
    #[doc(hidden)]
    pub fn set_epoch(&self, epoch: u32) -> Result<(), MlaError> {
        #[cfg(feature = "cuda")]
        for (memory, device) in self.group.memory.iter().zip(&self.group.devices) {
            memory.set_epoch(epoch).map_err(|error| unsupported(device, error.to_string()))?;
        }
        let _ = epoch;
        Ok(())
    }
}

impl fmt::Debug for PeerRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, devices) = (self.rank, &self.group.devices);
        f.debug_struct("PeerRank").field("rank", &rank).field("devices", devices).finish_non_exhaustive()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What is in a queue of CubeCL's still writes into mailboxes. An error is that of something before, and comes again.
        for device in &self.devices {
            let _ = device.sync();
        }
    }
}

fn unsupported(device: &Device, reason: String) -> MlaError {
    MlaError::UnsupportedDevice { op: GROUP, device: format!("{device:?}"), reason }
}
