//! Checkpoints in FP8 blocks, and in FP4: they compute what their numbers do when these are dequantised beforehand.

use std::path::Path;

use burn::tensor::{DType, Device, FloatDType};
use burn_mla::model::{
    DeepseekModel, Inspection, LoadAs, ModelError, WeightForm, WeightStorage, WeightsFrom, WriteSummary, weight_specs,
    write_checkpoint,
};
use rstest::rstest;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::devices::{for_each_device, is_wgpu, supports};
use crate::model_parity::{Stored, folder, load, logits_in_steps};

/// A copy of a folder of this repository in another form, in files of at most `shard_bytes`.
fn written(name: &str, form: WeightForm, shard_bytes: u64) -> (TempDir, WriteSummary) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let from = folder(name);
    let summary = write_checkpoint(WeightsFrom::Folder(&from), dir.path(), form, shard_bytes, &mut |_| {});
    (dir, summary.expect("the folder is written"))
}

/// With weights that are dequantised when they are loaded.
fn logits(dir: &Path, name: &str, device: &Device, dtype: FloatDType) -> Vec<f32> {
    logits_as(LoadAs { storage: WeightStorage::Dense, ..LoadAs::from(dtype) }, dir, name, device)
}

fn logits_as(load_as: LoadAs, dir: &Path, name: &str, device: &Device) -> Vec<f32> {
    let model = DeepseekModel::load(dir, device, load_as, &mut |_| {}).expect("the checkpoint loads");
    let mut ids = Stored::read(name).input_ids;
    ids.truncate(24);
    logits_in_steps(&model, &ids, 16)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[rstest]
fn model_in_fp8_computes_what_its_numbers_do(
    #[values("v3-tiny", "v32-tiny", "v3-realdims", "v2lite-tiny", "v4-tiny", "v4-realdims")] fixture: &str,
) {
    let name = format!("tests/fixtures/{fixture}");
    let (quantized, in_fp8) = written(&name, WeightForm::Quantized, 300_000);
    let (plain, in_f32) = written(&name, WeightForm::Dequantized(FloatDType::F32), u64::MAX);
    assert!(in_fp8.shards > 2 && in_f32.shards == 1, "{in_fp8:?} {in_f32:?}");
    assert!(in_fp8.bytes < in_f32.bytes && in_fp8.tensors > in_f32.tensors, "{in_fp8:?} {in_f32:?}");
    for_each_device(|device| {
        let expected = logits(plain.path(), &name, device, FloatDType::F32);
        let actual = logits(quantized.path(), &name, device, FloatDType::F32);
        assert!(expected.iter().all(|logit| logit.is_finite()));
        assert_eq!(bits(&actual), bits(&expected), "{name} on {device:?}");
        // The weights have been rounded, or this would prove nothing.
        let unrounded = load(&name, device);
        let ids = &Stored::read(&name).input_ids[..24];
        assert_ne!(bits(&logits_in_steps(&unrounded, ids, 16)), bits(&expected));
    });
}

/// Weights that stay in blocks: the bits of the same model dequantised where the kernels are the portable ones, and as close as
/// another order of sums is elsewhere.
#[rstest]
fn model_in_blocks_computes_what_its_numbers_do(
    #[values("v3-tiny", "v32-tiny", "v3-realdims", "v2lite-tiny", "v4-tiny", "v4-realdims")] fixture: &str,
) {
    let name = format!("tests/fixtures/{fixture}");
    let (quantized, _) = written(&name, WeightForm::Quantized, 300_000);
    for_each_device(|device| {
        let expected = logits(quantized.path(), &name, device, FloatDType::F32);
        let actual = logits_as(FloatDType::F32.into(), quantized.path(), &name, device);
        if is_wgpu(device) {
            assert_eq!(bits(&actual), bits(&expected), "{name} on {device:?}");
        }
        let off = actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off <= 2e-4, "{name} on {device:?}: off by {off}");
    });
}

