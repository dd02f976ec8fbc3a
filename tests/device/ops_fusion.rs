//! The operations amid elementwise work that a fusing backend defers and fuses (cargo feature `fusion`): the results are
//! those of Flex, which defers nothing.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{
    MergeStateArgs, MlaDecodeArgs, MlaDecodeOptions, MlaQuery, PagedBatchArgs, Splits, WriteLatentArgs, merge_state,
    mla_decode, page_table, write_latent,
};

use crate::devices::{for_each_device, for_each_dtype, is_cuda, is_wgpu};
use crate::ops_fixture::{floats, int_values, ints, random, rng, tolerance, values};

const HEADS: usize = 5;
const WIDTH: usize = 80;
const VALUE_WIDTH: usize = 64;
const PAGE_SIZE: usize = 16;
/// Keys before the new one, of each sequence.
const LENS: [usize; 3] = [37, 0, 16];

/// A decode step with work of Burn's own before, between and after the operations: a new token is written into the cache,
/// attended to together with the older ones, and the result merged with what other keys gave.
fn step(device: &Device, dtype: DType) -> (Tensor<3>, Tensor<2>) {
    let mut rng = rng(51);
    let batch = LENS.len();
    let pages = 8;
    let mut random = |n: usize| random(&mut rng, n, dtype);
    // By way of one dimension: CUDA's allocator pads the rows of others.
    let cache = floats(&random(pages * PAGE_SIZE * WIDTH), [pages * PAGE_SIZE * WIDTH], dtype, device);
    let cache = cache.reshape([pages, PAGE_SIZE, WIDTH]);
    let latent = floats(&random(batch * VALUE_WIDTH), [batch, VALUE_WIDTH], dtype, device);
    let rope = floats(&random(batch * (WIDTH - VALUE_WIDTH)), [batch, WIDTH - VALUE_WIDTH], dtype, device);
    let q = floats(&random(batch * HEADS * WIDTH), [batch, 1, HEADS, WIDTH], dtype, device);
    let other = floats(&random(batch * HEADS * VALUE_WIDTH), [batch, HEADS, VALUE_WIDTH], dtype, device);
    let other_lse = floats(&random(batch * HEADS), [batch, HEADS], DType::F32, device);

    // Request `r` has its tokens in order from slot `48 * r` on.
    let map: Vec<i32> = (0..3 * 40).map(|i| i / 40 * 48 + i % 40).collect();
    let lens: Vec<i32> = LENS.iter().map(|&len| len as i32).collect();
    let seq_lens = ints(&lens, [batch], device) + 1;
    let slots = ints(&[0, 48, 96], [batch], device) + ints(&lens, [batch], device);
    let paged = PagedBatchArgs {
        req_to_token: ints(&map, [3, 40], device),
        req_rows: ints(&[2, 1, 0], [batch], device) * -1 + 2,
        seq_lens: seq_lens.clone(),
        kv_start: None,
        page_size: PAGE_SIZE,
    };
    let table = page_table(paged, 3).expect("legal").table;

    let cache = write_latent(WriteLatentArgs {
        cache: cache.into(),
        slots,
        latent: latent * 0.5 - 0.25,
        rope: Some(rope * 2.0),
    });
    let args = MlaDecodeArgs {
        q: MlaQuery::Whole(q * 2.0 + 1.0),
        kv_cache: cache.expect("the only handle"),
        page_table: table + 0,
        seq_lens,
    };
    let splits = Splits::Tokens(16);
    let options = MlaDecodeOptions { value_width: VALUE_WIDTH, softmax_scale: 0.2, causal: true, splits, path: None };
    let (out, lse) = mla_decode(args, &options, None).expect("legal").materialise();
    let out = (out.exp() * 0.5).reshape([batch, HEADS, VALUE_WIDTH]);
    let lse = lse.reshape([batch, HEADS]) * 0.5;
    let merged = MergeStateArgs { out_a: out, lse_a: lse, out_b: other.exp() * 0.5, lse_b: other_lse * 2.0 + 1.0 };
    let (out, lse) = merge_state(merged).expect("legal");
    (out.exp() * 0.5 + 1.0, lse * 2.0 + 1.0)
}

#[test]
fn ops_fusion_of_a_step() {
    for_each_dtype(|device, dtype| {
        let (expected_out, expected_lse) = step(&Device::flex(), dtype);
        let (expected_out, expected_lse) = (values(expected_out), values(expected_lse));
        // Twice: a stream that was seen before is replayed.
        for _ in 0..2 {
            let (out, lse) = step(device, dtype);
            let largest = expected_out.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
            let bound = tolerance(dtype) as f32 * largest;
            for (actual, expected) in values(out).iter().zip(&expected_out) {
                assert!((actual - expected).abs() <= bound, "{dtype:?} on {device:?}: {actual}, expected {expected}");
            }
            for (actual, expected) in values(lse).iter().zip(&expected_lse) {
                assert!((actual - expected).abs() <= 1e-3, "{dtype:?} on {device:?}: {actual}, expected {expected}");
            }
        }
    });
}

