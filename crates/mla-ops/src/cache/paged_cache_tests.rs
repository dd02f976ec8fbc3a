//! Tests of the paged cache by examples.

use burn::backend::Flex;
use burn::tensor::{Distribution, FloatDType};

use super::super::RowFormat;
use super::*;
use crate::reference::device_i32;
use crate::{WriteLatentArgs, write_latent};

const LAYERS: usize = 2;
pub(super) const PAGE: usize = 4;
const WIDTH: usize = 3;

fn config() -> CacheConfig {
    CacheConfig {
        pools: vec![PoolConfig::per_token(WIDTH); LAYERS],
        num_pages: 8,
        page_size: PAGE,
        max_requests: 4,
        max_tokens: 18,
        dtype: FloatDType::F32,
    }
}

pub(super) fn cache() -> PagedCache {
    PagedCache::new(config(), &Device::flex()).unwrap()
}

/// What the tests write into layer `layer` for the token `value`.
fn row(value: f32, layer: usize) -> [f32; WIDTH] {
    [value, layer as f32, -value]
}

pub(super) fn write_rows(cache: &mut PagedCache, slots: &[i32], values: &[f32]) {
    for layer in 0..LAYERS {
        let mut pool = cache.take_pool(layer).unwrap().dense();
        for (&slot, &value) in slots.iter().zip(values) {
            let (page, offset) = (slot as usize / PAGE, slot as usize % PAGE);
            let data = TensorData::new(row(value, layer).to_vec(), [1, 1, WIDTH]);
            let place = [page..page + 1, offset..offset + 1, 0..WIDTH];
            pool = pool.slice_assign(place, Tensor::from_data(data, &Device::flex()));
        }
        cache.put_pool(layer, pool.into()).unwrap();
    }
}

/// The rows of a request in a layer, found the way the kernels find them: row of the map, slots, pool.
fn read_rows(cache: &mut PagedCache, request: RequestId, layer: usize) -> Vec<f32> {
    let len = cache.len(request).unwrap();
    if len == 0 {
        return Vec::new();
    }
    let rows = cache.rows(&[request]).unwrap();
    let slots: Tensor<2, Int> = cache.req_to_token().unwrap().select(0, rows).slice([0..1, 0..len]);
    assert_pages(cache, request, slots.clone());
    let rows = cache.pool(layer).unwrap().read(slots.reshape([len]));
    rows.into_data().try_into_vec().unwrap()
}

/// The pages that the host lists are those of the map, and behind them there is none.
fn assert_pages(cache: &PagedCache, request: RequestId, slots: Tensor<2, Int>) {
    let pages = cache.max_pages(&[request]).unwrap();
    let table = ints(cache.page_table(&[request, request], pages + 1).unwrap().reshape([2 * (pages + 1)]));
    let slots = ints(slots.squeeze_dim(0));
    let expected: Vec<i32> = slots.iter().step_by(PAGE).map(|slot| slot / PAGE as i32).chain([-1]).collect();
    assert_eq!(table, expected.repeat(2));
}

fn expected_rows(values: &[f32], layer: usize) -> Vec<f32> {
    values.iter().flat_map(|&v| row(v, layer)).collect()
}

pub(super) fn assert_holds(cache: &mut PagedCache, request: RequestId, values: &[f32]) {
    assert_eq!(cache.len(request), Ok(values.len()));
    for layer in 0..LAYERS {
        let rows = read_rows(cache, request, layer);
        assert_eq!(rows, expected_rows(values, layer), "{request}");
    }
}

fn ints(tensor: Tensor<1, Int>) -> Vec<i32> {
    assert_eq!(tensor.dtype(), DType::I32);
    tensor.into_data().try_into_vec().unwrap()
}

#[test]
fn append_fills_pages_in_order() {
    let mut cache = cache();
    let (a, b) = (cache.admit().unwrap(), cache.admit().unwrap());
    assert_eq!(cache.append(a, 3), Ok(vec![0, 1, 2]));
    assert_eq!(cache.append(b, 1), Ok(vec![4]));
    assert_eq!(cache.append(a, 3), Ok(vec![3, 8, 9]));
    assert_eq!(cache.append(a, 0), Ok(vec![]));
    assert_eq!(cache.pages(a), Ok(&[0, 2][..]));
    assert_eq!(ints(cache.seq_lens(&[b, a, b]).unwrap()), [1, 6, 1]);
    assert_eq!(ints(cache.rows(&[b, a, b]).unwrap()), [1, 0, 1]);
    assert_eq!(cache.max_pages(&[b, a]), Ok(2));
    assert_eq!((cache.pages_in_use(), cache.free_pages()), (3, 5));
    assert_eq!(cache.bytes_per_token(), LAYERS * WIDTH * 4);
    assert_eq!(cache.bytes_in_use(), 3 * PAGE * LAYERS * WIDTH * 4);
}

