//! Rows of a pool in memory, for operations whose inner loops are too small for tensor operations.

use std::borrow::Cow;

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{DType, Element, FloatDType, Tensor, bf16, f16};

use super::device_i32;
use crate::cache::Pool;

/// Numbers that are computed side by side.
pub(crate) const LANES: usize = 8;

/// The tensor of the CPU's backend.
pub(crate) fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("a tensor of the CPU")
}

/// The tensor in f32, row by row: itself where it is so.
pub(crate) fn row_by_row<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    let primitive = primitive(tensor.cast(FloatDType::F32));
    if primitive.is_contiguous() { primitive } else { primitive.to_contiguous() }
}

/// The f32 values of a tensor from [`row_by_row`].
pub(crate) fn values(primitive: &FloatTensor<Flex>) -> &[f32] {
    primitive.as_slice().expect("f32, row by row")
}

/// Rows of a pool `[P, S, D]` in f32, by groups of neighbours: of 1, or of the `S` of a page.
pub(crate) struct Rows<'a> {
    /// The groups one after the other.
    values: Cow<'a, [f32]>,
    /// Numbers of a group.
    group_len: usize,
    /// Which groups there are, ascending, if not all.
    groups: Option<Vec<i32>>,
}

impl<'a> Rows<'a> {
    /// The pool itself where it is f32 row by row, otherwise the groups that are named.
    pub(crate) fn new(pool: &'a FloatTensor<Flex>, group: usize, named: impl Iterator<Item = i32>) -> Self {
        let group_len = group * pool.layout().shape()[2];
        if let Some(values) = pool.as_slice::<f32>() {
            return Self { values: values.into(), group_len, groups: None };
        }
        let groups = distinct(named);
        Self { values: gather(pool, slots_of(&groups, group)).into(), group_len, groups: Some(groups) }
    }

    /// The groups that are named of a pool in FP8.
    pub(crate) fn dequantised(pool: &Pool, group: usize, named: impl Iterator<Item = i32>) -> Self {
        let groups = distinct(named);
        let [_, _, width] = pool.dims();
        let slots: Vec<i32> = slots_of(&groups, group).map(|slot| slot as i32).collect();
        let rows = pool.read(device_i32(slots.clone(), [slots.len()], &pool.device()));
        let values: Vec<f32> = rows.try_into_vec_as().expect("computed on the CPU");
        Self { values: values.into(), group_len: group * width, groups: Some(groups) }
    }

    /// The values of a group that was named.
    #[inline]
    pub(crate) fn group(&self, number: i32) -> &[f32] {
        let place = match &self.groups {
            Some(groups) => groups.partition_point(|other| *other < number),
            None => number as usize,
        };
        &self.values[place * self.group_len..][..self.group_len]
    }
}

/// The numbers in order, each once.
fn distinct(numbers: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut numbers: Vec<i32> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The slots of groups of so many neighbours.
fn slots_of(groups: &[i32], group: usize) -> impl Iterator<Item = usize> {
    groups.iter().flat_map(move |&number| number as usize * group..(number as usize + 1) * group)
}

/// Rows of a pool `[P, S, D]` of any float type and strides.
fn gather(pool: &FloatTensor<Flex>, slots: impl Iterator<Item = usize>) -> Vec<f32> {
    let (layout, strides) = (pool.layout(), pool.layout().strides());
    let [page_size, width] = [layout.shape()[1], layout.shape()[2]];
    let places = slots.flat_map(|slot| {
        let start = layout.start_offset() as isize;
        let start = start + (slot / page_size) as isize * strides[0] + (slot % page_size) as isize * strides[1];
        (0..width as isize).map(move |channel| (start + channel * strides[2]) as usize)
    });
    match pool.dtype() {
        DType::F16 => read(pool.storage::<f16>(), places),
        DType::BF16 => read(pool.storage::<bf16>(), places),
        _ => read(pool.storage::<f32>(), places),
    }
}

fn read<E: Element>(values: &[E], places: impl Iterator<Item = usize>) -> Vec<f32> {
    places.map(|place| values[place].elem()).collect()
}

#[inline]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    // In this order the compiler keeps the sums in whole registers.
    sums.iter().sum::<f32>() + rest
}
