//! After a warm-up no step asks for another kernel, whatever requests come. Nothing is launched: a step says which kernels it would
//! launch, by hashes of what their code depends on. So the models have the published sizes, with a layer of each kind.
//!
//! For a simulated GPU that does not compile, in a process of their own: `tools/simulate.sh --models`.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::FloatDType;
use mla_ops::{DeviceName, launched_kernels};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use super::*;
use crate::cache::KvCacheFormat::{self, Auto, Fp8};
use crate::decode_graph::bucket;
use crate::engine::scheduler::{Job, Plan, Scheduler};

const OPTIONS: EngineOptions = EngineOptions {
    page_size: 64,
    cache_pages: 2048,
    max_batch: 64,
    token_budget: 2048,
    mixed_prompt_tokens: 2048,
    prefix_caching: false,
    snapshot_spacing: 1024,
    deterministic: false,
    graphs: false,
};
const STEPS: usize = 100;
/// Tokens of the longest prompt.
const LONGEST: f64 = 20_000.0;
/// New tokens of a request, at most.
const NEW_TOKENS: usize = 40;

#[rstest]
#[case::v2_lite_launched("deepseek-v2-lite", false, Auto)]
#[case::v2_lite_captured("deepseek-v2-lite", true, Auto)]
#[case::v2_lite_fp8_cache("deepseek-v2-lite", true, Fp8)]
#[case::v3_launched("deepseek-v3", false, Auto)]
#[case::v3_captured("deepseek-v3", true, Auto)]
#[case::v32_launched("deepseek-v32", false, Auto)]
#[case::v32_captured("deepseek-v32", true, Auto)]
#[case::v32_fp8_cache("deepseek-v32", true, Fp8)]
#[case::v4_launched("deepseek-v4-flash", false, Auto)]
#[case::v4_fp8_cache("deepseek-v4-flash", true, Fp8)]
#[ignore = "for a simulated GPU that does not compile: tools/simulate.sh --models runs it, in CI a case a day"]
fn warm_up_names_all_kernels(#[case] name: &str, #[case] graphs: bool, #[case] kv_cache: KvCacheFormat) {
    assert_eq!(std::env::var("SIM_CUDA_KERNELS").as_deref(), Ok("empty"), "see tools/simulate.sh --models");
    let device = DeviceName::Cuda(0).open().expect("the simulated GPU");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../examples/bench/models/{name}.json"));
    let config = ModelConfig::read_file(&path).expect("a configuration");
    let load_as = LoadAs { kv_cache, ..LoadAs::from(FloatDType::BF16) };
    let options = EngineOptions { graphs, ..OPTIONS };
    let (outcome, ahead) = launched_kernels(|| compile_all_ahead(&config, &device, load_as, &options));
    outcome.expect("legal options");
    let steps = || {
        let model = without_weights(&config, 1, &device, load_as).expect("a model");
        Requests::new(&model, &options).steps(&ahead)
    };
    let later = mla_ops::compile_ahead(&device, || mla_ops::on_device_thread(&device, steps));
    let later = later.flatten().expect("a GPU");
    let names: Vec<String> =
        later.values().map(|(kernel, step)| format!("{kernel}\n    in a step of {step}")).collect();
    eprintln!("{name}: {} kernels, and {} later", ahead.len(), later.len());
    assert!(later.is_empty(), "{}", names.join("\n"));
}

/// Random requests, and the steps that an engine would take for them.
struct Requests<'a> {
    model: &'a DeepseekModel,
    options: &'a EngineOptions,
    scheduler: Scheduler,
    /// Tokens that each still gets.
    left: BTreeMap<u64, usize>,
    rng: ChaCha8Rng,
}

impl<'a> Requests<'a> {
    fn new(model: &'a DeepseekModel, options: &'a EngineOptions) -> Self {
        let cache = model.new_cache(options.cache_size(model)).expect("a cache");
        let scheduler =
            Scheduler::new(cache, None, options.max_batch, [options.token_budget, options.mixed_prompt_tokens]);
        Self { model, options, scheduler, left: BTreeMap::new(), rng: ChaCha8Rng::seed_from_u64(1) }
    }

    /// Kernels that are launched and were not `ahead`: name, and a step that does.
    fn steps(mut self, ahead: &BTreeMap<u128, String>) -> BTreeMap<u128, (String, String)> {
        let (mut later, mut rate) = (BTreeMap::new(), 0.0);
        for step in 0..STEPS {
            if step % 20 == 0 {
                rate = [0.1, 0.3, 0.9][self.rng.random_range(0..3)];
            }
            self.arrive(rate);
            let plan = self.scheduler.plan().expect("a plan");
            if plan.chunks.is_empty() {
                continue;
            }
            let (outcome, kernels) = launched_kernels(|| self.launch(&plan));
            outcome.expect("a step");
            let words = self.words(&plan);
            for (hash, name) in kernels.into_iter().filter(|(hash, _)| !ahead.contains_key(hash)) {
                later.entry(hash).or_insert_with(|| (name, words.clone()));
            }
            self.go_on(&plan);
        }
        later
    }

    fn arrive(&mut self, rate: f64) {
        let most = self.options.max_batch;
        while self.scheduler.waiting() + self.scheduler.running() < most && self.rng.random_bool(rate) {
            let len = LONGEST.powf(self.rng.random_range(0.0..1.0)) as usize;
            let id = self.left.len() as u64;
            self.scheduler.push(Job::new(id, vec![0; len.max(1)]));
            self.left.insert(id, self.rng.random_range(1..NEW_TOKENS));
        }
    }

    fn launch(&mut self, plan: &Plan) -> Result<()> {
        let (options, cache) = (self.options, &mut self.scheduler.cache);
        let capture = self.model.capture().ok().filter(|_| options.graphs && plan.has_one_token_each());
        let Some(capture) = capture else {
            return choice::warm_up(self.model.next_token_logits(&plan.chunks, cache, Determinism::Fast)?);
        };
        let requests: Vec<_> = plan.chunks.iter().map(|chunk| chunk.request).collect();
        let (batch, pages) = bucket(requests.len(), cache.pages().max_pages(&requests)?, cache);
        let mut step = capture.buffered_step(batch, [pages, cache.page_size()], Determinism::Fast)?;
        step.fill(&plan.chunks, cache)?;
        choice::warm_up(step.logits(cache)?.narrow(0, 0, requests.len()))
    }

    /// Requests whose tokens are computed get one more, or end.
    fn go_on(&mut self, plan: &Plan) {
        self.scheduler.computed(plan).expect("a cache");
        for &id in &plan.jobs {
            if !self.scheduler.is_complete(id) {
                continue;
            }
            let left = self.left.get_mut(&id).expect("a request that arrived");
            *left -= 1;
            if *left == 0 {
                self.scheduler.remove(id).expect("a cache");
            } else if let Some(job) = self.scheduler.running_job_mut(id) {
                job.tokens.push(0);
            }
        }
    }

    /// New tokens and all tokens of each request.
    fn words(&self, plan: &Plan) -> String {
        let len = |chunk: &Chunk| self.scheduler.cache.len(chunk.request).unwrap_or_default();
        let words = plan.chunks.iter().map(|chunk| format!("{} of {}", chunk.tokens.len(), len(chunk)));
        words.collect::<Vec<_>>().join(", ")
    }
}