#[test]
fn an_empty_batch_has_empty_inputs() {
    let cache = cache();
    assert_eq!(cache.seq_lens(&[]).unwrap().dims(), [0]);
    assert_eq!(cache.rows(&[]).unwrap().dims(), [0]);
    assert_eq!(cache.max_pages(&[]), Ok(0));
}

#[test]
fn a_shared_partly_filled_page_is_copied_on_write() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    let slots = cache.append(a, 6).unwrap();
    write_rows(&mut cache, &slots, &[1., 2., 3., 4., 5., 6.]);
    let b = cache.fork(a).unwrap();
    assert_eq!((cache.pages(b), cache.pages_in_use()), (cache.pages(a), 2));

    let slots = cache.append(b, 1).unwrap();
    write_rows(&mut cache, &slots, &[70.]);
    assert_eq!(cache.pages(a), Ok(&[0, 1][..]));
    assert_eq!(cache.pages(b), Ok(&[0, 2][..]));
    // `a` is alone on its last page again, and writes where it is.
    let slots = cache.append(a, 2).unwrap();
    assert_eq!(slots, [6, 7]);
    write_rows(&mut cache, &slots, &[7., 8.]);

    assert_holds(&mut cache, a, &[1., 2., 3., 4., 5., 6., 7., 8.]);
    assert_holds(&mut cache, b, &[1., 2., 3., 4., 5., 6., 70.]);
}

#[test]
fn a_shared_full_page_is_not_copied() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    cache.append(a, PAGE).unwrap();
    let b = cache.fork(a).unwrap();
    cache.append(b, 1).unwrap();
    assert_eq!(cache.pages(b), Ok(&[0, 1][..]));
    assert_eq!(cache.pages_in_use(), 2);
}

#[test]
fn copying_a_page_leaves_the_pools_and_the_map_in_place() {
    fn addresses(cache: &mut PagedCache) -> [*const u8; LAYERS + 1] {
        let pool = |layer| {
            let primitive = cache.pool(layer).unwrap().dense().try_into_primitive::<Flex>();
            primitive.unwrap().bytes().as_ptr()
        };
        let pools = [0, 1].map(pool);
        let map = cache.req_to_token().unwrap().try_into_primitive::<Flex>();
        [pools[0], pools[1], map.unwrap().bytes().as_ptr()]
    }
    let mut cache = cache();
    let before = addresses(&mut cache);
    let a = cache.admit().unwrap();
    cache.append(a, 6).unwrap();
    let b = cache.fork(a).unwrap();
    cache.append(b, 1).unwrap();
    assert_eq!(addresses(&mut cache), before);
}

#[test]
fn a_failed_append_loses_nothing() {
    let mut cache = cache();
    let (a, b) = (cache.admit().unwrap(), cache.admit().unwrap());
    cache.append(a, 18).unwrap();
    let slots = cache.append(b, 10).unwrap();
    let values: Vec<f32> = (0..10).map(|v| v as f32).collect();
    write_rows(&mut cache, &slots, &values);
    let c = cache.fork(b).unwrap();
    assert_eq!(cache.free_pages(), 0);
    let full = CacheError::OutOfPages { needed: 1, free: 0, total: 8 };
    // `c` has room in its last page, but the page is shared, and there is none to copy it to.
    assert_eq!(cache.append(c, 1), Err(full));
    assert_holds(&mut cache, c, &values);
    let too_long = CacheError::RequestTooLong { request: a, tokens: 19, max: 18 };
    assert_eq!(cache.append(a, 1), Err(too_long));
    assert!(cache.append(a, usize::MAX).is_err());
    cache.free(b).unwrap();
    assert_eq!(cache.append(c, 1).unwrap(), [slots[9] + 1]);
}

#[test]
fn a_taken_pool_is_an_error_until_it_is_back() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    cache.append(a, 1).unwrap();
    let b = cache.fork(a).unwrap();
    let pool = cache.take_pool(1).unwrap();
    let taken = CacheError::PoolTaken { pool: 1 };
    assert_eq!(cache.pool(1).err(), Some(taken.clone()));
    assert_eq!(cache.take_pool(1).err(), Some(taken.clone()));
    assert_eq!(cache.append(b, 1), Err(taken));
    assert_eq!((cache.len(b), cache.pages_in_use()), (Ok(1), 1));
    let wrong = Tensor::<3>::zeros([8, PAGE, WIDTH + 1], &Device::flex());
    assert!(matches!(cache.put_pool(1, wrong.into()), Err(CacheError::Mla(MlaError::Shape { .. }))));
    cache.put_pool(1, pool.clone()).unwrap();
    let present = CacheError::PoolNotTaken { pool: 1 };
    assert_eq!(cache.put_pool(1, pool), Err(present));
    assert_eq!(cache.append(b, 1), Ok(vec![5]));
    assert!(matches!(cache.pool(2), Err(CacheError::Mla(_))));
}

