//! Requests that go on from snapshots of others, and forks of such ones, have the logits of requests that compute everything.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Tensor};
use mla_ops::Determinism;
use mla_ops::cache::RequestId;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cache::{Snapshot, Snapshots};
use crate::{CacheSize, DeepseekModel, ModelCache};

/// Tokens of a page: those of the longest compressed window.
const PAGE: usize = 16;
const LEN: usize = 90;
const SIZE: CacheSize = CacheSize { num_pages: 48, page_size: PAGE, max_requests: 4, max_tokens: LEN };
/// Slots for snapshots.
const SLOTS: usize = 3;

fn model() -> DeepseekModel {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v4-tiny");
    DeepseekModel::load(Path::new(dir), &Device::flex(), FloatDType::F32, &mut |_| {}).expect("the fixture")
}

/// Two texts with a common beginning, of which the length is no multiple of anything.
fn texts() -> [Vec<u32>; 2] {
    let token =
        |text: usize, position: usize| ((position * 37 + if position < 53 { 0 } else { text * 11 }) % 500 + 3) as u32;
    [0, 1].map(|text| (0..LEN).map(|position| token(text, position)).collect())
}

fn bits(logits: Tensor<2>) -> Vec<u32> {
    logits.try_into_vec_as::<f32>().expect("logits").into_iter().map(f32::to_bits).collect()
}

/// A request, its text, and how many tokens of that are computed.
#[derive(Debug, Clone, Copy)]
struct Live {
    request: RequestId,
    text: usize,
    done: usize,
}

#[derive(Debug, Clone)]
enum Action {
    /// A new request for a text: from the longest snapshot that it can go on from, if that is wished.
    Begin(usize, bool),
    /// So many tokens of a request, with a snapshot at the ends of pages among them, and where they end with a page.
    Compute(usize, usize),
    Fork(usize),
    End(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let tokens = prop_oneof![2 => Just(1usize), 2 => 2..14usize, 3 => Just(usize::MAX)];
    let action = prop_oneof![
        3 => (0..2usize, prop::bool::weighted(0.8)).prop_map(|(text, resume)| Action::Begin(text, resume)),
        8 => (0..4usize, tokens).prop_map(|(which, tokens)| Action::Compute(which, tokens)),
        1 => (0..4usize).prop_map(Action::Fork),
        2 => (0..4usize).prop_map(Action::End),
    ];
    prop::collection::vec(action, 1..40)
}

/// A cache, what lives in it, and snapshots with their pages: those of the tokens before them.
struct World<'a> {
    model: &'a DeepseekModel,
    texts: [Vec<u32>; 2],
    /// Of all tokens, by text.
    logits: &'a [Vec<Vec<u32>>; 2],
    cache: ModelCache,
    live: Vec<Live>,
    kept: Vec<(Snapshot, usize, Vec<u32>)>,
    resumed: usize,
    marked: usize,
}

impl World<'_> {
    fn act(&mut self, action: &Action) {
        match *action {
            Action::Begin(text, resume) if self.live.len() < SIZE.max_requests => self.begin(text, resume),
            Action::Compute(which, tokens) if which < self.live.len() => self.compute(which, tokens),
            Action::Fork(which) if which < self.live.len() && self.live.len() < SIZE.max_requests => {
                let parent = self.live[which];
                self.live.push(Live { request: self.cache.fork(parent.request).expect("room"), ..parent });
            }
            Action::End(which) if which < self.live.len() => {
                self.cache.free(self.live.swap_remove(which).request).expect("it lives");
            }
            _ => {}
        }
    }

    fn begin(&mut self, text: usize, resume: bool) {
        let tokens = &self.texts[text];
        let fits =
            |(_, of, pages): &&(Snapshot, usize, Vec<u32>)| tokens.starts_with(&self.texts[*of][..pages.len() * PAGE]);
        let best = self.kept.iter().filter(fits).max_by_key(|(.., pages)| pages.len()).filter(|_| resume);
        let (snapshot, pages) = best.map_or((None, vec![]), |(snapshot, _, pages)| (Some(*snapshot), pages.clone()));
        self.resumed += usize::from(snapshot.is_some());
        let request = self.cache.admit_with(&pages, snapshot).expect("room");
        self.live.push(Live { request, text, done: pages.len() * PAGE });
    }

    fn compute(&mut self, which: usize, tokens: usize) {
        let Live { request, text, done } = self.live[which];
        let end = done.saturating_add(tokens).min(LEN);
        if end == done {
            return;
        }
        let ends_of_pages = (done + 1..=end).filter(|len| len % PAGE == 0);
        let marks: Vec<usize> = ends_of_pages.filter(|&len| len == end || self.mark(request, len)).collect();
        let chunk = self.cache.append(request, &self.texts[text][done..end]).expect("room");
        let logits = self.model.next_token_logits(&[chunk], &mut self.cache, Determinism::BatchInvariant);
        assert_eq!(bits(logits.expect("a step")), self.logits[text][end - 1], "text {text}, token {}", end - 1);
        self.live[which].done = end;
        for len in marks {
            self.keep(request, text, len);
        }
        // What is marked beyond the end of a pass, or not kept, takes no slot for ever.
        self.snapshots().unmark(request);
    }

    fn mark(&mut self, request: RequestId, len: usize) -> bool {
        self.make_room();
        let marked = self.snapshots().mark(request, len).expect("it lives");
        self.marked += usize::from(marked);
        marked
    }

    /// The state behind so many tokens, in a slot that was marked, or in another one.
    fn keep(&mut self, request: RequestId, text: usize, len: usize) {
        let mut snapshot = self.snapshots().keep(request, len).expect("it lives");
        if snapshot.is_none() {
            self.make_room();
            snapshot = self.snapshots().keep(request, len).expect("it lives");
        }
        let pages = self.cache.pages().pages(request).expect("it lives")[..len / PAGE].to_vec();
        self.cache.pages_mut().retain(&pages).expect("they are held");
        self.kept.push((snapshot.expect("a slot is free"), text, pages));
    }

    /// Where there is none, the first snapshot makes room.
    fn make_room(&mut self) {
        if !self.snapshots().has_room() && !self.kept.is_empty() {
            let (snapshot, _, pages) = self.kept.remove(0);
            self.snapshots().discard(snapshot);
            self.cache.pages_mut().release(&pages).expect("they are held");
        }
    }

    fn snapshots(&mut self) -> &mut dyn Snapshots {
        self.cache.snapshots().expect("a state")
    }
}

