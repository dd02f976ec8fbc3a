//! Random traffic on the demo models in deterministic mode: arrivals, cancellations, readers that go away, more tokens than
//! pages. Every completion is the one of its solo run, and no page is lost, nor a row of a state. On a GPU its steps are
//! captured and replayed, those of the solo runs are launched.
//!
//! `cargo test --test device -- --ignored --nocapture model_engine_soak` runs 2,000 requests on each model and each device
//! and reports; `SOAK_REQUESTS=10000` before it runs that many.

use std::collections::HashMap;
use std::time::Instant;

use burn::tensor::Device;
use burn_mla::model::{
    Completion, Engine, EngineOptions, FinishReason, GenerationRequest, RequestStream, SamplingParams,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, is_cuda, is_slow, skip};
use crate::model_engine::{Loaded, V3, V4, drain, is_captured};
use crate::model_parity::Stored;

/// Tokens of prompts, and tokens to generate: so few different ones that a solo run serves several requests.
const LENGTHS: [usize; 10] = [1, 2, 7, 8, 9, 16, 17, 25, 31, 40];
const NEW: [usize; 5] = [1, 2, 5, 11, 24];

const OPTIONS: EngineOptions = EngineOptions {
    page_size: 8,
    cache_pages: 64,
    max_batch: 8,
    token_budget: 24,
    mixed_prompt_tokens: 16,
    prefix_caching: true,
    snapshot_spacing: 1024,
    deterministic: true,
    graphs: false,
};

/// DeepSeek-V4 has larger pages: with whole entries of every layer. Snapshots are few, so that they make room for one another.
const OPTIONS_V4: EngineOptions = EngineOptions { page_size: 16, cache_pages: 32, snapshot_spacing: 32, ..OPTIONS };

#[rstest]
#[case(V3, OPTIONS, 12)]
#[case(V4, OPTIONS_V4, 8)]
fn model_engine_stands_random_traffic(#[case] name: &str, #[case] options: EngineOptions, #[case] cache_pages: usize) {
    on_devices(name, EngineOptions { cache_pages, ..options }, &options, 60, 3);
}

#[rstest]
#[case(V3, OPTIONS, 24)]
#[case(V4, OPTIONS_V4, 14)]
#[ignore = "5 minutes on two cores, 10 for V4; the 60 requests above run always"]
fn model_engine_soak(#[case] name: &str, #[case] options: EngineOptions, #[case] cache_pages: usize) {
    let requests = match std::env::var("SOAK_REQUESTS") {
        Ok(text) => text.parse().expect("SOAK_REQUESTS: a number of requests"),
        Err(_) => 2000,
    };
    on_devices(name, EngineOptions { cache_pages, ..options }, &options, requests, 1);
}

/// With so few pages that requests lose theirs; `solo` are the options for one request.
fn on_devices(name: &str, options: EngineOptions, solo: &EngineOptions, requests: usize, seed: u64) {
    for_each_device(|device| {
        if is_slow(device) {
            return skip(device, "thousands of steps");
        }
        Soak::run(device, name, EngineOptions { graphs: is_cuda(device), ..options }, solo, requests, seed);
    });
}

struct Soak<'a> {
    engine: Engine<'a>,
    rng: ChaCha8Rng,
    texts: Vec<Vec<u32>>,
    live: Vec<Live>,
    ended: Vec<(GenerationRequest, Completion)>,
    dropped: usize,
}

struct Live {
    request: GenerationRequest,
    stream: RequestStream,
    text: String,
}