/// Projections and experts take as much memory as in the files, and the rest is what it is without blocks.
#[rstest]
fn model_in_blocks_takes_the_memory_of_the_files(#[values("v3-realdims", "v4-realdims")] fixture: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let (quantized, _) = written(&name, WeightForm::Quantized, u64::MAX);
    let groups = |storage| {
        let load_as = LoadAs { storage, ..LoadAs::from(FloatDType::BF16) };
        Inspection::of(quantized.path(), load_as).expect("it is read").groups
    };
    for (group, dense) in groups(WeightStorage::Stored).into_iter().zip(groups(WeightStorage::Dense)) {
        let in_blocks = group.stored_as.iter().all(|stored| stored.contains(" x "));
        assert!(group.device_bytes <= dense.device_bytes, "{group:?}");
        if in_blocks {
            assert!(group.device_bytes as f64 <= 1.03 * group.file_bytes as f64, "{group:?}");
        }
    }
}

/// The product is rounded to f32, then to bf16, in either case.
#[rstest]
fn model_in_fp8_computes_in_bf16(#[values("v3-tiny", "v4-tiny")] fixture: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let (quantized, _) = written(&name, WeightForm::Quantized, u64::MAX);
    let (plain, _) = written(&name, WeightForm::Dequantized(FloatDType::BF16), u64::MAX);
    for_each_device(|device| {
        if supports(device, DType::BF16) {
            let expected = logits(plain.path(), &name, device, FloatDType::BF16);
            assert_eq!(bits(&logits(quantized.path(), &name, device, FloatDType::BF16)), bits(&expected));
        }
    });
}

/// A folder in FP8 is copied as it is, and dequantised.
#[rstest]
fn model_in_fp8_is_converted_again(#[values("v3-tiny", "v4-tiny")] fixture: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let (quantized, once) = written(&name, WeightForm::Quantized, u64::MAX);
    let (copy, plain) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let again = |to: &TempDir, form| {
        let from = WeightsFrom::Folder(quantized.path());
        write_checkpoint(from, to.path(), form, u64::MAX, &mut |_| {}).expect("the folder is written")
    };
    assert_eq!(again(&copy, WeightForm::Quantized), once);
    again(&plain, WeightForm::Dequantized(FloatDType::F32));
    let device = Device::flex();
    let expected = bits(&logits(quantized.path(), &name, &device, FloatDType::F32));
    for dir in [copy, plain] {
        assert_eq!(bits(&logits(dir.path(), &name, &device, FloatDType::F32)), expected);
    }
}

/// Routed experts with the same numbers in NVFP4, as they are and dequantised.
#[test]
fn model_in_nvfp4_computes_what_its_numbers_do() {
    let name = "tests/fixtures/v4-tiny";
    let (dir, _) = written(name, WeightForm::Quantized, u64::MAX);
    let device = Device::flex();
    let expected = bits(&logits(dir.path(), name, &device, FloatDType::F32));
    to_nvfp4(&dir.path().join("model.safetensors"));
    let plain = tempfile::tempdir().expect("a folder");
    let form = WeightForm::Dequantized(FloatDType::F32);
    write_checkpoint(WeightsFrom::Folder(dir.path()), plain.path(), form, u64::MAX, &mut |_| {})
        .expect("it is written");
    for dir in [dir, plain] {
        assert!(bits(&logits(dir.path(), name, &device, FloatDType::F32)) == expected, "{dir:?}");
    }
}

