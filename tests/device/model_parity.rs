//! The models against what transformers computes: logits, hidden states and greedy tokens of the fixtures.

use std::collections::BTreeMap;
use std::path::PathBuf;

use burn::tensor::{DType, Device, FloatDType};
use burn_mla::model::{CacheSize, DeepseekModel, VerifyOptions, verify};
use burn_mla::ops::cache::RowFormat;
use burn_mla::ops::{Determinism, Path, RaggedAttentionProblem, SparseMlaProblem, explain_path};
use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::devices::{for_each_device, is_blackwell, is_hopper, is_wgpu, skip, supports};

/// A checkpoint folder of this repository.
pub fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Loads a checkpoint folder in f32.
pub fn load(name: &str, device: &Device) -> DeepseekModel {
    DeepseekModel::load(&folder(name), device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads")
}

/// Pages of this size are tested on wgpu too. The whole grid would take several minutes where wgpu is the CPU, and the
/// other sizes run on the other devices.
const WGPU_PAGE_SIZE: usize = 64;

#[rstest]
#[case("tests/fixtures/v3-tiny")]
#[case("tests/fixtures/v2lite-tiny")]
#[case("tests/fixtures/v3-realdims")]
#[case("tests/fixtures/v32-tiny")]
#[case("assets/demo-v3")]
fn model_equals_the_stored_results(#[case] name: &str, #[values(1, 16, 64, 128)] page_size: usize) {
    for_each_device(|device| {
        if is_wgpu(device) && page_size != WGPU_PAGE_SIZE {
            skip(device, format_args!("pages of {page_size}: here those of {WGPU_PAGE_SIZE} run"));
            return;
        }
        let model = load(name, device);
        let rows = verify(&model, &folder(name), &VerifyOptions { page_size, ..Default::default() });
        let rows = rows.expect("the stored results are complete");
        assert!(rows.len() >= 6, "only {} comparisons", rows.len());
        for row in rows {
            assert!(row.passed(), "{name} with pages of {page_size}: {row:?}");
        }
    });
}

/// DeepSeek-V4. A page covers the longest window at least, so that one size serves. Where wgpu is the CPU, prefill in small
/// chunks would take minutes: there it is by 16.
#[rstest]
#[case("tests/fixtures/v4-tiny")]
#[case("tests/fixtures/v4-realdims")]
#[case("assets/demo-v4")]
fn model_v4_equals_the_stored_results(#[case] name: &str) {
    for_each_device(|device| {
        let prefill_chunks = if is_wgpu(device) { vec![16] } else { vec![1, 3, 16, 1000] };
        if is_wgpu(device) {
            skip(device, "prefill in chunks other than 16");
        }
        let chunks = prefill_chunks.len();
        let model = load(name, device);
        let rows = verify(&model, &folder(name), &VerifyOptions { page_size: 64, prefill_chunks });
        let rows = rows.expect("the stored results are complete");
        assert!(rows.len() >= 3 + chunks, "only {} comparisons", rows.len());
        for row in rows {
            assert!(row.passed(), "{name}: {row:?}");
        }
    });
}

/// The checkpoint that transformers writes: names of its modules, and the experts of a layer in one tensor.
#[test]
fn model_v4_loads_under_the_names_of_transformers() {
    let fixture = folder("tests/fixtures/v4-tiny");
    let copy = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json"] {
        std::fs::copy(fixture.join(file), copy.path().join(file)).expect("a copy");
    }
    let published = std::fs::read(fixture.join("model.safetensors")).expect("the weights");
    let published = SafeTensors::deserialize(&published).expect("a safetensors file");
    let names = std::fs::read(fixture.join("hf-names.json")).expect("the names");
    let names: BTreeMap<String, Renamed> = serde_json::from_slice(&names).expect("what `Renamed` says");
    let data: BTreeMap<_, _> = names
        .iter()
        .map(|(name, renamed)| {
            let parts = renamed.from.iter().map(|part| published.tensor(part).expect("a published name"));
            let parts: Vec<_> = parts.collect();
            (name, (parts[0].dtype(), parts.iter().flat_map(|part| part.data().to_vec()).collect::<Vec<u8>>()))
        })
        .collect();
    let views = data.iter().map(|(name, (dtype, data))| {
        (*name, TensorView::new(*dtype, names[*name].shape.clone(), data).expect("as many bytes as the shape says"))
    });
    let file = copy.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).expect("the checkpoint is written");
    let device = Device::flex();
    let model = DeepseekModel::load(copy.path(), &device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads");
    for row in verify(&model, &fixture, &VerifyOptions::default()).expect("the stored results are complete") {
        assert!(row.passed(), "{row:?}");
    }
}

/// A tensor of the file that transformers wrote: its shape, and the published tensors that it is, one after the other.
#[derive(serde::Deserialize)]
struct Renamed {
    shape: Vec<usize>,
    from: Vec<String>,
}

