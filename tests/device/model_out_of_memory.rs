//! Memory that runs out on a GPU: whatever asks for it gets an error with the numbers, and the device works afterwards. On the
//! simulated GPU, which can leave a program as much as a test wants: for the whole process, so that other tests would fail beside
//! these.

use std::process::Command;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{
    CacheSize, DeepseekModel, Engine, EngineOptions, FinishReason, GenerationOptions, KvCacheFormat, LoadAs,
    ModelError, Tokenizer, generate,
};
use burn_mla::ops::{DeviceMemory, compile_ahead, device_memory};

use crate::devices::{for_each_device, is_simulated, skip};
use crate::model_engine::{drain, greedy};
use crate::model_parity::{Stored, folder, load};
use crate::weights_in_parts;

const V3: &str = "tests/fixtures/v3-tiny";
const V4: &str = "tests/fixtures/v4-tiny";
const V32: &str = "tests/fixtures/v32-tiny";
const DEMO: &str = "assets/demo-v3";

/// The device has as little memory as [`leave`] says, for as long as this lives.
struct Short;

/// Leaves so many bytes.
fn leave(bytes: u64) -> Short {
    // SAFETY: the simulated driver is loaded, and this is what it exports.
    unsafe {
        let driver = libloading::Library::new("libcuda.so").expect("the driver that is in use");
        let leave: libloading::Symbol<unsafe extern "C" fn(u64) -> u32> =
            driver.get(b"simCudaLeave").expect("a driver that runs out of memory");
        leave(bytes);
    }
    Short
}

impl Drop for Short {
    fn drop(&mut self) {
        std::mem::forget(leave(u64::MAX));
    }
}

fn on_the_simulated_gpu(test: impl Fn(&Device)) {
    for_each_device(|device| match is_simulated(device) {
        true => test(device),
        false => skip(device, "memory runs out on the simulated GPU only"),
    });
}

/// Whether an error is that of memory that ran out, for this; what was asked, and what was there.
fn lacked(error: &ModelError, wanted: &str) -> (u128, u64) {
    eprintln!("{error}");
    match error {
        &ModelError::OutOfMemory { what, needed_bytes, free_bytes, .. } if what == wanted => (needed_bytes, free_bytes),
        other => panic!("expected no room for {wanted}, not: {other}"),
    }
}

fn memory(device: &Device) -> DeviceMemory {
    device_memory(device).expect("CUDA says how much there is")
}

/// What the driver has free, and what the pools of the program hold without use.
#[test]
fn model_out_of_memory_is_known_before() {
    on_the_simulated_gpu(|device| {
        let all = memory(device);
        assert_eq!(all.total, 16 << 30);
        assert!(all.free <= all.total && all.free > 15 << 30, "{all:?}");
        assert_eq!(compile_ahead(device, || device_memory(device)), Some(None), "nothing is taken then");
        let model = load(DEMO, device);
        device.sync().expect("no error");
        let loaded = memory(device);
        let taken = all.free - loaded.free;
        assert!(taken > 1 << 20, "the weights are there: {taken}");
        drop(model);
        device.sync().expect("no error");
        assert!(memory(device).free >= loaded.free + taken / 2, "what nobody uses is free: {:?}", memory(device));
    });
}

#[test]
fn model_out_of_memory_for_weights() {
    on_the_simulated_gpu(|device| {
        // Known before anything is loaded.
        let short = leave(1 << 20);
        let from = folder(DEMO);
        let mut steps = 0;
        let error = DeepseekModel::load(&from, device, FloatDType::F32, &mut |_| steps += 1).expect_err("too many");
        let (needed, free) = lacked(&error, "weights");
        assert!(needed > u128::from(free) && steps == 0, "{needed} {free} {steps}");
        drop(short);
        // Somebody else takes it meanwhile.
        let mut short = None;
        let error = DeepseekModel::load(&from, device, FloatDType::F32, &mut |_| {
            short.get_or_insert_with(|| leave(0));
        })
        .expect_err("too many");
        let (needed, _) = lacked(&error, "weights");
        assert!(needed > 0);
        drop(short);
        load(DEMO, device);
    });
}

/// Parts that are written into what there is no memory for leave the error as it is.
#[test]
fn model_out_of_memory_for_weights_in_parts() {
    on_the_simulated_gpu(|device| {
        let (_dir, checkpoint, _) = weights_in_parts::checkpoint();
        let short = leave(0);
        let error = weights_in_parts::load(&checkpoint, device, FloatDType::BF16).expect_err("too many");
        let (needed, _) = lacked(&error, "weights");
        assert!(needed >= 17_000_000, "{needed}: the whole, not a part");
        drop(short);
        weights_in_parts::load(&checkpoint, device, FloatDType::BF16).expect("there is memory again");
    });
}