/// Experts in FP4 become NVFP4: the codes stay, and a power of two for 32 numbers becomes E4M3 for 16, times one of the tensor.
fn to_nvfp4(file: &Path) {
    let bytes = std::fs::read(file).expect("one file");
    let stored = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut tensors = Vec::new();
    for (name, view) in stored.tensors() {
        let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
        let expert = name.contains(".experts.").then(|| name.strip_suffix(".scale")).flatten();
        let Some(module) = expert else {
            let dtype = if view.dtype() == Dtype::I8 { Dtype::U8 } else { view.dtype() };
            tensors.push((name, dtype, shape, data));
            continue;
        };
        let across = stored.tensor(&format!("{module}.weight")).expect("its codes").shape()[1].div_ceil(8);
        let top = *data.iter().max().expect("scales");
        // 2^8, the largest power of two of E4M3, stands for the largest scale.
        let code = |scale: u8| (15 - (top - scale)) << 3;
        let codes = data.chunks(shape[1]).flat_map(|row| (0..across).map(|block| code(row[block / 2])));
        tensors.push((format!("{module}.weight_scale"), Dtype::F8_E4M3, vec![shape[0], across], codes.collect()));
        let of_tensor = f32::from_bits(u32::from(top - 8) << 23).to_le_bytes().to_vec();
        tensors.push((format!("{module}.weight_scale_2"), Dtype::F32, Vec::new(), of_tensor));
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    let written = safetensors::serialize(views, None).expect("they are written");
    std::fs::write(file, written).expect("the file is written");
}

/// As in the published files: what is FP8, what is FP4, what stays, and the names, dtypes and shapes of the scales.
#[test]
fn model_files_have_the_published_layout() {
    let layout = |name: &str| {
        let (dir, _) = written(name, WeightForm::Quantized, u64::MAX);
        let bytes = std::fs::read(dir.path().join("model.safetensors")).expect("one file");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        move |tensor: &str| {
            let info = metadata.info(tensor).unwrap_or_else(|| panic!("no tensor {tensor}"));
            (info.dtype, info.shape.clone())
        }
    };
    let v3 = layout("tests/fixtures/v32-tiny");
    let layer = |part: &str| v3(&format!("model.layers.1.{part}"));
    assert_eq!(layer("self_attn.kv_b_proj.weight").0, Dtype::F8_E4M3);
    assert_eq!(layer("self_attn.kv_b_proj.weight_scale_inv").0, Dtype::F32);
    let scale = layer("self_attn.indexer.wq_b.weight_scale_inv");
    assert_eq!(
        (layer("self_attn.indexer.wq_b.weight"), scale),
        ((Dtype::F8_E4M3, vec![512, 64]), (Dtype::F32, vec![4, 1]))
    );
    for plain in ["self_attn.indexer.weights_proj.weight", "mlp.gate.weight", "input_layernorm.weight"] {
        assert_eq!(layer(plain).0, Dtype::BF16, "{plain}");
    }
    assert_eq!((v3("model.embed_tokens.weight").0, v3("lm_head.weight").0), (Dtype::BF16, Dtype::BF16));

    let v4 = layout("tests/fixtures/v4-tiny");
    let layer = |part: &str| v4(&format!("layers.2.{part}"));
    assert_eq!(
        (layer("attn.wq_b.weight"), layer("attn.wq_b.scale")),
        ((Dtype::F8_E4M3, vec![256, 64]), (Dtype::F8_E8M0, vec![2, 1]))
    );
    assert_eq!(layer("ffn.experts.3.w1.weight"), (Dtype::I8, vec![16, 64]));
    assert_eq!(layer("ffn.experts.3.w1.scale"), (Dtype::F8_E8M0, vec![16, 4]));
    assert_eq!(layer("ffn.shared_experts.w2.weight").0, Dtype::F8_E4M3);
    assert_eq!(layer("attn.compressor.wkv.weight").0, Dtype::BF16);
}

fn refusal(dir: &Path) -> ModelError {
    let model = DeepseekModel::load(dir, &Device::flex(), FloatDType::F32, &mut |_| {});
    model.expect_err("the folder is damaged")
}

#[test]
fn model_refuses_a_missing_and_a_truncated_shard_by_name() {
    let (dir, summary) = written("tests/fixtures/v3-tiny", WeightForm::Quantized, 200_000);
    let shards = summary.shards;
    let shard = dir.path().join(format!("model-00003-of-{shards:05}.safetensors"));
    let bytes = std::fs::read(&shard).expect("a shard in the middle");
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).expect("it is shortened");
    match refusal(dir.path()) {
        ModelError::Safetensors { path, .. } => assert_eq!(path, shard),
        other => panic!("{other}"),
    }
    std::fs::remove_file(&shard).expect("it is removed");
    match refusal(dir.path()) {
        ModelError::MissingFile { path, hint } => {
            assert_eq!(path, shard);
            assert!(hint.contains("model.safetensors.index.json"), "{hint}");
        }
        other => panic!("{other}"),
    }
}