#[test]
fn random_programs_have_the_bits_of_whole_requests() {
    let (model, texts) = (model(), texts());
    let logits = texts.clone().map(|text| {
        let mut cache = model.new_cache(SIZE).expect("a small cache");
        let request = cache.admit().expect("room");
        let chunk = cache.append(request, &text).expect("room");
        let all = model.forward(&[chunk], &mut cache, Determinism::BatchInvariant, &mut |_, _| {});
        bits(all.expect("a step")).chunks(model.vocab_size()).map(<[u32]>::to_vec).collect::<Vec<_>>()
    });
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let (resumed, marked) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let outcome = runner.run(&actions(), |actions| {
        let mut cache = model.new_cache(SIZE).expect("a small cache");
        cache.snapshots().expect("a state").reserve(SLOTS).expect("a little memory");
        let (live, kept) = Default::default();
        let mut world =
            World { model: &model, texts: texts.clone(), logits: &logits, cache, live, kept, resumed: 0, marked: 0 };
        actions.iter().for_each(|action| world.act(action));
        resumed.set(resumed.get() + world.resumed);
        marked.set(marked.get() + world.marked);
        let World { mut cache, live, kept, .. } = world;
        live.iter().for_each(|live| cache.free(live.request).expect("it lives"));
        for (snapshot, _, pages) in kept {
            cache.snapshots().expect("a state").discard(snapshot);
            cache.pages_mut().release(&pages).expect("they are held");
        }
        prop_assert_eq!((cache.free_pages(), cache.bytes_in_use()), (SIZE.num_pages, 0));
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(resumed.get() > 10, "only {} requests went on from a snapshot", resumed.get());
    assert!(marked.get() > 10, "only {} snapshots were written on the way", marked.get());
}

/// Snapshots are counted in the cache's bytes, and refused where they do not fit the pages or the request.
#[test]
fn snapshots_are_checked_and_counted() {
    let model = model();
    let mut cache = model.new_cache(SIZE).expect("a small cache");
    let request = cache.admit().expect("room");
    let chunk = cache.append(request, &[5; 2 * PAGE]).expect("room");
    let keep = |cache: &mut ModelCache| cache.snapshots().expect("a state").keep(request, 2 * PAGE);
    assert_eq!(keep(&mut cache).expect("no slots, no error"), None);
    cache.snapshots().expect("a state").reserve(1).expect("a little memory");
    assert!(keep(&mut cache).unwrap_err().to_string().contains("not computed"));
    model.next_token_logits(&[chunk], &mut cache, Determinism::Fast).expect("a step");
    let before = cache.bytes_in_use();
    let snapshot = keep(&mut cache).expect("computed").expect("a slot");
    let state = model.config().layers(FloatDType::F32).iter().map(|layer| layer.bytes_per_request).sum::<usize>();
    assert_eq!(cache.bytes_in_use(), before + state);
    let pages = cache.pages().pages(request).expect("it lives").to_vec();
    for (pages, snapshot, needle) in [
        (&pages[..1], Some(snapshot), "the state after 32 tokens"),
        (&pages[..], None, "one of the state after"),
        (&pages[..], Some(Snapshot(7)), "one that is kept"),
    ] {
        let error = cache.admit_with(pages, snapshot).expect_err("a wrong snapshot").to_string();
        assert!(error.contains("`snapshot`") && error.contains(needle), "{error}");
    }
    let other = cache.admit_with(&pages, Some(snapshot)).expect("it fits");
    assert_eq!(cache.len(other), Ok(2 * PAGE));
    cache.snapshots().expect("a state").discard(snapshot);
    assert_eq!(cache.bytes_in_use(), before + state);
    cache.free(other).expect("it lives");
    assert_eq!(cache.bytes_in_use(), before);
    assert!(cache.admit_with(&pages, Some(snapshot)).is_err());
}