/// The published form of a config describes the same model as the form of transformers 5.
#[rstest]
#[case("tests/fixtures/v3-tiny")]
#[case("tests/fixtures/v2lite-tiny")]
#[case("tests/fixtures/v32-tiny")]
#[case("tests/fixtures/v4-realdims")]
fn model_runs_from_the_published_config(#[case] name: &str) {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder(name)).expect("the fixture") {
        let path = entry.expect("an entry").path();
        if let Some(file) = path.file_name() {
            std::fs::copy(&path, copy.path().join(file)).expect("a copy");
        }
    }
    std::fs::rename(copy.path().join("config.hub.json"), copy.path().join("config.json")).expect("a config");
    let device = Device::flex();
    let model = DeepseekModel::load(copy.path(), &device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads");
    for row in verify(&model, copy.path(), &VerifyOptions::default()).expect("the stored results are complete") {
        assert!(row.passed(), "{name}: {row:?}");
    }
}

/// A comparison that cannot fail proves nothing: another model's results must not pass.
#[rstest]
#[case("v3-tiny", "\"routed_scaling_factor\": 2.5", "\"routed_scaling_factor\": 2.49")]
#[case("v4-tiny", "\"routed_scaling_factor\": 1.5", "\"routed_scaling_factor\": 1.49")]
#[case("v4-tiny", "\"index_topk\": 4", "\"index_topk\": 5")]
#[case("v4-tiny", "\"sliding_window\": 8", "\"sliding_window\": 7")]
#[case("v4-tiny", "\"swiglu_limit\": 2.0", "\"swiglu_limit\": 2.1")]
#[case("v4-tiny", "\"hc_sinkhorn_iters\": 6", "\"hc_sinkhorn_iters\": 5")]
#[case("v4-tiny", "\"attention_factor\": 1.0", "\"attention_factor\": 1.01")]
fn model_parity_sees_a_wrong_model(#[case] name: &str, #[case] from: &str, #[case] to: &str) {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "expected.safetensors", "meta.json"] {
        std::fs::copy(folder("tests/fixtures").join(name).join(file), copy.path().join(file)).expect("a copy");
    }
    let path = copy.path().join("config.json");
    let config = std::fs::read_to_string(&path).expect("a config");
    let changed = config.replace(from, to);
    assert_ne!(config, changed);
    std::fs::write(&path, changed).expect("the config is written");
    let device = Device::flex();
    let model = DeepseekModel::load(copy.path(), &device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads");
    let rows = verify(&model, copy.path(), &VerifyOptions::default()).expect("the stored results are complete");
    assert!(rows.iter().all(|row| !row.passed()), "{rows:?}");
}

