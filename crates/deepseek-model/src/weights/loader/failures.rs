//! Memory that runs out while weights are loaded: another program may take what was free at the start.

use burn::tensor::{Tensor, kind::Basic};
use mla_ops::WeightBlocks;

use super::WeightLoader;
use crate::memory;

impl WeightLoader<'_> {
    /// The tensor. The first failure of the device to make one is kept for the end.
    pub(super) fn checked<const D: usize, K: Basic>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        if self.failed.is_none() {
            self.failed = memory::check_allocated("weights", &tensor, &self.device).err();
        }
        tensor
    }

    /// The same of codes and scales.
    pub(super) fn checked_blocks(&mut self, blocks: WeightBlocks) -> WeightBlocks {
        let (codes, scales) = (self.checked(blocks.codes), self.checked(blocks.scales));
        WeightBlocks { codes, scales, ..blocks }
    }
}
