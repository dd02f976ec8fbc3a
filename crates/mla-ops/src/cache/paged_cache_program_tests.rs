//! Random programs on the paged cache against a model on the host.

use proptest::prelude::*;

use super::tests::{PAGE, assert_holds, cache, write_rows};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    Admit,
    Append(usize, usize),
    Fork(usize),
    Truncate(usize, usize),
    Free(usize),
    Retain(usize, usize),
    Release(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => Just(Step::Admit),
        5 => (0..4usize, 0..9usize).prop_map(|(who, n)| Step::Append(who, n)),
        2 => (0..4usize).prop_map(Step::Fork),
        2 => (0..4usize, 0..9usize).prop_map(|(who, n)| Step::Truncate(who, n)),
        1 => (0..4usize).prop_map(Step::Free),
        2 => (0..4usize, 0..9usize).prop_map(|(who, n)| Step::Retain(who, n)),
        1 => (0..4usize).prop_map(Step::Release),
    ];
    prop::collection::vec(step, 1..40)
}

/// Live requests in the order of their birth, each with the value written for each of its tokens.
#[derive(Default)]
struct Model {
    requests: Vec<(RequestId, Vec<f32>)>,
    /// Pages that are held beside the requests.
    retained: Vec<Vec<u32>>,
    written: f32,
}

impl Model {
    fn run(&mut self, cache: &mut PagedCache, step: &Step) {
        let live = self.requests.len();
        match *step {
            Step::Admit => self.admit(cache),
            Step::Release(which) => {
                if !self.retained.is_empty() {
                    let pages = self.retained.remove(which % self.retained.len());
                    cache.release(&pages).unwrap();
                }
            }
            _ if live == 0 => {}
            Step::Retain(who, n) => {
                let pages = cache.pages(self.requests[who % live].0).unwrap();
                let pages = pages[..pages.len().min(n)].to_vec();
                cache.retain(&pages).unwrap();
                self.retained.push(pages);
            }
            Step::Append(who, n) => self.append(cache, who % live, n),
            Step::Fork(who) => self.fork(cache, who % live),
            Step::Truncate(who, n) => {
                let (request, values) = &mut self.requests[who % live];
                values.truncate(values.len().saturating_sub(n));
                cache.truncate(*request, values.len()).unwrap();
            }
            Step::Free(who) => {
                let (request, _) = self.requests.remove(who % live);
                cache.free(request).unwrap();
                let unknown = CacheError::UnknownRequest { request };
                assert_eq!(cache.free(request), Err(unknown));
            }
        }
    }

    fn admit(&mut self, cache: &mut PagedCache) {
        match cache.admit() {
            Ok(request) => self.requests.push((request, Vec::new())),
            Err(error) => {
                assert_eq!(error, CacheError::OutOfRequests { max: 4 });
                assert_eq!(self.requests.len(), 4);
            }
        }
    }

    fn fork(&mut self, cache: &mut PagedCache, who: usize) {
        let (request, values) = self.requests[who].clone();
        match cache.fork(request) {
            Ok(child) => self.requests.push((child, values)),
            Err(error) => {
                assert_eq!(error, CacheError::OutOfRequests { max: 4 });
                assert_eq!(self.requests.len(), 4);
            }
        }
    }

    fn append(&mut self, cache: &mut PagedCache, who: usize, n: usize) {
        let (request, values) = &mut self.requests[who];
        let (len, free) = (values.len(), cache.free_pages());
        match cache.append(*request, n) {
            Ok(slots) => {
                assert_eq!(slots.len(), n);
                let new: Vec<f32> = (1..=n).map(|i| self.written + i as f32).collect();
                self.written += n as f32;
                write_rows(cache, &slots, &new);
                values.extend(new);
            }
            Err(CacheError::RequestTooLong { tokens, max, .. }) => {
                assert_eq!((tokens, max), (len + n, 18));
                assert!(tokens > max);
            }
            Err(error) => {
                let held = len.div_ceil(PAGE);
                let grow = (len + n).div_ceil(PAGE) - held;
                assert!(grow + 1 > free, "{error} though {free} are free");
            }
        }
    }

    fn check(&self, cache: &mut PagedCache) {
        let mut holders = vec![0; cache.config().num_pages];
        for (request, values) in &self.requests {
            assert_holds(cache, *request, values);
            let pages = cache.pages(*request).unwrap();
            assert_eq!(pages.len(), values.len().div_ceil(PAGE));
            for &page in pages {
                holders[page as usize] += 1;
            }
        }
        let held_by_requests = holders.clone();
        for &page in self.retained.iter().flatten() {
            holders[page as usize] += 1;
        }
        for (page, &count) in holders.iter().enumerate() {
            assert_eq!(cache.allocator.ref_count(page as u32), count);
        }
        let idle = holders.iter().zip(held_by_requests).filter(|&(&all, requests)| all > 0 && requests == 0);
        assert_eq!(cache.idle_pages(), idle.count());
        let used = holders.iter().filter(|&&count| count > 0).count();
        assert_eq!(cache.pages_in_use(), used);
    }
}

proptest! {
    // Every token gets a value of its own, so reading back the right values also shows that no request wrote into a slot of
    // another one.
    #[test]
    fn random_programs_agree_with_the_model(steps in steps()) {
        let (mut cache, mut model) = (cache(), Model::default());
        for step in &steps {
            model.run(&mut cache, step);
            model.check(&mut cache);
        }
        for (request, _) in model.requests {
            cache.free(request).unwrap();
        }
        prop_assert_eq!(cache.idle_pages(), cache.pages_in_use());
        for pages in model.retained {
            cache.release(&pages).unwrap();
        }
        prop_assert_eq!((cache.idle_pages(), cache.pages_in_use()), (0, 0));
    }
}