#[test]
fn model_out_of_memory_for_a_cache() {
    on_the_simulated_gpu(|device| {
        for name in [V3, V4] {
            let (model, tokenizer) = (load(name, device), Tokenizer::load(&folder(name)).expect("it loads"));
            let short = leave(1 << 20);
            let options = EngineOptions { cache_pages: 1 << 14, ..Default::default() };
            let error = Engine::new(&model, &tokenizer, options).expect_err("too many pages");
            let (needed, free) = lacked(&error, "a KV cache");
            assert!(needed > u128::from(free), "{name}: {needed} {free}");
            drop(short);
            // So little is not asked for before: the first pool is missing.
            device.memory_cleanup();
            let short = leave(0);
            let options = EngineOptions { cache_pages: 3, page_size: 32, max_batch: 2, ..Default::default() };
            let error = Engine::new(&model, &tokenizer, options).expect_err("no memory");
            lacked(&error, "a KV cache");
            drop(short);
            Engine::new(&model, &tokenizer, options).expect("room for a cache");
        }
    });
}

/// What is left to a step is enough for the largest one, with a cache as large as the default.
#[test]
fn model_out_of_memory_is_not_what_the_default_is_for() {
    let tokenizer = Tokenizer::load(&folder(V3)).expect("the tokenizer loads");
    on_the_simulated_gpu(|device| {
        let model = load(V3, device);
        device.memory_cleanup();
        let options = EngineOptions { max_batch: 4, token_budget: 64, ..Default::default() };
        let all = options.fit_cache(&model).expect("room").cache_pages;
        assert_eq!(all, 4 * model.max_positions() / options.page_size, "all that can be used");
        let reserve = options.reserved_bytes(&model);
        let short = leave(u64::try_from(reserve).expect("megabytes") + (4 << 20));
        let free = u128::from(memory(device).free);
        let fitted = options.fit_cache(&model).expect("room for some");
        let page = 4 * 80 * 4 * options.page_size as u128;
        let room = (free - reserve) / 10 * 9;
        assert_eq!(fitted.cache_pages as u128, room / page, "{free} {reserve}");
        let mut engine = Engine::new(&model, &tokenizer, fitted).expect("room for the cache");
        let prompt = (0..fitted.token_budget as u32).map(|token| 3 + token % 500).collect();
        let mut stream = engine.submit(greedy(prompt, 3)).expect("a sound request");
        while engine.step().expect("room for the step") {}
        assert_eq!(drain(&mut stream, &mut String::new()).expect("an end").token_ids.len(), 3);
        drop((engine, short));
        device.memory_cleanup();
        let _short = leave(1 << 20);
        let error = options.fit_cache(&model).expect_err("no room");
        let (needed, free) = lacked(&error, "a page of the KV cache beside a step");
        assert!(needed > reserve && needed > u128::from(free), "{needed} {free}");
    });
}

/// Beside a cache in FP8 there is room for a layer's index keys in the dtype of the model.
#[test]
fn model_out_of_memory_is_not_what_index_keys_in_fp8_are_for() {
    on_the_simulated_gpu(|device| {
        let load_as = LoadAs { kv_cache: KvCacheFormat::Fp8, ..LoadAs::from(FloatDType::F32) };
        let model = DeepseekModel::load(&folder(V32), device, load_as, &mut |_| {}).expect("it loads");
        device.memory_cleanup();
        let options = EngineOptions { max_batch: 64, token_budget: 64, ..Default::default() };
        let all = options.fit_cache(&model).expect("room").cache_pages;
        let reserve = options.reserved_bytes(&model);
        let bytes = |num_pages| {
            let page_size = options.page_size;
            let size = CacheSize { num_pages, page_size, max_requests: 64, max_tokens: model.max_positions() };
            let cache = model.config().cache_bytes(size, load_as).expect("a sound size");
            (cache, model.config().index_scratch_bytes(size, load_as).expect("a sound size"))
        };
        let (cache, scratch) = bytes(all);
        let _short = leave(u64::try_from(reserve + (cache + scratch) / 2).expect("megabytes"));
        let room = (u128::from(memory(device).free) - reserve) / 10 * 9;
        let fitted = options.fit_cache(&model).expect("room for some").cache_pages;
        let ((cache, scratch), (more, more_scratch)) = (bytes(fitted), bytes(fitted + 1));
        assert!(cache + scratch <= room && more + more_scratch > room, "{fitted} of {all}: {cache} {scratch} {room}");
        assert!(more < room, "without the index keys there would be more");
    });
}

