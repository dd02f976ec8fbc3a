//! Ranks on several NVIDIA GPUs: small sums in one another's memory, large ones through NCCL.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use mla_ops::{Addend, PeerRank, find_nccl, is_cuda, nccl_all_reduce};

use super::Communicator;
use super::host::{Meeting, PATIENCE};
use crate::{ModelError, Result};

/// How long a device waits for another one. Ranks do the same at the same time, but each has its kernels compiled.
const DEVICE_PATIENCE: Duration = Duration::from_secs(120);

/// A rank's end of what connects GPUs.
#[derive(Debug)]
pub(super) struct DeviceCommunicator {
    rank: usize,
    devices: Arc<[Device]>,
    /// Where devices access one another's memory.
    peer: Option<PeerRank>,
    has_nccl: bool,
    meeting: Arc<Meeting>,
}

impl DeviceCommunicator {
    /// Those of all ranks, in the order of their devices, which are connected afterwards. `None` where they are not different NVIDIA
    /// GPUs.
    ///
    /// # Errors
    /// Neither access to one another's memory nor NCCL, with the reasons.
    pub(super) fn group(devices: &[Device]) -> Result<Option<Vec<Self>>> {
        let distinct = devices.iter().enumerate().all(|(i, device)| !devices[..i].contains(device));
        if !distinct || !devices.iter().all(is_cuda) {
            return Ok(None);
        }
        let peers = PeerRank::group(devices);
        let nccl = find_nccl().map_err(ModelError::from).and_then(|()| connect(devices));
        if let (Err(peers), Err(nccl)) = (&peers, &nccl) {
            return Err(ModelError::Communicator { reason: format!("{peers}; {nccl}") });
        }
        let (has_nccl, mut peers) = (nccl.is_ok(), peers.unwrap_or_default().into_iter());
        let (shared, meeting): (Arc<[Device]>, _) = (devices.into(), Arc::new(Meeting::new(devices.len(), PATIENCE)));
        let mut one = |rank| {
            let peer = peers.next().map(|peer| peer.with_patience(DEVICE_PATIENCE));
            Self { rank, devices: shared.clone(), peer, has_nccl, meeting: meeting.clone() }
        };
        Ok(Some((0..devices.len()).map(&mut one).collect()))
    }

    fn sum(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let bytes = x.shape().num_elements().saturating_mul(x.dtype().size());
        match &self.peer {
            Some(peer) if bytes <= small(peer) => Ok(peer.all_reduce(x)?),
            Some(peer) if !self.has_nccl => in_pieces(x, peer),
            _ => Ok(nccl_all_reduce(x, &self.devices)),
        }
    }
}

/// Bytes of the largest sum that ranks write into one another's memory although there is NCCL: each sends all of it to every other.
fn small(peer: &PeerRank) -> usize {
    peer.capacity() / (peer.ranks() - 1).max(1)
}

/// A sum that is too large for one call.
fn in_pieces(x: Tensor<2>, peer: &PeerRank) -> Result<Tensor<2>> {
    let (dims, most) = (x.dims(), peer.capacity() / x.dtype().size());
    let all = dims[0] * dims[1];
    let flat = x.reshape([1, all]);
    let sums = (0..all).step_by(most).map(|start| {
        let piece = flat.clone().narrow(1, start, most.min(all - start));
        Ok(peer.all_reduce(piece)?)
    });
    Ok(Tensor::cat(sums.collect::<Result<Vec<_>>>()?, 1).reshape(dims))
}

/// Has all devices add something, which connects them: each joins on a thread of its own.
fn connect(devices: &[Device]) -> Result<()> {
    let ones = |device: &Device| nccl_all_reduce(Tensor::<1>::ones([32], device), devices);
    let sums: Vec<_> = devices.iter().map(ones).collect();
    for sum in sums {
        let device = sum.device();
        let failed = |reason: String| ModelError::Communicator { reason: format!("NCCL, on {device:?}: {reason}") };
        let sum: Vec<f32> = sum.try_into_vec_as().map_err(|error| failed(error.to_string()))?;
        if sum.iter().any(|&sum| sum != devices.len() as f32) {
            return Err(failed(format!("{} ones are {}", devices.len(), sum[0])));
        }
    }
    Ok(())
}

impl Communicator for DeviceCommunicator {
    fn all_reduce(&self, x: Addend) -> Result<Addend> {
        Ok(self.sum(x.materialise())?.into())
    }

    /// A sum, too: every rank adds nothing to the others' columns.
    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>> {
        let [rows, own] = x.dims();
        let start = (self.rank * columns.div_ceil(self.devices.len())).min(columns);
        let all = Tensor::zeros([rows, columns], (&x.device(), x.dtype()));
        self.sum(all.slice_assign([0..rows, start..start + own], x))
    }

    fn agree(&self, yes: bool) -> Result<bool> {
        self.meeting.agree(self.rank, yes)
    }

    fn leave(&self, reason: &str) {
        self.meeting.leave(self.rank, reason);
    }

    fn can_be_captured(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        match (&self.peer, self.has_nccl) {
            (Some(peer), true) => {
                format!("sums of up to {} KiB in one another's memory, others by NCCL", small(peer) >> 10)
            }
            (Some(_), false) => "sums in one another's memory; there is no NCCL, which is faster for large ones".into(),
            (None, _) => "sums by NCCL: the devices do not access one another's memory".into(),
        }
    }
}