#[test]
fn retained_pages_begin_another_request() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    let slots = cache.append(a, 10).unwrap();
    let values: Vec<f32> = (0..10).map(|value| value as f32).collect();
    write_rows(&mut cache, &slots, &values);
    let whole = cache.pages(a).unwrap()[..2].to_vec();
    cache.retain(&whole).unwrap();
    cache.free(a).unwrap();
    assert_eq!((cache.pages_in_use(), cache.holders(whole[0])), (2, 1));
    let b = cache.admit_with(&whole).unwrap();
    assert_eq!((cache.len(b), cache.holders(whole[0])), (Ok(8), 2));
    // The next token opens a page: nothing is copied.
    let slot = cache.append(b, 1).unwrap();
    write_rows(&mut cache, &slot, &[50.0]);
    assert_holds(&mut cache, b, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 50.0]);
    cache.free(b).unwrap();
    cache.release(&whole).unwrap();
    assert_eq!(cache.pages_in_use(), 0);
    let unheld = CacheError::NotAllocated { page: whole[0] };
    assert_eq!(cache.admit_with(&whole), Err(unheld.clone()));
    assert_eq!(cache.release(&whole), Err(unheld));
}

#[test]
fn pages_are_not_held_by_a_request_that_was_refused() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    cache.append(a, 8).unwrap();
    let pages = cache.pages(a).unwrap().to_vec();
    for _ in 1..4 {
        cache.admit().unwrap();
    }
    assert_eq!(cache.admit_with(&pages), Err(CacheError::OutOfRequests { max: 4 }));
    assert!(matches!(cache.admit_with(&pages.repeat(3)), Err(CacheError::RequestTooLong { tokens: 24, .. })));
    assert_eq!(cache.holders(pages[0]), 1);
}

#[test]
fn stale_ids_are_unknown_for_ever() {
    let mut cache = cache();
    let a = cache.admit().unwrap();
    cache.free(a).unwrap();
    let b = cache.admit().unwrap();
    assert_ne!(a, b);
    let unknown = CacheError::UnknownRequest { request: a };
    assert_eq!(cache.free(a), Err(unknown.clone()));
    assert_eq!(cache.append(a, 1), Err(unknown.clone()));
    assert_eq!(cache.fork(a), Err(unknown.clone()));
    assert_eq!(cache.seq_lens(&[b, a]).err(), Some(unknown.clone()));
    assert_eq!(cache.max_pages(&[b, a]), Err(unknown));
    for _ in 1..4 {
        cache.admit().unwrap();
    }
    let full = CacheError::OutOfRequests { max: 4 };
    assert_eq!(cache.admit(), Err(full.clone()));
    assert_eq!(cache.fork(b), Err(full));
}

fn pool(width: usize, tokens_per_row: usize) -> PoolConfig {
    PoolConfig { tokens_per_row, ..PoolConfig::per_token(width) }
}

#[test]
fn wrong_configs_are_refused() {
    let wrong = [
        ("num_pages", CacheConfig { num_pages: 0, ..config() }),
        ("page_size", CacheConfig { page_size: 0, ..config() }),
        ("page_size", CacheConfig { page_size: 3, ..config() }),
        ("pools.width", CacheConfig { pools: vec![PoolConfig::per_token(3), PoolConfig::per_token(0)], ..config() }),
        ("pools.tokens_per_row", CacheConfig { pools: vec![pool(3, 8)], ..config() }),
        ("pools.tokens_per_row", CacheConfig { pools: vec![pool(3, 0)], ..config() }),
        ("format", CacheConfig { pools: vec![fp8_pool(68, 67)], ..config() }),
        ("format", CacheConfig { pools: vec![fp8_pool(66, 64)], ..config() }),
        ("format", CacheConfig { pools: vec![fp8_pool(64, 64)], ..config() }),
        ("format", CacheConfig { pools: vec![index_pool(66)], ..config() }),
        ("format", CacheConfig { pools: vec![index_pool(516)], ..config() }),
        ("max_requests", CacheConfig { max_requests: 0, ..config() }),
        ("max_tokens", CacheConfig { max_tokens: 1 << 31, ..config() }),
        ("num_pages * page_size", CacheConfig { num_pages: 1 << 29, ..config() }),
        ("dtype", CacheConfig { dtype: FloatDType::F64, ..config() }),
    ];
    for (name, config) in wrong {
        let error = PagedCache::new(config, &Device::flex()).err().unwrap();
        assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
    }
}

fn fp8_pool(width: usize, rope: usize) -> PoolConfig {
    PoolConfig { format: RowFormat::Fp8 { rope }, ..PoolConfig::per_token(width) }
}

