//! `merge_state` of tensors with more than 2^32 elements, of which a GPU with some tens of GB holds three.

use burn::tensor::{DType, Device, Tensor, TensorData};
use half::bf16;
use mla_ops::{MergeStateArgs, merge_state};

use crate::devices::{for_each_device, is_cuda, skip, supports};
use crate::ops_fixture::{assert_state, random, rng};
use crate::oracle::{self, State};

const HEADS: usize = 128;
const WIDTH: usize = 256;
/// Channels after which the values repeat: a prime, so that no two tokens nearby have the same.
const PERIOD: usize = 1_000_003;

/// A tensor `[tokens, HEADS, WIDTH]` of which every value is known without keeping all of them.
struct Side {
    /// `PERIOD` values.
    values: Vec<f64>,
    /// `[tokens, HEADS]`.
    lses: Vec<f64>,
}

impl Side {
    fn new(tokens: usize, seed: u64) -> Self {
        let mut rng = rng(seed);
        let values = random(&mut rng, PERIOD, DType::BF16);
        let mut lses = random(&mut rng, tokens * HEADS, DType::F32);
        lses.iter_mut().skip(seed as usize).step_by(10).for_each(|lse| *lse = f64::INFINITY);
        Self { values, lses }
    }

    fn tensors(&self, tokens: usize, device: &Device) -> (Tensor<3>, Tensor<2>) {
        let period: Vec<u8> = self.values.iter().flat_map(|&value| bf16::from_f64(value).to_le_bytes()).collect();
        let len = tokens * HEADS * WIDTH * size_of::<bf16>();
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            bytes.extend_from_slice(&period[..period.len().min(len - bytes.len())]);
        }
        let out = TensorData::from_bytes_vec(bytes, [tokens, HEADS, WIDTH], DType::BF16);
        let lses: Vec<f32> = self.lses.iter().map(|&lse| lse as f32).collect();
        let lse = Tensor::from_data(TensorData::new(lses, [tokens, HEADS]), (device, DType::F32));
        (Tensor::from_data(out, (device, DType::BF16)), lse)
    }

    /// Values and lse of a row, of which each token has `HEADS`.
    fn row(&self, row: usize) -> (Vec<f64>, f64) {
        let values = (0..WIDTH).map(|channel| self.values[(row * WIDTH + channel) % PERIOD]).collect();
        (values, self.lses[row])
    }
}

/// Merges two states of `tokens` tokens and compares those that are asked for with the oracle.
fn merge_and_compare(tokens: usize, compared: &[usize], device: &Device) {
    let (a, b) = (Side::new(tokens, 3), Side::new(tokens, 7));
    let ((out_a, lse_a), (out_b, lse_b)) = (a.tensors(tokens, device), b.tensors(tokens, device));
    let (out, lse) = merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b }).expect("legal");
    for &token in compared {
        let mut expected = State::default();
        for row in token * HEADS..(token + 1) * HEADS {
            let ((values_a, lse_a), (values_b, lse_b)) = (a.row(row), b.row(row));
            expected.push(oracle::merge(&[(&values_a, lse_a), (&values_b, lse_b)], WIDTH));
        }
        let merged = (out.clone().narrow(0, token, 1), lse.clone().narrow(0, token, 1));
        assert_state(&format!("merge_state, token {token} of {tokens} on {device:?}"), merged, &expected);
    }
}

/// The comparison itself, at a size that every device has room for.
#[test]
fn ops_merge_of_repeated_values() {
    for_each_device(|device| {
        if supports(device, DType::BF16) {
            merge_and_compare(65, &[0, 31, 64], device);
        }
    });
}

#[test]
fn ops_merge_past_32_bits() {
    // Token 2^17 starts at element 2^32.
    let tokens = (1 << 17) + 5;
    assert!(tokens * HEADS * WIDTH > u32::MAX as usize);
    for_each_device(|device| {
        // Two inputs and the output, and as much for copies on the way there.
        let needed = 6 * (tokens * HEADS * WIDTH * size_of::<bf16>()) as u64;
        match memory(device) {
            Some(memory) if memory >= needed => {
                merge_and_compare(tokens, &[0, 1, 1 << 16, (1 << 17) - 1, 1 << 17, tokens - 1], device);
            }
            memory => skip(device, format_args!("{memory:?} bytes for this, expected at least {needed}")),
        }
    });
}

/// Bytes of a CUDA device's memory.
fn memory(device: &Device) -> Option<u64> {
    if !is_cuda(device) {
        return None;
    }
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return device.client().properties().memory.max_memory();
    }
    None
}
