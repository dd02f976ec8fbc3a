//! Bytes of files that become tensors, in parts and where a device takes them.

use burn::tensor::{DType, Device, Float, FloatDType, bf16};
use burn_std::{AccessError, AllocationProperty, Bytes, Reader};
use rstest::rstest;
use safetensors::Dtype;

use super::gather::{Gather, Span};
use super::read::{Filling, Matrices};
use super::stored::Stored;
use super::tests::{Tensors, single};
use crate::parallel::Part;

/// Two matrices `[6, 10]` in two dtypes: 0 to 59, and 60 to 119.
fn matrices() -> Tensors {
    let first = (0..60).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let second = (60..120).flat_map(|at| bf16::from_f32(at as f32).to_le_bytes()).collect();
    vec![("a", Dtype::F32, vec![6, 10], first), ("b", Dtype::BF16, vec![6, 10], second)]
}

#[rstest]
fn matrices_are_the_same_in_any_parts(
    #[values(4, 12, 64, 1 << 16, usize::MAX)] at_once: usize,
    #[values(0..10, 3..8)] columns: std::ops::Range<usize>,
    #[values(FloatDType::F32, FloatDType::BF16)] dtype: FloatDType,
) {
    let (_dir, checkpoint) = single(matrices());
    let stored = ["a", "b"].map(|name| Stored::plain(&checkpoint.tensors[name]));
    let part = Part { axis: 1, range: columns.clone() };
    let matrices = Matrices { checkpoint: &checkpoint, stored: &stored, each: &[6, 10], part: &part };
    let len = 2 * 6 * columns.len();
    let mut filling = Filling::<Float>::in_parts(&Device::flex(), dtype.into(), len, at_once);
    stored.iter().for_each(|stored| filling.take(&matrices, stored, dtype));
    let filled = filling.finish().unwrap().cast(FloatDType::F32).into_data().try_to_vec::<f32>().unwrap();
    let expected: Vec<f32> = (0..120).filter(|at| columns.contains(&(at % 10))).map(|at| at as f32).collect();
    assert_eq!(filled, expected);
}

/// More than one thread reads at once, with rows that are left out, and a last word that is not whole.
fn bytes() -> (Vec<u8>, Bytes) {
    let all: Vec<u8> = (0..1_300_001).map(|at| (at * 31 + at / 251) as u8).collect();
    let (_dir, checkpoint) = single(vec![("a", Dtype::U8, vec![all.len()], all.clone())]);
    let (file, start) = (&checkpoint.shards[0].bytes, checkpoint.tensors["a"].start);
    let mut gather = Gather::default();
    gather.push(Span::new(file, start + 7, [1, 600_000], 600_000));
    gather.push(Span::new(file, start + 3, [1000, 500], 1300));
    gather.push(Span::new(file, start, [1, 1], 1));
    let rows = (0..1000).flat_map(|row| &all[3 + row * 1300..][..500]);
    let expected = all[7..600_007].iter().chain(rows).chain([&all[0], &0, &0, &0]).copied().collect();
    let (bytes, ..) = gather.unread(1_100_004 / 4, DType::I32).into_parts();
    (expected, bytes)
}

#[test]
fn a_device_reads_bytes_where_it_wants_them() {
    let (expected, unread) = bytes();
    assert_eq!((unread.property(), unread.len()), (AllocationProperty::File, expected.len()));
    let mut there = Bytes::from_bytes_vec(vec![0xff; expected.len()]);
    unread.copy_into(&mut there);
    assert!(there[..] == expected);
    assert_eq!(unread.read(Reader::new().no_copy()), Err(AccessError::WouldCopy), "nothing has read them");
}

#[test]
fn bytes_that_are_looked_at_are_read() {
    let (mut expected, mut unread) = bytes();
    assert!(unread[..] == expected);
    (unread[5], expected[5]) = (1, 1);
    let mut there = Bytes::from_bytes_vec(vec![0xff; expected.len()]);
    unread.copy_into(&mut there);
    assert!(there[..] == expected, "with what was written there");
}