fn index_pool(width: usize) -> PoolConfig {
    PoolConfig { format: RowFormat::Fp8IndexKeys, ..PoolConfig::per_token(width) }
}

/// The same of index keys, whose scales are behind the rows of a page: 132 bytes a token, of entries for two tokens half of it.
#[test]
fn index_keys_may_be_fp8() {
    let pools = vec![index_pool(128), PoolConfig { tokens_per_row: 2, ..index_pool(128) }];
    let mut cache = PagedCache::new(CacheConfig { pools, ..config() }, &Device::flex()).unwrap();
    assert_eq!(cache.bytes_per_token(), 132 + 66);
    assert_eq!([0, 1].map(|number| cache.pool(number).unwrap().dims()), [[8, PAGE, 128], [8, PAGE / 2, 128]]);
    let parent = cache.admit().unwrap();
    let slots = device_i32(cache.append(parent, 3).unwrap(), [3], &Device::flex());
    let latent = Tensor::<2>::random([3, 128], Distribution::Default, &Device::flex()) * 1000.0;
    let write = |cache| Ok((write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?, ()));
    cache.write_pool(0, write).unwrap();
    let child = cache.fork(parent).unwrap();
    cache.append(child, 1).unwrap();
    let rows = |request| {
        let page = cache.pages(request).unwrap()[0] as usize;
        let rows = cache.pool(0).unwrap().dense().slice([page..page + 1, 0..3, 0..128]);
        rows.into_data().try_into_vec::<f32>().unwrap()
    };
    assert!(rows(parent) == rows(child) && rows(child).iter().any(|&value| value > 900.0));
    assert_ne!(cache.pages(parent).unwrap(), cache.pages(child).unwrap());
}

/// A page is copied with its scales, bytes are those of FlashMLA's rows, and a pool in another format is refused.
#[test]
fn pools_may_be_fp8() {
    let mut cache =
        PagedCache::new(CacheConfig { pools: vec![fp8_pool(576, 64)], ..config() }, &Device::flex()).unwrap();
    assert_eq!((cache.pool(0).unwrap().dims(), cache.bytes_per_token()), ([8, PAGE, 576], 656));
    let parent = cache.admit().unwrap();
    let slots = device_i32(cache.append(parent, 3).unwrap(), [3], &Device::flex());
    let latent = Tensor::<2>::random([3, 576], Distribution::Default, &Device::flex()) * 1000.0;
    let write = |cache| Ok((write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?, ()));
    cache.write_pool(0, write).unwrap();
    let child = cache.fork(parent).unwrap();
    cache.append(child, 1).unwrap();
    let rows = |request| {
        let page = cache.pages(request).unwrap()[0] as usize;
        let rows = cache.pool(0).unwrap().dense().slice([page..page + 1, 0..3, 0..576]);
        rows.into_data().try_into_vec::<f32>().unwrap()
    };
    assert!(rows(parent) == rows(child) && rows(child).iter().any(|&value| value > 900.0));
    assert_ne!(cache.pages(parent).unwrap(), cache.pages(child).unwrap());
    cache.take_pool(0).unwrap();
    let dense = Tensor::<3>::zeros([8, PAGE, 576], &Device::flex());
    let refused = cache.put_pool(0, dense.into()).unwrap_err().to_string();
    assert_eq!(refused, "PagedCache: `pool` is a pool of Dense rows, expected Fp8 { rope: 64 } rows");
}

#[test]
fn pools_may_have_fewer_rows_than_tokens() {
    let pools = vec![pool(5, 2), pool(WIDTH, PAGE)];
    let mut cache = PagedCache::new(CacheConfig { pools, ..config() }, &Device::flex()).unwrap();
    assert_eq!(cache.pool(0).unwrap().dims(), [8, PAGE / 2, 5]);
    assert_eq!(cache.pool(1).unwrap().dims(), [8, 1, WIDTH]);
    // 10 and 3 numbers for 4 tokens.
    assert_eq!(cache.bytes_per_token(), 13);
    let parent = cache.admit().unwrap();
    cache.append(parent, 3).unwrap();
    assert_eq!(cache.bytes_in_use(), 13 * 4);
    let page = cache.pages(parent).unwrap()[0] as usize;
    let pool = cache.take_pool(0).unwrap().dense().slice_fill([page..page + 1, 0..1, 0..5], 7.0);
    cache.put_pool(0, pool.into()).unwrap();
    let child = cache.fork(parent).unwrap();
    cache.append(child, 1).unwrap();
    let copied = cache.pages(child).unwrap()[0] as usize;
    assert_ne!(copied, page);
    let row = cache.pool(0).unwrap().dense().slice([copied..copied + 1, 0..1, 0..5]);
    assert_eq!(row.into_data().try_into_vec::<f32>().unwrap(), [7.0; 5]);
}
