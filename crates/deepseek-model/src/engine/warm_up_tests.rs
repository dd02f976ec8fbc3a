//! After a warm-up no step asks for another kernel, whatever requests come.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::FloatDType;
use mla_ops::{DeviceName, launched_kernels};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cache::CacheSize;
use crate::decode_graph::bucket;
use crate::engine::scheduler::{Job, Plan, Scheduler};

const OPTIONS: EngineOptions = EngineOptions {
    page_size: 64,
    cache_pages: 2048,
    max_batch: 64,
    token_budget: 2048,
    prefix_caching: false,
    deterministic: false,
    graphs: false,
};

#[test]
#[ignore = "a process of its own"]
fn models() {
    let device = DeviceName::Cuda(0).open().expect("a device");
    let models =
        std::env::var("MODELS").unwrap_or("deepseek-v2-lite,deepseek-v3,deepseek-v32,deepseek-v4-flash".into());
    // Nobody waits for the queue.
    mla_ops::compile_ahead(&device, || {
        let steps: usize = std::env::var("STEPS").ok().and_then(|s| s.parse().ok()).unwrap_or(100);
        for name in models.split(',') {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../examples/bench/models/{name}.json"));
            let config = ModelConfig::read_file(&path).expect("a configuration");
            let dtype = FloatDType::BF16;
            let config = config.with_layers(config.layers_of_every_kind(dtype)).expect("layers");
            for graphs in [false, true] {
                let start = std::time::Instant::now();
                let options = EngineOptions { graphs, ..OPTIONS };
                let model = DeepseekModel::without_weights(config.clone(), &device, dtype);
                let model = model.expect("a model");
                let made = start.elapsed();
                let (named, ahead) = launched_kernels(|| {
                    let steps = || Steps { model: &model, options: &options }.all();
                    mla_ops::compile_all_ahead(&device, steps).expect("a GPU")
                });
                named.expect("a pass");
                let asked = start.elapsed();
                let missing = random_steps(&model, &options, &ahead, steps);
                println!(
                    "{name} graphs {graphs}: {} kernels ahead in {:?} (model {made:?}), {} more in {:?}",
                    ahead.len(),
                    asked - made,
                    missing.len(),
                    start.elapsed() - asked
                );
                for (name, step) in missing.values() {
                    println!("    {name}\n        {step}");
                }
            }
        }
        std::process::exit(0);
    });
}

fn random_steps(
    model: &DeepseekModel,
    options: &EngineOptions,
    ahead: &BTreeMap<u128, String>,
    steps: usize,
) -> BTreeMap<u128, (String, String)> {
    let &EngineOptions { page_size, cache_pages, max_batch, token_budget, .. } = options;
    let size = CacheSize {
        num_pages: cache_pages,
        page_size,
        max_requests: max_batch,
        max_tokens: (cache_pages + 1) * page_size,
    };
    let mut scheduler = Scheduler::new(model.new_cache(size).expect("a cache"), false, max_batch, token_budget);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut missing = BTreeMap::new();
    let (mut next, mut rate) = (0, 0.3);
    let mut left: BTreeMap<u64, usize> = BTreeMap::new();
    for step in 0..steps {
        if step % 20 == 0 {
            rate = [0.1, 0.3, 0.9][rng.random_range(0..3)];
        }
        while scheduler.waiting() + scheduler.running() < max_batch && rng.random_bool(rate) {
            let len = 20_000_f64.powf(rng.random_range(0.0..1.0)) as usize;
            scheduler.push(Job::new(next, vec![0; len.max(1)]));
            left.insert(next, rng.random_range(1..40));
            next += 1;
        }
        let plan = scheduler.plan().expect("a plan");
        if plan.chunks.is_empty() {
            continue;
        }
        let (outcome, kernels) = launched_kernels(|| launch(model, options, &plan, &mut scheduler));
        outcome.expect("a step");
        let what = describe(&plan, &scheduler);
        for (hash, name) in kernels {
            if !ahead.contains_key(&hash) {
                missing.entry(hash).or_insert_with(|| (name, what.clone()));
            }
        }
        scheduler.computed(&plan).expect("a cache");
        for &id in &plan.jobs {
            if scheduler.is_complete(id) {
                scheduler.running_job_mut(id).expect("runs").tokens.push(0);
                let left = left.get_mut(&id).expect("known");
                *left -= 1;
                if *left == 0 {
                    scheduler.remove(id).expect("a cache");
                }
            }
        }
    }
    missing
}

fn describe(plan: &Plan, scheduler: &Scheduler) -> String {
    let chunks: Vec<String> = plan
        .chunks
        .iter()
        .map(|chunk| format!("{}/{}", chunk.tokens.len(), scheduler.cache.len(chunk.request).unwrap_or(0)))
        .collect();
    format!("{} chunks: {}", chunks.len(), chunks.join(" "))
}

fn launch(model: &DeepseekModel, options: &EngineOptions, plan: &Plan, scheduler: &mut Scheduler) -> Result<()> {
    let cache = &mut scheduler.cache;
    match model.capture().ok().filter(|_| options.graphs && plan.has_one_token_each()) {
        Some(model) => {
            let requests: Vec<_> = plan.chunks.iter().map(|chunk| chunk.request).collect();
            let (batch, pages) = bucket(requests.len(), cache.pages().max_pages(&requests)?, cache);
            let mut step = model.buffered_step(batch, pages, cache.page_size());
            step.fill(&plan.chunks, cache)?;
            argmax(step.logits(cache)?.narrow(0, 0, requests.len()))?;
        }
        None => {
            let determinism = if options.deterministic { Determinism::BatchInvariant } else { Determinism::Fast };
            argmax(model.next_token_logits(&plan.chunks, cache, determinism)?)?;
        }
    }
    Ok(())
}
