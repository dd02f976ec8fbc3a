use std::path::PathBuf;

use burn::tensor::{FloatDType, s};

use super::*;

/// Windows of 4 and 16 tokens.
fn config() -> DeepseekV4Config {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v4-tiny/config.json");
    DeepseekV4Config::read(&PathBuf::from(path)).unwrap()
}

const SIZE: CacheSize = CacheSize { num_pages: 3, page_size: 16, max_requests: 2, max_tokens: 40 };

fn cache(size: CacheSize) -> Result<V4Cache> {
    V4Cache::new(&config(), size, LoadAs::from(FloatDType::F32), &Device::flex())
}

#[test]
fn requests_share_the_pages_and_give_them_back() {
    let mut cache = cache(SIZE).unwrap();
    let (a, b) = (cache.admit().unwrap(), cache.admit().unwrap());
    assert!(matches!(cache.admit(), Err(CacheError::OutOfRequests { max: 2 })));
    cache.append(a, 17).unwrap();
    cache.append(b, 16).unwrap();
    assert!(matches!(cache.append(b, 1), Err(CacheError::OutOfPages { .. })));
    assert!(matches!(cache.append(a, 24), Err(CacheError::RequestTooLong { tokens: 41, .. })));
    assert_eq!((cache.pages().len(a).unwrap(), cache.pages().len(b).unwrap()), (17, 16));
    cache.free(a).unwrap();
    assert!(matches!(cache.free(a), Err(CacheError::UnknownRequest { .. })));
    cache.append(b, 24).unwrap();
}

#[test]
fn small_pages_grow_to_whole_windows() {
    let mut cache = cache(CacheSize { num_pages: 24, page_size: 1, ..SIZE }).unwrap();
    assert_eq!(cache.entries().config().page_size, 16);
    let (a, b) = (cache.admit().unwrap(), cache.admit().unwrap());
    // As many tokens as there were pages of one.
    cache.append(a, 1).unwrap();
    cache.append(b, 23).unwrap();
}

#[test]
fn tokens_are_computed_in_order_and_none_but_the_last_twice() {
    let mut cache = cache(SIZE).unwrap();
    let request = cache.admit().unwrap();
    cache.append(request, 3).unwrap();
    assert!(cache.begin(request, 2).is_err());
    assert_eq!(cache.begin(request, 3).unwrap().start, 0);
    let message = cache.begin(request, 3).unwrap_err().to_string();
    assert!(message.contains("`chunks`") && message.contains("the 0 tokens"), "{message}");
    cache.append(request, 2).unwrap();
    assert!(cache.fork(request).unwrap_err().to_string().contains("`request`"));
    assert_eq!(cache.begin(request, 2).unwrap().start, 3);
    assert_eq!(cache.begin(request, 1).unwrap().start, 4);
    assert!(cache.begin(request, 2).is_err());
}

#[test]
fn a_fork_has_a_state_of_its_own() {
    let mut cache = cache(SIZE).unwrap();
    let parent = cache.admit().unwrap();
    cache.append(parent, 3).unwrap();
    let row = cache.begin(parent, 3).unwrap().row;
    let fill = |tensor: Tensor<3>, row: usize, value: f32| tensor.slice_fill(s![row..row + 1, .., ..], value);
    for state in [State::Window(1), State::Carried(0)] {
        let tensor = cache.take(state).unwrap();
        cache.put(state, fill(tensor, row, 3.0));
    }
    let child = cache.fork(parent).unwrap();
    cache.append(child, 1).unwrap();
    let place = cache.begin(child, 1).unwrap();
    assert_eq!(place.start, 3);
    assert_ne!(place.row, row);
    for state in [State::Window(1), State::Carried(0)] {
        let tensor = cache.take(state).unwrap();
        let own = |row: usize| tensor.clone().slice(s![row..row + 1, .., ..]).min().into_scalar::<f32>();
        assert_eq!((own(row), own(place.row)), (3.0, 3.0));
        let tensor = fill(tensor, place.row, 4.0);
        assert_eq!(tensor.clone().slice(s![row..row + 1, .., ..]).max().into_scalar::<f32>(), 3.0);
        cache.put(state, tensor);
    }
    // A page each, since the last is not full.
    assert_eq!(cache.entries().pages_in_use(), 2);
}

#[test]
fn sizes_are_checked_by_name() {
    for (size, name) in [
        (CacheSize { page_size: 3, ..SIZE }, "page_size"),
        (CacheSize { num_pages: 0, page_size: 1, ..SIZE }, "num_pages"),
        (CacheSize { max_tokens: usize::MAX, ..SIZE }, "max_tokens"),
    ] {
        let message = cache(size).unwrap_err().to_string();
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
}

#[test]
fn a_token_takes_its_share_of_the_entries() {
    // Two layers with (32 + 32) channels per 4 tokens, two with 32 per 16.
    assert_eq!(cache(SIZE).unwrap().pages().bytes_per_token(), (2 * 64 / 4 + 2 * 32 / 16) * 4);
}
