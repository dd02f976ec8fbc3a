//! What a caller gets wrong about the cache is an error: sizes, ids of other caches, pages that others hold.

use burn::tensor::{Device, FloatDType, Tensor};
use rstest::rstest;

use super::*;
use crate::batch::index_tensor;
use crate::{Accumulator, MlaError, WriteLatentArgs, write_latent};

fn config() -> CacheConfig {
    CacheConfig {
        pools: vec![PoolConfig::per_token(3)],
        num_pages: 8,
        page_size: 4,
        max_requests: 4,
        max_tokens: 18,
        dtype: FloatDType::F32,
    }
}

fn cache() -> PagedCache {
    PagedCache::new(config(), &Device::flex()).unwrap()
}

/// The error is about memory or a number, and names the argument.
#[track_caller]
fn assert_too_large<T>(result: Result<T, MlaError>, argument: &str) {
    match result.err().expect("larger than any memory") {
        MlaError::DeviceLimit { argument: named, .. } | MlaError::Value { argument: named, .. } => {
            assert_eq!(named, argument);
        }
        other => panic!("{other}"),
    }
}

/// 2^60 bytes fit into a usize and into no memory.
#[rstest]
#[case::overflow([usize::MAX, 2, 2])]
#[case::overflow_of_bytes([1 << 62, 1, 1])]
#[case::no_memory([1 << 20, 1 << 20, 1 << 18])]
#[case::overflow_of_strides([0, usize::MAX, 2])]
fn tensors_larger_than_memory_are_refused(#[case] shape: [usize; 3]) {
    let device = Device::flex();
    assert_too_large(new_pool(shape, FloatDType::F32, &device), "shape");
    let [tokens, heads, width] = shape;
    assert_too_large(Accumulator::empty(tokens, heads, width, &device), "[tokens, heads, value_width]");
}

#[test]
fn accumulators_without_channels_have_sizes_too() {
    let device = Device::flex();
    assert_too_large(Accumulator::empty(usize::MAX, usize::MAX, 0, &device), "[tokens, heads, value_width]");
    assert_too_large(Accumulator::empty(1 << 30, 1 << 30, 0, &device), "[tokens, heads]");
    let empty = Accumulator::empty(0, 2, 3, &device).unwrap();
    assert_eq!((empty.out.dims(), empty.lse.dims()), ([0, 2, 3], [0, 2]));
}

#[test]
fn pools_have_a_dtype_of_the_operations() {
    let device = Device::flex();
    let wrong = new_pool([1, 1, 1], FloatDType::F64, &device);
    assert!(matches!(wrong, Err(MlaError::DType { argument: "dtype", .. })));
    for empty in [[0, 4, 2], [3, 0, 2], [3, 4, 0]] {
        assert_eq!(new_pool(empty, FloatDType::F32, &device).unwrap().dims(), empty);
    }
}

#[rstest]
#[case::rows(u32::MAX, 1, "max_requests")]
#[case::entries(1, usize::MAX, "max_tokens")]
#[case::product(i32::MAX as u32, i32::MAX as usize, "max_requests * max_tokens")]
fn maps_larger_than_memory_are_refused(#[case] requests: u32, #[case] tokens: usize, #[case] argument: &str) {
    assert_too_large(RequestToToken::new(requests, tokens, &Device::flex()), argument);
}

#[test]
fn maps_of_nothing_have_no_rows_to_take() {
    let mut map = RequestToToken::new(0, 4, &Device::flex()).unwrap();
    assert_eq!(map.take_row(), Err(CacheError::OutOfRequests { max: 0 }));
    let mut map = RequestToToken::new(2, 0, &Device::flex()).unwrap();
    assert_eq!(map.take_row(), Ok(0));
    assert!(map.write(0, 0, &[1]).is_err());
}

#[test]
fn caches_larger_than_memory_are_refused() {
    let most = i32::MAX as usize;
    let wide = |pools: usize| CacheConfig {
        pools: vec![PoolConfig::per_token(most); pools],
        num_pages: 1 << 30,
        page_size: 1,
        ..config()
    };
    let small =
        |width| CacheConfig { pools: vec![PoolConfig::per_token(width); 1 << 16], num_pages: 1 << 18, ..config() };
    let map = CacheConfig { max_requests: most, max_tokens: most, ..config() };
    // Each of the last pools would fit into some memory, all together into none.
    for (argument, config) in
        [("pools", wide(1)), ("pools", wide(40)), ("pools", small(1 << 10)), ("max_requests * max_tokens", map)]
    {
        let error = PagedCache::new(config, &Device::flex()).expect_err("larger than any memory");
        let CacheError::Mla(error) = error else { panic!("{error}") };
        assert_too_large(Err::<(), _>(error), argument);
    }
}

