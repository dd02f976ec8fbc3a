//! What a device cannot do is an error of the call, before anything is launched.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{
    Decoded, MergeStateArgs, MlaDecodeArgs, MlaDecodeOptions, MlaError, MlaQuery, PagedBatchArgs, RaggedAttentionArgs,
    RaggedAttentionOptions, Splits, WriteLatentArgs, kv_indices, merge_state, mla_decode, page_table, ragged_attention,
    write_latent,
};

use crate::devices::{FLOATS, for_each_device, is_cuda, is_wgpu, skip};
use crate::ops_fixture::{ints, values};

fn empty<const D: usize>(shape: [usize; D], dtype: DType, device: &Device) -> Tensor<D> {
    Tensor::empty(shape, (device, dtype))
}

fn decode(q: [usize; 4], max_pages: usize, splits: Splits, dtype: DType, device: &Device) -> Result<(), MlaError> {
    let [batch, _, _, width] = q;
    let args = MlaDecodeArgs {
        q: MlaQuery::Whole(empty(q, dtype, device)),
        kv_cache: empty::<3>([1, 64, width], dtype, device).into(),
        page_table: ints(&vec![0; batch * max_pages], [batch, max_pages], device),
        seq_lens: ints(&vec![0; batch], [batch], device),
    };
    let options = MlaDecodeOptions { value_width: width, softmax_scale: 1.0, causal: false, splits, path: None };
    mla_decode(args, &options, None).map(Decoded::materialise).map(|(_, lse)| {
        assert!(values(lse).iter().all(|lse| *lse == f32::NEG_INFINITY), "no keys, {q:?} on {device:?}");
    })
}

fn ragged(tokens: usize, heads: usize, dtype: DType, device: &Device) -> Result<(), MlaError> {
    let part = || empty([tokens, heads, 1], dtype, device);
    let cu_seqlens = ints(&[0], [1], device);
    let args = RaggedAttentionArgs { q: part(), k: part(), k_pe: None, v: part(), cu_seqlens, cu_seqlens_k: None };
    ragged_attention(args, &RaggedAttentionOptions { softmax_scale: 1.0, softcap: None, causal: true, window: None })
        .map(|_| ())
}

fn paged(device: &Device) -> PagedBatchArgs {
    let one = |value| ints(&[value], [1], device);
    let req_to_token = ints(&[0, 1], [1, 2], device);
    PagedBatchArgs { req_to_token, req_rows: one(0), seq_lens: one(2), kv_start: None, page_size: 1 }
}

fn assert_limit(result: Result<(), MlaError>, argument: &str, device: &Device) {
    match result {
        Err(MlaError::DeviceLimit { argument: named, .. }) => assert_eq!(named, argument),
        Err(other) => panic!("`{argument}` on {device:?}: {other}"),
        Ok(()) => panic!("`{argument}` was accepted on {device:?}"),
    }
}

/// A type that the device cannot compute with (bf16, on many): kernels would give garbage, or nothing at all.
#[test]
fn ops_limits_of_dtypes() {
    for_each_device(|device| {
        for dtype in FLOATS.into_iter().filter(|dtype| !device.supports_dtype(*dtype)) {
            eprintln!("no {dtype:?} on {device:?}");
            let refused = |result: Result<(), MlaError>, argument: &str| {
                let error = result.expect_err("the device has no such type");
                let named = matches!(&error, MlaError::DType { argument: it, actual, .. } if *it == argument && *actual == dtype);
                assert!(named, "{error}");
            };
            refused(decode([1, 1, 2, 8], 1, Splits::Auto, dtype, device), "q");
            refused(ragged(3, 2, dtype, device), "q");
            let part = || (empty([1, 2, 3], dtype, device), empty([1, 2], DType::F32, device));
            let ((out_a, lse_a), (out_b, lse_b)) = (part(), part());
            refused(merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b }).map(|_| ()), "out_a");
            let args = WriteLatentArgs {
                cache: empty::<3>([1, 2, 3], dtype, device).into(),
                slots: ints(&[0], [1], device),
                latent: empty([1, 3], dtype, device),
                rope: None,
            };
            refused(write_latent(args).map(|_| ()).map_err(MlaError::from), "cache");
        }
    });
}

/// More heads than a GPU has cubes for. What it does have cubes for is computed.
#[test]
fn ops_limits_of_cubes() {
    for_each_device(|device| {
        let (heads, limited) = (600_000, decode([1, 1, 600_000, 1], 1, Splits::Auto, DType::F32, device));
        if is_wgpu(device) {
            assert_limit(limited, "q", device);
        } else {
            limited.unwrap_or_else(|error| panic!("{heads} heads: {error}"));
        }
        decode([1, 1, 1000, 1], 1, Splits::Auto, DType::F32, device).expect("few enough");

        let limited = ragged(1, 70_000, DType::F32, device);
        if is_wgpu(device) || is_cuda(device) {
            assert_limit(limited, "q", device);
        } else {
            limited.expect("the CPU has no cubes");
        }
    });
}

/// Results that no buffer of the device holds. Devices with large buffers, and the CPU, would compute them.
#[test]
fn ops_limits_of_buffers() {
    for_each_device(|device| {
        if !is_wgpu(device) {
            skip(device, "it may have room");
            return;
        }
        let most = i32::MAX as usize;
        assert_limit(page_table(paged(device), most).map(|_| ()), "max_pages", device);
        assert_limit(kv_indices(paged(device), most).map(|_| ()), "capacity", device);
        // 2^20 items of 128 rows of 512 channels in f32.
        let (splits, tiles) = (Splits::Tokens(1), 1 << 20);
        assert_limit(decode([1, 1, 128, 512], tiles, splits, DType::F32, device), "splits", device);
    });
}
