//! The operations have no backward pass: a tensor on an autodiff device, and a cache on one, is a typed error.

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::batch::index_tensor;
use mla_ops::cache::{CacheConfig, CacheError, PagedCache, PoolConfig, new_pool};
use mla_ops::{MlaDecodeArgs, MlaDecodeOptions, MlaError, WriteLatentArgs, mla_decode, write_latent};

#[track_caller]
fn assert_refused(result: Result<(), MlaError>, by: &str) {
    match result {
        Err(MlaError::UnsupportedDevice { op, reason, .. }) => {
            assert_eq!(op, by);
            assert!(reason.contains("`.inner()`"), "{reason}");
        }
        other => panic!("{by}: {other:?}"),
    }
}

/// A sequence of two tokens, with each tensor on a device of its own: query, cache, page table, lengths.
fn decode([q, cache, table, lens]: [&Device; 4]) -> Result<(), MlaError> {
    let page_table = index_tensor(vec![0], table).reshape([1, 1]);
    let (q, kv_cache) = (Tensor::<4>::ones([1, 1, 2, 6], q), Tensor::<3>::ones([1, 2, 6], cache));
    let args = MlaDecodeArgs::new(q, kv_cache, page_table, index_tensor(vec![2], lens));
    mla_decode(args, &MlaDecodeOptions::new(4, 0.5), None).map(|decoded| drop(decoded.materialise()))
}

/// Two tokens into a cache, with each tensor on a device of its own: cache, slots, latents.
fn write([cache, slots, latent]: [&Device; 3]) -> Result<(), MlaError> {
    let (cache, latent) = (Tensor::<3>::zeros([1, 2, 6], cache).into(), Tensor::<2>::ones([2, 6], latent));
    let args = WriteLatentArgs { cache, slots: index_tensor(vec![0, 1], slots), latent, rope: None };
    Ok(write_latent(args).map(drop)?)
}

#[test]
fn operations_refuse_tensors_on_an_autodiff_device() {
    let (plain, tracked) = (Device::flex(), Device::flex().autodiff());
    decode([&plain; 4]).expect("a device without gradients");
    assert_refused(decode([&tracked; 4]), "mla_decode");
    for place in 0..4 {
        let mut devices = [&plain; 4];
        devices[place] = &tracked;
        assert_refused(decode(devices), "mla_decode");
    }
    write([&plain; 3]).expect("a device without gradients");
    assert_refused(write([&tracked; 3]), "write_latent");
    for place in 0..3 {
        let mut devices = [&plain; 3];
        devices[place] = &tracked;
        assert_refused(write(devices), "write_latent");
    }
}

#[test]
fn caches_are_not_made_on_an_autodiff_device() {
    let tracked = Device::flex().autodiff();
    assert_refused(new_pool([1, 2, 6], FloatDType::F32, &tracked).map(drop), "new_pool");
    let config = CacheConfig {
        pools: vec![PoolConfig::per_token(6)],
        num_pages: 2,
        page_size: 2,
        max_requests: 1,
        max_tokens: 4,
        dtype: FloatDType::F32,
    };
    match PagedCache::new(config.clone(), &tracked) {
        Err(CacheError::Mla(error)) => assert_refused(Err(error), "PagedCache"),
        other => panic!("{other:?}"),
    }
    PagedCache::new(config, &tracked.inner()).expect("the device without gradients");
}