/// Page ids of tensors that are not computed yet when the operation is called.
#[test]
fn ops_fusion_of_page_table() {
    for_each_device(|device| {
        let map: Vec<i32> = (0..64).map(|i| 63 - i).collect();
        let args = PagedBatchArgs {
            req_to_token: ints(&map, [2, 32], device) * 8 + 8,
            req_rows: ints(&[2, 1], [2], device) - 1,
            seq_lens: ints(&[4, 8], [2], device) * 2,
            kv_start: Some(ints(&[2, 0], [2], device) * 4),
            page_size: 8,
        };
        let table = page_table(args, 3).expect("legal").table * 2;
        // Tokens 0 and 8 of row 1 (slots 31 and 23 of the map), 8 of row 0 (slot 55).
        let page = |slot: i32| (slot + 1) * 2;
        assert_eq!(int_values(table), [page(23), -2, -2, page(63), page(55), -2], "{device:?}");
    });
}

/// A cache of some size, that work before the write has yet to compute.
fn pool(device: &Device, pages: usize) -> Tensor<3> {
    Tensor::<3>::zeros([pages, 64, 32], (device, DType::F32)) + 1.0
}

fn write(cache: Tensor<3>, slot: i32, device: &Device) -> Tensor<3> {
    let latent = Tensor::<2>::ones([1, 32], (device, DType::F32)) * 5.0;
    let args = WriteLatentArgs { cache: cache.into(), slots: ints(&[slot], [1], device), latent, rope: None };
    write_latent(args).unwrap_or_else(|refused| panic!("{refused}")).dense()
}

/// The number of the buffer that a GPU's tensor is in, once what it waits for has been computed.
#[cfg(all(feature = "fusion", feature = "_gpu"))]
pub fn buffer(tensor: &Tensor<3>) -> Option<usize> {
    use burn::backend::fusion::{Fusion, FusionBackend, FusionTensor};
    use std::marker::PhantomData;

    fn resolve<B: FusionBackend>(
        tensor: FusionTensor<B::FusionRuntime>,
        _: PhantomData<Fusion<B>>,
    ) -> B::FloatTensorPrimitive {
        tensor.client.clone().resolve_tensor_float::<B>(tensor)
    }
    let tensor = tensor.clone().try_into_primitive::<burn::backend::Cube>().ok()?;
    Some(resolve(tensor, PhantomData::<burn::backend::Cube>).handle.memory.descriptor().id.value)
}

#[cfg(all(not(feature = "fusion"), feature = "_gpu"))]
pub fn buffer(tensor: &Tensor<3>) -> Option<usize> {
    let tensor = tensor.clone().try_into_primitive::<burn::backend::Cube>().ok()?;
    Some(tensor.handle.memory.descriptor().id.value)
}

/// Flex has a test of its own for this, by address.
#[cfg(not(feature = "_gpu"))]
pub fn buffer(_: &Tensor<3>) -> Option<usize> {
    None
}

/// The pool is not copied for a write, neither by the operation nor on the way there.
#[test]
fn ops_fusion_writes_in_place() {
    for_each_device(|device| {
        let mut cache = pool(device, 3);
        let before = buffer(&cache);
        assert_eq!(before.is_some(), is_wgpu(device) || is_cuda(device));
        assert!(before.is_none() || buffer(&pool(device, 3)) != before, "what is compared tells buffers apart");
        for slot in 0..4 {
            cache = write(cache, slot * 40, device);
        }
        assert_eq!(buffer(&cache), before, "{device:?}");
        let rows = values(cache.reshape([3 * 64, 32]).narrow(1, 0, 1));
        let written: Vec<usize> = (0..rows.len()).filter(|&row| rows[row] == 5.0).collect();
        assert_eq!(written, [0, 40, 80, 120], "{device:?}");
    });
}

/// A view of the cache that is alive when it is written keeps its values.
#[test]
fn ops_fusion_leaves_views_alone() {
    for_each_device(|device| {
        let cache = pool(device, 2);
        let view = cache.clone().reshape([4, 32, 32]);
        let args = WriteLatentArgs {
            cache: cache.into(),
            slots: ints(&[3], [1], device),
            latent: Tensor::<2>::ones([1, 32], (device, DType::F32)) * 5.0,
            rope: None,
        };
        let cache = match write_latent(args) {
            Ok(cache) => {
                assert_eq!(values(cache.dense()).iter().filter(|value| **value == 5.0).count(), 32, "{device:?}");
                cache
            }
            Err(refused) => refused.cache,
        };
        assert!(values(view).iter().all(|value| *value == 1.0), "{device:?}");
        drop(cache);
    });
}