/// Prefixes of requests are read by tables of their first pages, where that is what is asked for.
#[test]
fn page_tables_have_all_pages_or_the_first_ones() {
    let mut cache = cache();
    let (fresh, request) = (cache.admit().unwrap(), cache.admit().unwrap());
    cache.append(request, 9).unwrap();
    let table = cache.page_table_of_first(&[request], 2).unwrap();
    assert_eq!(table.into_data().try_into_vec::<i32>().unwrap(), [0, 1]);
    let refused = cache.page_table(&[fresh, request], 2).expect_err("a table without the last page");
    let expected = "PagedCache: `max_pages` is 2, expected at least 3, the most that a request has";
    assert_eq!(refused.to_string(), expected);
    assert_eq!(cache.page_table(&[fresh, request], 3).unwrap().dims(), [2, 3]);
}

/// `?` in functions of `CacheError`, outside of `write_pool`.
#[test]
fn refused_writes_are_errors_of_the_cache() {
    let write = || {
        let cache = Pool::from(new_pool([1, 2, 3], FloatDType::F32, &Device::flex())?);
        let (slots, latent) = (index_tensor(vec![0], &Device::flex()), Tensor::ones([2, 3], &Device::flex()));
        Ok::<_, CacheError>(write_latent(WriteLatentArgs { cache, slots, latent, rope: None })?)
    };
    assert!(matches!(write(), Err(CacheError::Mla(MlaError::Shape { .. }))));
}

#[test]
fn caches_without_pools_count_pages() {
    let mut cache = PagedCache::new(CacheConfig { pools: vec![], ..config() }, &Device::flex()).unwrap();
    let request = cache.admit().unwrap();
    cache.append(request, 6).unwrap();
    let fork = cache.fork(request).unwrap();
    cache.append(fork, 1).unwrap();
    assert_eq!((cache.pages_in_use(), cache.bytes_in_use()), (3, 0));
}

/// Of fresh requests, and of none, with any width.
#[test]
fn page_tables_of_nothing() {
    let mut cache = cache();
    let fresh = cache.admit().unwrap();
    for (requests, max_pages) in [(vec![], 0), (vec![], 3), (vec![fresh], 0), (vec![fresh, fresh], 0)] {
        let table = cache.page_table(&requests, max_pages).unwrap();
        assert_eq!(table.dims(), [requests.len(), max_pages]);
    }
    let table = cache.page_table(&[fresh], 2).unwrap();
    assert_eq!(table.into_data().try_into_vec::<i32>().unwrap(), [-1, -1]);
}

#[rstest]
fn boundless_page_tables_are_refused(#[values(usize::MAX, 1 << 60, 1 << 31)] max_pages: usize) {
    let mut cache = cache();
    let request = cache.admit().unwrap();
    for requests in [vec![], vec![request], vec![request; 3]] {
        let table = cache.page_table(&requests, max_pages);
        assert!(matches!(table, Err(CacheError::Mla(MlaError::Value { argument: "max_pages", .. }))));
    }
}

/// Two caches give different ids, so that one's request is unknown to the other.
#[test]
fn ids_of_another_cache_are_refused() {
    let (mut cache, mut other) = (cache(), cache());
    let (own, foreign) = (cache.admit().unwrap(), other.admit().unwrap());
    cache.append(own, 5).unwrap();
    assert_ne!(own, foreign);
    let unknown = CacheError::UnknownRequest { request: foreign };
    assert_eq!(cache.append(foreign, 1), Err(unknown.clone()));
    assert_eq!(cache.truncate(foreign, 0), Err(unknown.clone()));
    assert_eq!(cache.fork(foreign), Err(unknown.clone()));
    assert_eq!(cache.free(foreign), Err(unknown.clone()));
    assert_eq!(cache.len(foreign), Err(unknown.clone()));
    assert_eq!(cache.page_table(&[own, foreign], 2).err(), Some(unknown));
    assert_eq!((cache.len(own), other.len(foreign)), (Ok(5), Ok(0)));
}

/// What a request holds is not the caller's to release.
#[test]
fn pages_of_live_requests_are_not_released() {
    let mut cache = cache();
    let request = cache.admit().unwrap();
    cache.append(request, 10).unwrap();
    let pages = cache.pages(request).unwrap().to_vec();
    let page = pages[1];
    assert_eq!(cache.release(&[page]), Err(CacheError::NotRetained { page, times: 1, retained: 0 }));
    cache.retain(&[page, page]).unwrap();
    assert_eq!(cache.release(&[page; 3]), Err(CacheError::NotRetained { page, times: 3, retained: 2 }));
    assert!(cache.release(&pages).is_err(), "two of three were not retained");
    assert_eq!(cache.holders(page), 3);
    cache.release(&[page]).unwrap();
    cache.release(&[page]).unwrap();
    assert_eq!(cache.release(&[page]), Err(CacheError::NotRetained { page, times: 1, retained: 0 }));
    assert_eq!(cache.holders(page), 1);
    cache.free(request).unwrap();
    assert_eq!(cache.pages_in_use(), 0);
    assert_eq!(cache.release(&[page]), Err(CacheError::NotAllocated { page }));
}

