use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::mla_plan::{self as kernels, PlanArgs, PlanLists, PlanSizes, SplitMode};

use super::Splits;
use super::backend::{MlaPlanBackend, PlanSpec, SecondLengths};
use crate::MlaError;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, empty, launched};

impl MlaPlanBackend for CubeBackend {
    fn mla_plan(
        seq_lens: CubeTensor,
        second: SecondLengths<Self>,
        plan: PlanSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let seq_lens = contiguous(seq_lens);
        let [batch] = dims(&seq_lens);
        let PlanSpec { tile, cubes, splits, max_seq_len, capacity, lists } = plan;
        let items = empty(&seq_lens, [capacity, 4], DType::I32);
        let cube_ptr = empty(&seq_lens, [cubes + 1], DType::I32);
        let split_ptr = empty(&seq_lens, [batch + 1], DType::I32);
        let second = match second {
            SecondLengths::None => None,
            SecondLengths::Lengths(lengths) => Some(contiguous(lengths).into_buffer_arg()),
        };
        let (mode, lists) = (splits.into(), lists.map(|most| PlanLists { most, second }));
        let args = buffers!(seq_lens, items, cube_ptr, split_ptr => PlanArgs {
            seq_lens, lists, items, cube_ptr, split_ptr, batch, cubes, capacity, max_seq_len, tile, mode,
        });
        launched(kernels::launch(&items.client, args));
        (items, cube_ptr, split_ptr)
    }
}

/// The device plans for this.
pub(super) fn check_limits(check: &Check, batch: usize, plan: &PlanSpec) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let &PlanSpec { tile, cubes, splits, max_seq_len, capacity, .. } = plan;
    let sizes = PlanSizes { batch, cubes, capacity, max_seq_len, tile, mode: splits.into() };
    kernels::check(&client, &sizes).map_err(|error| check.device_limit("seq_lens", error))?;
    check.allocation("splits", DType::I32, [capacity, 4])
}

impl From<Splits> for SplitMode {
    fn from(splits: Splits) -> Self {
        match splits {
            Splits::Auto => Self::Auto,
            Splits::Count(n) => Self::Count(n),
            Splits::Tokens(n) => Self::Tokens(n),
        }
    }
}