/// A scale that has become NaN is found by name, whichever expert it belongs to.
#[test]
fn model_refuses_corrupt_scales_by_name() {
    let (dir, _) = written("tests/fixtures/v3-tiny", WeightForm::Quantized, u64::MAX);
    let file = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("one file");
    let damaged =
        ["model.layers.2.mlp.experts.7.up_proj.weight_scale_inv", "model.layers.0.self_attn.o_proj.weight_scale_inv"];
    for name in damaged {
        let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let start = 8 + header + metadata.info(name).expect("the scales").data_offsets.0;
        bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(&file, bytes).expect("it is damaged");
    match refusal(dir.path()) {
        ModelError::Weights(report) => {
            let names: Vec<_> = report.wrong_quantization.iter().map(|wrong| wrong.name.as_str()).collect();
            assert_eq!(names, [damaged[1], damaged[0]]);
        }
        other => panic!("{other}"),
    }
}

/// Random weights from a configuration alone, on disk.
#[rstest]
fn model_loads_from_random_files(#[values("v32-tiny", "v4-tiny")] fixture: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let config = folder(&name).join("config.json");
    let write = |seed, form| {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let from = WeightsFrom::Random { config: &config, seed };
        let summary = write_checkpoint(from, dir.path(), form, 500_000, &mut |_| {}).expect("the folder is written");
        assert!(summary.shards > 1);
        dir
    };
    let device = Device::flex();
    let of = |dir: &TempDir| bits(&logits(dir.path(), &name, &device, FloatDType::F32));
    let quantized = write(3, WeightForm::Quantized);
    let expected = of(&write(3, WeightForm::Dequantized(FloatDType::F32)));
    assert_eq!(of(&quantized), expected);
    assert_ne!(of(&write(4, WeightForm::Quantized)), expected);
    assert!(expected.iter().all(|&bits| f32::from_bits(bits).is_finite()));
    let model = DeepseekModel::load(quantized.path(), &device, FloatDType::F32, &mut |_| {}).expect("it loads");
    assert!(!weight_specs(model.config()).is_empty());
}

#[test]
fn model_files_are_not_overwritten() {
    let fixture = folder("tests/fixtures/v3-tiny");
    let (dir, _) = written("tests/fixtures/v3-tiny", WeightForm::Quantized, u64::MAX);
    let from = WeightsFrom::Folder(&fixture);
    let error = write_checkpoint(from, dir.path(), WeightForm::Quantized, u64::MAX, &mut |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("model.safetensors") && error.to_string().contains("without weights"),
        "{error}"
    );
}

/// Published folders have layers for multi-token prediction behind the last one: they are left out, and not in the way.
#[rstest]
#[case("v3-tiny", "model.layers.4.eh_proj.weight")]
#[case("v4-tiny", "mtp.0.e_proj.weight")]
fn model_leaves_out_multi_token_prediction(#[case] fixture: &str, #[case] extra: &str) {
    let name = format!("tests/fixtures/{fixture}");
    let (dir, _) = written(&name, WeightForm::Quantized, u64::MAX);
    let path = dir.path().join("config.json");
    let read = std::fs::read(&path).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_slice(&read).expect("JSON");
    config["num_nextn_predict_layers"] = 1.into();
    std::fs::write(&path, config.to_string()).expect("it is changed");
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).expect("one file");
    let mut tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file").tensors();
    // More bytes than all others: they are not counted.
    let large = vec![0; 2 * bytes.len()];
    let view = safetensors::tensor::TensorView::new(Dtype::BF16, vec![bytes.len()], &large).expect("a tensor");
    tensors.push((extra.to_string(), view));
    safetensors::serialize_to_file(tensors, None, &file).expect("it is written");
    let inspection = Inspection::of(dir.path(), FloatDType::F32).expect("it is read");
    assert!(inspection.is_sound(), "{}", inspection.report);
    let mut last = (0, 0);
    let model = DeepseekModel::load(dir.path(), &Device::flex(), FloatDType::F32, &mut |step| {
        last = (step.loaded_bytes, step.total_bytes);
    });
    model.expect("the checkpoint loads");
    assert!(last.0 == last.1 && last.0 < bytes.len() as u64, "{last:?}");
}

/// A weight that cannot be quantised is named, and nothing is left behind that looks like a checkpoint.
#[test]
fn model_weights_that_are_not_finite_are_not_quantised() {
    let (copy, _) = written("tests/fixtures/v3-tiny", WeightForm::Dequantized(FloatDType::F32), u64::MAX);
    let file = copy.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("one file");
    let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
    let name = "model.layers.1.self_attn.o_proj.weight";
    let start = 8 + header + metadata.info(name).expect("a projection").data_offsets.0 + 4 * 193;
    bytes[start..start + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(&file, bytes).expect("it is damaged");
    let to = tempfile::tempdir().expect("a temporary folder");
    let from = WeightsFrom::Folder(copy.path());
    let error = write_checkpoint(from, to.path(), WeightForm::Quantized, 100_000, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains(name) && error.to_string().contains("[1, 1]"), "{error}");
    assert_eq!(std::fs::read_dir(to.path()).expect("the folder").count(), 0);
}
