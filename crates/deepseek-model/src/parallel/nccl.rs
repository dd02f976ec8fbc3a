//! Ranks on several NVIDIA GPUs, which exchange values through NCCL.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use mla_ops::{Addend, find_nccl, is_cuda, nccl_all_reduce};

use super::Communicator;
use super::host::Meeting;
use crate::{ModelError, Result};

/// How long a rank waits for the others where they meet on the host, before and after a capture.
const PATIENCE: Duration = Duration::from_secs(600);

/// A rank's end of what NCCL connects.
#[derive(Debug)]
pub(super) struct DeviceCommunicator {
    rank: usize,
    devices: Arc<[Device]>,
    meeting: Arc<Meeting>,
}

impl DeviceCommunicator {
    /// Those of all ranks, in the order of their devices, which are connected afterwards. `None` where they are not different NVIDIA
    /// GPUs.
    pub(super) fn group(devices: &[Device]) -> Result<Option<Vec<Self>>> {
        let distinct = devices.iter().enumerate().all(|(i, device)| !devices[..i].contains(device));
        if !distinct || !devices.iter().all(is_cuda) {
            return Ok(None);
        }
        find_nccl()?;
        connect(devices)?;
        let (shared, meeting): (Arc<[Device]>, _) = (devices.into(), Arc::new(Meeting::new(devices.len(), PATIENCE)));
        let one = |rank| Self { rank, devices: shared.clone(), meeting: meeting.clone() };
        Ok(Some((0..devices.len()).map(one).collect()))
    }
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
        Ok(nccl_all_reduce(x.materialise(), &self.devices).into())
    }

    /// A sum, too: every rank adds nothing to the others' columns.
    fn all_gather(&self, x: Tensor<2>, columns: usize) -> Result<Tensor<2>> {
        let [rows, own] = x.dims();
        let start = (self.rank * columns.div_ceil(self.devices.len())).min(columns);
        let all = Tensor::zeros([rows, columns], (&x.device(), x.dtype()));
        Ok(nccl_all_reduce(all.slice_assign([0..rows, start..start + own], x), &self.devices))
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
}