#[test]
fn truncated_requests_give_their_pages_back() {
    let mut cache = cache();
    let request = cache.admit().unwrap();
    let slots = cache.append(request, 10).unwrap();
    let too_long = cache.truncate(request, 11);
    assert!(matches!(too_long, Err(CacheError::Mla(MlaError::Value { argument: "len", .. }))), "{too_long:?}");
    cache.truncate(request, 10).unwrap();
    assert_eq!((cache.len(request), cache.pages_in_use()), (Ok(10), 3));
    cache.truncate(request, 8).unwrap();
    assert_eq!((cache.len(request), cache.pages_in_use()), (Ok(8), 2));
    cache.truncate(request, 5).unwrap();
    assert_eq!((cache.len(request), cache.pages_in_use()), (Ok(5), 2));
    // The tokens that were taken back are appended again, where they were.
    assert_eq!(cache.append(request, 3).unwrap(), slots[5..8]);
    cache.truncate(request, 0).unwrap();
    assert_eq!((cache.len(request), cache.pages_in_use()), (Ok(0), 0));
    assert_eq!(cache.append(request, 1).unwrap().len(), 1);
}

/// The map on the device follows, whether or not it was read before the truncation.
#[rstest]
fn the_map_follows_truncations(#[values(false, true)] read_before: bool) {
    let mut cache = cache();
    let request = cache.admit().unwrap();
    cache.append(request, 10).unwrap();
    if read_before {
        cache.req_to_token().unwrap();
    }
    cache.truncate(request, 6).unwrap();
    if read_before {
        cache.req_to_token().unwrap();
    }
    let mut slots = vec![0, 1, 2, 3, 4, 5];
    slots.extend(cache.append(request, 5).unwrap());
    let map: Tensor<2, burn::tensor::Int> = cache.req_to_token().unwrap();
    assert_eq!(map.slice([0..1, 0..11]).into_data().try_into_vec::<i32>().unwrap(), slots);
}

/// Copy-on-write: what a fork, or a holder of pages, still reads is copied before it is written again.
#[test]
fn truncated_requests_write_no_shared_page() {
    let mut cache = cache();
    let parent = cache.admit().unwrap();
    cache.append(parent, 8).unwrap();
    let child = cache.fork(parent).unwrap();
    cache.truncate(child, 6).unwrap();
    assert_eq!((cache.pages(child).unwrap(), cache.len(parent)), (&[0, 1][..], Ok(8)));
    assert_eq!(cache.append(child, 1).unwrap(), [2 * 4 + 2], "a copy of page 1");
    assert_eq!((cache.pages(parent).unwrap(), cache.pages(child).unwrap()), (&[0, 1][..], &[0, 2][..]));
    // A page that the caller holds stays allocated.
    cache.retain(&[1]).unwrap();
    cache.truncate(parent, 2).unwrap();
    assert_eq!(cache.holders(1), 1);
    cache.free(parent).unwrap();
    cache.free(child).unwrap();
    cache.release(&[1]).unwrap();
    assert_eq!(cache.pages_in_use(), 0);
}

/// Two requests have computed the same tokens: one goes on with the pages of the other, and the map on the device follows.
#[test]
fn first_pages_are_replaced() {
    let mut cache = cache();
    let [first, second] = [(); 2].map(|()| cache.admit().unwrap());
    cache.append(first, 8).unwrap();
    cache.append(second, 9).unwrap();
    cache.req_to_token().unwrap();
    assert_eq!(cache.pages(second).unwrap(), [2, 3, 4]);
    cache.replace_first_pages(second, &[0, 1]).unwrap();
    assert_eq!((cache.pages(second).unwrap(), cache.holders(1), cache.pages_in_use()), (&[0, 1, 4][..], 2, 3));
    let map: Tensor<2, burn::tensor::Int> = cache.req_to_token().unwrap();
    let slots = [0, 1, 2, 3, 4, 5, 6, 7, 16];
    assert_eq!(map.slice([1..2, 0..9]).into_data().try_into_vec::<i32>().unwrap(), slots);
    cache.replace_first_pages(second, &[0, 1]).unwrap();
    // The third page is not full, and page 7 nobody has.
    assert!(matches!(cache.replace_first_pages(second, &[0, 1, 4]), Err(CacheError::Mla(MlaError::Value { .. }))));
    assert_eq!(cache.replace_first_pages(second, &[7]), Err(CacheError::NotAllocated { page: 7 }));
    assert_eq!((cache.pages(second).unwrap(), cache.holders(0)), (&[0, 1, 4][..], 2));
    cache.free(first).unwrap();
    cache.free(second).unwrap();
    assert_eq!(cache.pages_in_use(), 0);
}

/// The list of free pages takes no memory before it is used, however many there are.
#[test]
fn allocators_of_any_size() {
    let mut allocator = PageAllocator::new(u32::MAX);
    assert_eq!(allocator.allocate(2), Ok(vec![0, 1]));
    allocator.release(&[0]).unwrap();
    assert_eq!(allocator.allocate(2), Ok(vec![0, 2]));
    assert_eq!(allocator.free_pages(), u32::MAX as usize - 3);
    assert!(allocator.allocate(usize::MAX).is_err());
}
