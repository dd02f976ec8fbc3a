//! What a decode step asks of the driver: nothing comes back to the host but the logits. Counted by the simulated driver, for
//! the whole process: tests beside this one would be counted, too.

use crate::devices::{for_each_device, is_simulated, skip};
use crate::model_parity::load;
use burn::tensor::Device;
use burn_mla::model::{CacheSize, Chunk, DeepseekModel, ModelCache};
use burn_mla::ops::Determinism;

const SIZE: CacheSize = CacheSize { num_pages: 8, page_size: 64, max_requests: 2, max_tokens: 64 };

/// Calls of the driver since the program began.
#[derive(Debug, Clone, Copy)]
struct Calls {
    launches: u64,
    /// Copies to the host.
    read_backs: u64,
}

impl Calls {
    fn so_far() -> Self {
        let mut counts = [0u64; 2];
        // SAFETY: the simulated driver is loaded, and this is what it exports: two numbers, written once.
        unsafe {
            let driver = libloading::Library::new("libcuda.so").expect("the driver that is in use");
            let count: libloading::Symbol<unsafe extern "C" fn(*mut u64)> =
                driver.get(b"simCudaCounts").expect("a driver that counts");
            count(counts.as_mut_ptr());
        }
        Self { launches: counts[0], read_backs: counts[1] }
    }

    fn since(self, before: Self) -> Self {
        Self { launches: self.launches - before.launches, read_backs: self.read_backs - before.read_backs }
    }
}

fn logits(model: &DeepseekModel, chunks: &[Chunk], cache: &mut ModelCache) -> Vec<f32> {
    let logits = model.next_token_logits(chunks, cache, Determinism::Fast).expect("the step is computed");
    logits.try_into_vec_as().expect("it reads back")
}

#[test]
fn model_step_reads_back_its_logits_alone() {
    for_each_device(|device| {
        if !is_simulated(device) {
            skip(device, "calls are counted on the simulated GPU only");
            return;
        }
        for name in ["v2lite-tiny", "v3-tiny", "v32-tiny", "v4-tiny"] {
            let calls = calls_of_a_step(&format!("tests/fixtures/{name}"), device);
            eprintln!("{name}: {calls:?}");
            assert_eq!(calls.read_backs, 1, "{name}: {calls:?}");
            assert!(calls.launches > 10, "{name}: {calls:?}");
        }
    });
}

/// The calls of a decode step, from its token to its logits on the host.
fn calls_of_a_step(name: &str, device: &Device) -> Calls {
    let model = load(name, device);
    let mut cache = model.new_cache(SIZE).expect("a cache");
    let request = cache.admit().expect("room for a request");
    let prompt: Vec<u32> = (3..24).collect();
    // The second step has no kernels to compile, and nothing to try out.
    for tokens in [prompt.as_slice(), &[5]] {
        let chunk = cache.append(request, tokens).expect("room for the tokens");
        logits(&model, &[chunk], &mut cache);
    }
    let chunk = cache.append(request, &[7]).expect("room for the token");
    device.sync().expect("the device has no error");
    let before = Calls::so_far();
    logits(&model, &[chunk], &mut cache);
    Calls::so_far().since(before)
}
