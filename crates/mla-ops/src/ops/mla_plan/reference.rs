use burn::backend::{Flex, tensor::IntTensor};
use burn::tensor::{Int, Tensor};

use super::backend::{MlaPlanBackend, PlanSpec};
use super::planner::plan_splits;
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl MlaPlanBackend for Flex {
    fn mla_plan(seq_lens: IntTensor<Self>, plan: PlanSpec) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        mla_plan(tensor(seq_lens), &plan).into_flex()
    }
}

/// items `[capacity, 4]`, cube_ptr `[cubes + 1]`, split_ptr `[B + 1]`.
fn mla_plan(seq_lens: Tensor<1, Int>, spec: &PlanSpec) -> (Tensor<2, Int>, Tensor<1, Int>, Tensor<1, Int>) {
    let device = seq_lens.device();
    let longest = i32::try_from(spec.max_seq_len).unwrap_or(i32::MAX);
    let lens: Vec<i32> = host(seq_lens).into_iter().map(|len| len.clamp(0, longest)).collect();
    let plan = plan_splits(&lens, spec.tile, spec.cubes, spec.splits);

    let mut items = Vec::with_capacity(spec.capacity * 4);
    for item in &plan.items {
        items.extend([item.sequence, item.first_key, item.end_key, item.split].map(|field| field as i32));
    }
    items.resize(spec.capacity * 4, -1);
    let to_device = |values: Vec<u32>| {
        let shape = [values.len()];
        device_i32(values.into_iter().map(|value| value as i32).collect(), shape, &device)
    };
    (device_i32(items, [spec.capacity, 4], &device), to_device(plan.cube_ptr), to_device(plan.split_ptr))
}
