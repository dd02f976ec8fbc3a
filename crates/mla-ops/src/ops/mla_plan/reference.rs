use burn::backend::{Flex, tensor::IntTensor};
use burn::tensor::{Int, Tensor};

use super::backend::{MlaPlanBackend, PlanSpec, SecondLengths};
use super::planner::plan_splits;
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl MlaPlanBackend for Flex {
    fn mla_plan(
        seq_lens: IntTensor<Self>,
        second: SecondLengths<Self>,
        plan: PlanSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let second = match second {
            SecondLengths::None => None,
            SecondLengths::Lengths(lengths) => Some(tensor(lengths)),
        };
        mla_plan(tensor(seq_lens), second, &plan).into_flex()
    }
}

/// items `[capacity, 4]`, cube_ptr `[cubes + 1]`, split_ptr `[B + 1]`.
fn mla_plan(
    seq_lens: Tensor<1, Int>,
    second: Option<Tensor<1, Int>>,
    spec: &PlanSpec,
) -> (Tensor<2, Int>, Tensor<1, Int>, Tensor<1, Int>) {
    let device = seq_lens.device();
    let longest = i32::try_from(spec.max_seq_len).unwrap_or(i32::MAX);
    let mut lens = host(seq_lens);
    if let Some([first, beside]) = spec.lists {
        let in_tiles = |len: i32, most: usize| (len.max(0) as usize).min(most).next_multiple_of(spec.tile) as i32;
        let second = second.map_or_else(|| vec![beside as i32; lens.len()], host);
        lens.iter_mut().zip(second).for_each(|(len, second)| *len = in_tiles(*len, first) + in_tiles(second, beside));
    }
    let lens: Vec<i32> = lens.into_iter().map(|len| len.clamp(0, longest)).collect();
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