/// Of a prompt's logits the last rows may be stored only: those are compared, and there has to be one.
#[rstest]
#[case(5, None, true)]
#[case(5, Some(2), false)]
#[case(0, None, false)]
#[case(1000, None, false)]
fn model_parity_of_the_last_rows(#[case] rows: usize, #[case] altered: Option<usize>, #[case] passes: bool) {
    let (name, copy) = ("tests/fixtures/v3-tiny", tempfile::tempdir().expect("a temporary folder"));
    std::fs::copy(folder(name).join("meta.json"), copy.path().join("meta.json")).expect("a copy");
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("stored results");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let logits = tensors.tensor("logits").expect("logits");
    let row = logits.shape()[1] * size_of::<f32>();
    // More rows than the prompt has tokens: the first ones twice.
    let mut data = [logits.data(), logits.data()].concat().repeat(rows.div_ceil(logits.shape()[0]).max(1));
    data.drain(..data.len() - rows * row);
    if let Some(altered) = altered {
        data[altered * row + 3] ^= 0x01;
    }
    let stored = TensorView::new(Dtype::F32, vec![rows, logits.shape()[1]], &data).expect("as many bytes");
    let all = tensors.iter().map(|(name, view)| (name, if name == "logits" { stored.clone() } else { view }));
    safetensors::serialize_to_file(all, None, &copy.path().join("expected.safetensors")).expect("it is written");
    let device = Device::flex();
    let model =
        DeepseekModel::load(&folder(name), &device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads");
    let options = VerifyOptions { prefill_chunks: vec![16], ..VerifyOptions::default() };
    let rows = verify(&model, copy.path(), &options).expect("the stored results are complete");
    let of_prompt = rows.iter().filter(|row| row.what == "full forward" || row.what == "prefill by 16");
    assert_eq!(of_prompt.clone().count(), 2);
    assert!(of_prompt.clone().all(|row| row.passed() == passes), "{rows:?}");
}

/// In bf16 single logits may be far off, since close choices of experts flip; the bulk may not: within twice of what
/// transformers itself shows in bf16 (median and root mean square of the absolute error, `tests/fixtures/README.md`). The
/// prompt is computed as a whole, and by decode steps from a third of it on.
#[rstest]
#[case("tests/fixtures/v3-tiny", 0.044, 0.171)]
#[case("tests/fixtures/v2lite-tiny", 0.028, 0.058)]
#[case("tests/fixtures/v3-realdims", 0.036, 0.191)]
#[case("tests/fixtures/v32-tiny", 0.090, 0.520)]
#[case("tests/fixtures/v4-tiny", 0.076, 0.312)]
#[case("tests/fixtures/v4-realdims", 0.021, 0.068)]
fn model_in_bf16_is_as_close_as_transformers(
    #[case] name: &str,
    #[case] median: f64,
    #[case] rms: f64,
    #[values(false, true)] decode: bool,
) {
    for_each_device(|device| {
        if !supports(device, DType::BF16) {
            return;
        }
        let model = DeepseekModel::load(&folder(name), device, FloatDType::BF16, &mut |_| {}).expect("it loads");
        let own = [(is_hopper(device), Path::Sm90), (is_blackwell(device), Path::Sm100)];
        if let Some((_, path)) = own.into_iter().find(|(is, _)| *is && name.ends_with("v3-realdims")) {
            assert_eq!(model.attention_path(1, 64).path, path);
        }
        if is_hopper(device) && name.ends_with("v3-realdims") {
            assert_eq!(explain_path(&prompt_attention_of_v3(), device).path, Path::Sm90);
        }
        if let Some((_, path)) = own.into_iter().find(|(is, _)| *is && name.ends_with("v4-realdims")) {
            assert_eq!(explain_path(&sparse_attention_of_v4(), device).path, path);
        }
        let stored = Stored::read(name);
        let prefill = stored.input_ids.len() / if decode { 3 } else { 1 };
        let logits = logits_in_steps(&model, &stored.input_ids, prefill);
        let mut errors: Vec<f64> =
            logits.iter().zip(&stored.logits).map(|(a, e)| (f64::from(*a) - f64::from(*e)).abs()).collect();
        assert_eq!((logits.len(), errors.len()), (stored.logits.len(), stored.logits.len()));
        errors.sort_by(f64::total_cmp);
        let squares: f64 = errors.iter().map(|error| error * error).sum();
        let (own_median, own_rms) = (errors[errors.len() / 2], (squares / errors.len() as f64).sqrt());
        eprintln!("{name} on {device:?}, decode {decode}: median {own_median:.4}, rms {own_rms:.4}");
        assert!(own_median < 2.0 * median && own_rms < 2.0 * rms, "{name}: median {own_median}, rms {own_rms}");
        assert!(own_median > 0.05 * median, "{name} was not computed in bf16: median {own_median}");
    });
}

/// Of a prompt with the heads and widths of `v3-realdims`.
fn prompt_attention_of_v3() -> RaggedAttentionProblem {
    let (heads, kv_heads, key_width, value_width, shared_width) = (2, 2, 192, 128, 64);
    RaggedAttentionProblem { heads, kv_heads, key_width, value_width, shared_width, dtype: DType::BF16 }
}

/// Of a decode step with the heads and widths of `v4-realdims`.
fn sparse_attention_of_v4() -> SparseMlaProblem {
    let (rows, dtype) = (RowFormat::Dense, DType::BF16);
    SparseMlaProblem {
        batch: 1,
        query_len: 1,
        heads: 8,
        key_width: 512,
        value_width: 512,
        dtype,
        rows,
        second_rows: Some(rows),
    }
}

/// Logits of all tokens: the first `prefill` at once, the others one at a time.
pub fn logits_in_steps(model: &DeepseekModel, ids: &[u32], prefill: usize) -> Vec<f32> {
    let size = CacheSize { num_pages: 4, page_size: 64, max_requests: 1, max_tokens: ids.len() };
    let mut cache = model.new_cache(size).expect("a small cache");
    let request = cache.admit().expect("room for a request");
    let (first, rest) = ids.split_at(prefill);
    let mut logits = Vec::new();
    for tokens in std::iter::once(first).chain(rest.chunks(1)) {
        let chunk = cache.append(request, tokens).expect("room for the tokens");
        let step = model.forward(&[chunk], &mut cache, Determinism::Fast, &mut |_, _| {}).expect("a forward pass");
        logits.extend(step.cast(FloatDType::F32).try_into_vec_as::<f32>().expect("reads back"));
    }
    logits
}

/// Prompt and logits of a fixture.
pub struct Stored {
    pub input_ids: Vec<u32>,
    logits: Vec<f32>,
}

impl Stored {
    pub fn read(name: &str) -> Self {
        let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("stored results");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let logits = tensors.tensor("logits").expect("logits");
        Self {
            input_ids: ids(&tensors, "input_ids").expect("a prompt"),
            logits: logits.data().chunks_exact(4).map(|value| f32::from_le_bytes(word(value))).collect(),
        }
    }

    /// All prompts, and the greedy tokens after them.
    pub fn greedy(name: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
        let bytes = std::fs::read(folder(name).join("expected.safetensors")).expect("stored results");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let prefixes = std::iter::once(String::new()).chain((0..).map(|i| format!("ragged.{i}.")));
        let case = |prefix: String| {
            Some((ids(&tensors, &format!("{prefix}input_ids"))?, ids(&tensors, &format!("{prefix}greedy_ids"))?))
        };
        prefixes.map_while(case).collect()
    }
}

fn ids(tensors: &SafeTensors, name: &str) -> Option<Vec<u32>> {
    let ids = tensors.tensor(name).ok()?;
    Some(ids.data().chunks_exact(8).map(|id| u32::from_le_bytes(word(id))).collect())
}

fn word(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}