/// Requests that do not fit all at once take turns; one that does not fit alone is refused, with what would have to be free.
#[test]
fn model_out_of_memory_is_not_what_requests_together_are_for() {
    let tokenizer = Tokenizer::load(&folder(V3)).expect("the tokenizer loads");
    on_the_simulated_gpu(|device| {
        let model = load(V3, device);
        let requests: Vec<_> = (0..3).map(|first| greedy((3 + first..43 + first).collect(), 3)).collect();
        let options = GenerationOptions { page_size: 16, graphs: false, ..GenerationOptions::on(device) };
        let run = || generate(&model, &tokenizer, &requests, &options, &mut |_, _| {});
        let (all, stats) = run().expect("room for all");
        assert_eq!(stats.pages, 3 * 3);
        let step = EngineOptions { page_size: 16, max_batch: 3, token_budget: 3 * 42, ..Default::default() };
        let (reserve, page) = (step.reserved_bytes(&model), 4 * 80 * 4 * 16);
        let room = |pages: u128| u64::try_from(reserve + page * pages * 10 / 9 + 10).expect("megabytes");
        device.memory_cleanup();
        // What the pools hold is free, too.
        let short = leave(0);
        let idle = memory(device).free;
        drop(short);
        let short = leave(room(4) - idle);
        let (some, stats) = run().expect("room for one after the other");
        assert_eq!(stats.pages, 4);
        for (some, all) in some.iter().zip(&all) {
            assert_eq!((&some.token_ids, &some.finish), (&all.token_ids, &FinishReason::MaxNewTokens));
        }
        drop(short);
        device.memory_cleanup();
        let _short = leave(room(2) - idle);
        let (needed, free) = lacked(&run().expect_err("no room"), "the KV cache of the longest request beside a step");
        assert!(needed > u128::from(free) && needed <= u128::from(room(3)), "{needed} {free}");
    });
}

/// A prompt whose activations have no room, and then a decode step, launched or captured.
#[test]
fn model_out_of_memory_in_a_step() {
    let (prompt, ids) = Stored::greedy(V3).swap_remove(0);
    let tokenizer = Tokenizer::load(&folder(V3)).expect("the tokenizer loads");
    on_the_simulated_gpu(|device| {
        let model = load(V3, device);
        for (steps_before, graphs) in [(0, false), (1, false), (1, true)] {
            let options = EngineOptions { page_size: 16, cache_pages: 64, max_batch: 2, graphs, ..Default::default() };
            let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
            let mut stream = engine.submit(greedy(prompt.clone(), 4)).expect("a sound request");
            for _ in 0..steps_before {
                engine.step().expect("room for a step");
            }
            device.memory_cleanup();
            let short = leave(0);
            let error = engine.step().expect_err("no memory");
            let (needed, _) = lacked(&error, "a buffer of a step");
            assert!(needed > 0);
            let again = engine.step().expect_err("it has failed");
            assert!(matches!(again, ModelError::EngineFailed { .. }), "{again}");
            drop(short);
            assert!(engine.cancel(stream.id()).expect("a sound cache"));
            drain(&mut stream, &mut String::new()).expect("an end");
        }
        let options = EngineOptions { page_size: 16, cache_pages: 64, max_batch: 2, ..Default::default() };
        let mut engine = Engine::new(&model, &tokenizer, options).expect("a small cache");
        let mut stream = engine.submit(greedy(prompt.clone(), 4)).expect("a sound request");
        while engine.step().expect("the device works") {}
        let completion = drain(&mut stream, &mut String::new()).expect("an end");
        assert_eq!(completion.token_ids, ids[..4]);
    });
}

/// Others have all of the memory, so that CUDA makes no context. In a process of its own: a device is opened once.
#[test]
fn model_out_of_memory_for_a_context() {
    on_the_simulated_gpu(|_| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "model_out_of_memory::on_a_full_gpu", "--ignored", "--nocapture"]);
        let output = command.env("SIM_CUDA_FULL", "1").output().expect("this program runs once more");
        let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
        assert!(!errors.contains("panicked"), "{errors}");
    });
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "a process of its own: see model_out_of_memory_for_a_context"]
fn on_a_full_gpu() {
    use burn_mla::model::{ModelConfig, Parallel, compile_ahead, compile_all_ahead};
    use burn_mla::ops::{DeviceName, MlaError};

    let refused = |error: ModelError| {
        let ModelError::Ops(MlaError::UnsupportedDevice { op: "open", device, reason }) = &error else {
            panic!("expected a device that does not open, not: {error}");
        };
        assert_eq!(device, "cuda:0");
        assert!(reason.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    };
    refused(DeviceName::Cuda(0).open().expect_err("no context").into());
    assert_eq!(DeviceName::Cuda(0).memory(), None);
    // Not opened by its name.
    let device = Device::cuda(0);
    refused(DeepseekModel::load(&folder(V3), &device, FloatDType::F32, &mut |_| {}).expect_err("no context"));
    let config = ModelConfig::read(&folder(V3)).expect("a configuration");
    let random = DeepseekModel::random(config.clone(), 1, &device, FloatDType::F32, &mut |_| {});
    refused(random.expect_err("no context"));
    let options = EngineOptions::default();
    refused(compile_ahead(&config, &device, FloatDType::F32, &options, &[8]).expect_err("no context"));
    refused(compile_all_ahead(&config, &device, FloatDType::F32, &options).expect_err("no context"));
    refused(Parallel::group(&[device.clone(), Device::flex()]).expect_err("no context"));
}