impl Soak<'_> {
    fn run(device: &Device, name: &str, options: EngineOptions, solo: &EngineOptions, requests: usize, seed: u64) {
        let start = Instant::now();
        let loaded = Loaded::on(device, name);
        let texts = Stored::greedy(name).into_iter().map(|(prompt, ids)| [prompt, ids].concat());
        let texts: Vec<Vec<u32>> = texts.collect();
        let mut soak = Soak {
            engine: loaded.engine(options),
            rng: ChaCha8Rng::seed_from_u64(seed),
            texts,
            live: Vec::new(),
            ended: Vec::new(),
            dropped: 0,
        };
        let (mut submitted, mut most_waiting) = (0, 0);
        while submitted < requests || soak.engine.requests() > 0 {
            // Now and then a burst.
            let arrivals = if soak.rng.random_bool(0.02) { 20 } else { usize::from(soak.rng.random_bool(0.35)) };
            for _ in 0..arrivals.min(requests - submitted) {
                soak.submit(submitted);
                submitted += 1;
            }
            soak.disturb();
            soak.engine.step().expect("a step");
            most_waiting = most_waiting.max(soak.engine.waiting());
            soak.collect();
        }
        soak.collect();
        assert_eq!(soak.live.len(), 0, "requests without an end");
        assert_eq!(soak.ended.len() + soak.dropped, requests);
        let stats = soak.engine.stats();
        soak.engine.reset_prefix_cache().expect("pages are given back");
        let after = soak.engine.stats();
        let leaked = after.pages_in_use + after.pages_idle + after.snapshots;
        // The bytes are those of states, too.
        assert_eq!((leaked, after.cache_bytes), (0, 0), "pages, snapshots or rows of states are lost");
        let reasons = compare_with_solo_runs(&loaded, &soak.ended, solo, options.cache_pages * options.page_size);
        eprintln!(
            "{name}: {requests} requests in {:.0} s: {reasons:?}, {} dropped; {} steps, {} replayed, {most_waiting} waiting at most, {} preemptions, \
             {} tokens computed again, {:.0} % of {} looked up tokens found in shared pages, {} snapshots in the end, {leaked} pages \
             and snapshots lost; every completion equals its solo run",
            start.elapsed().as_secs_f64(),
            soak.dropped,
            stats.steps,
            stats.graph_steps,
            stats.preemptions,
            stats.recomputed_tokens,
            100.0 * stats.prefix_hit_rate(),
            stats.prefix_queries,
            stats.snapshots,
        );
        assert!(stats.preemptions > 0 && stats.prefix_hits > 0 && most_waiting > 3, "too little traffic: {stats:?}");
        assert_eq!(stats.graph_steps > 0, options.graphs && is_captured(&stats), "{stats:?}");
        for reason in ["max_new_tokens", "stop_string", "cancelled", "out_of_cache"] {
            assert!(reasons.contains_key(reason), "no request ended by {reason}");
        }
    }

    fn submit(&mut self, number: usize) {
        let rng = &mut self.rng;
        let text = &self.texts[rng.random_range(0..self.texts.len())];
        // Around the ends of pages, so that many begin alike; one in twenty is more than the cache holds.
        let too_long = number % 20 == 7;
        let (prompt, new) = match too_long {
            true => (40, 400),
            false => (LENGTHS[rng.random_range(0..LENGTHS.len())], NEW[rng.random_range(0..NEW.len())]),
        };
        let prompt = text[..prompt.min(text.len())].to_vec();
        let sampling = match rng.random_bool(0.5) {
            // So hot that hardly any text ends before its pages do.
            _ if too_long => {
                SamplingParams { temperature: 5.0, seed: rng.random_range(0..3), ..SamplingParams::greedy() }
            }
            true => SamplingParams::greedy(),
            false => SamplingParams {
                temperature: 0.9,
                top_p: 0.95,
                seed: rng.random_range(0..3),
                ..SamplingParams::greedy()
            },
        };
        let stop = if rng.random_bool(0.4) && !too_long { vec![" the".into(), "ing".into()] } else { Vec::new() };
        let request = GenerationRequest { prompt, sampling, max_new_tokens: new, stop };
        let stream = self.engine.submit(request.clone()).expect("a sound request");
        self.live.push(Live { request, stream, text: String::new() });
    }

    /// Somebody cancels, somebody goes away.
    fn disturb(&mut self) {
        if !self.live.is_empty() && self.rng.random_bool(0.04) {
            let which = self.rng.random_range(0..self.live.len());
            self.engine.cancel(self.live[which].stream.id()).expect("the cache is sound");
        }
        if !self.live.is_empty() && self.rng.random_bool(0.01) {
            let which = self.rng.random_range(0..self.live.len());
            self.live.swap_remove(which);
            self.dropped += 1;
        }
    }

    fn collect(&mut self) {
        self.live.retain_mut(|live| match drain(&mut live.stream, &mut live.text) {
            None => true,
            Some(completion) => {
                self.ended.push((live.request.clone(), completion));
                false
            }
        });
    }
}

/// Every completion against that of the same request on an engine of its own; the reasons of their ends, counted. Only
/// requests for more than `capacity` tokens may end for want of pages.
fn compare_with_solo_runs(
    loaded: &Loaded,
    ended: &[(GenerationRequest, Completion)],
    options: &EngineOptions,
    capacity: usize,
) -> HashMap<&'static str, usize> {
    let mut solo = HashMap::<String, Completion>::new();
    let mut reasons = HashMap::new();
    for (request, completion) in ended {
        let alone = solo.entry(format!("{request:?}")).or_insert_with(|| {
            let mut engine = loaded.engine(EngineOptions { token_budget: 512, ..*options });
            let mut stream = engine.submit(request.clone()).expect("a sound request");
            while engine.step().expect("a step") {}
            drain(&mut stream, &mut String::new()).expect("an end")
        });
        *reasons.entry(completion.finish.name()).or_default() += 1;
        match completion.finish {
            FinishReason::Cancelled | FinishReason::OutOfCache(_) => {
                let len = completion.token_ids.len();
                assert_eq!(completion.token_ids, alone.token_ids[..len], "{request:?}");
            }
            _ => assert_eq!(completion, alone, "{request:?}"),
        }
        let fits = request.prompt.len() + request.max_new_tokens <= capacity;
        assert!(!fits || !matches!(completion.finish, FinishReason::OutOfCache(_)), "{completion:?} of {request:?}");
    }
    reasons
}
