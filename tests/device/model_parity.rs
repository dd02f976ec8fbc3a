//! The models against what transformers computes: logits, hidden states and greedy tokens of the fixtures.

use std::path::PathBuf;

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{DeepseekModel, VerifyOptions, verify};
use rstest::rstest;

use crate::devices::for_each_device;

/// A checkpoint folder of this repository.
pub fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Loads a checkpoint folder in f32.
pub fn load(name: &str, device: &Device) -> DeepseekModel {
    DeepseekModel::load(&folder(name), device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads")
}

#[rstest]
#[case("tests/fixtures/v3-tiny")]
#[case("tests/fixtures/v2lite-tiny")]
#[case("tests/fixtures/v3-realdims")]
#[case("assets/demo-v3")]
fn model_equals_the_stored_results(#[case] name: &str, #[values(1, 16, 64, 128)] page_size: usize) {
    for_each_device(|device| {
        let model = load(name, device);
        let rows = verify(&model, &folder(name), &VerifyOptions { page_size, ..Default::default() });
        let rows = rows.expect("the stored results are complete");
        assert!(rows.len() >= 6, "only {} comparisons", rows.len());
        for row in rows {
            assert!(row.passed(), "{name} with pages of {page_size}: {row:?}");
        }
    });
}

/// The published form of a config describes the same model as the form of transformers 5.
#[rstest]
#[case("tests/fixtures/v3-tiny")]
#[case("tests/fixtures/v2lite-tiny")]
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
#[test]
fn model_parity_sees_a_wrong_model() {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "expected.safetensors", "meta.json"] {
        std::fs::copy(folder("tests/fixtures/v3-tiny").join(file), copy.path().join(file)).expect("a copy");
    }
    let path = copy.path().join("config.json");
    let config = std::fs::read_to_string(&path).expect("a config");
    let changed = config.replace("\"routed_scaling_factor\": 2.5", "\"routed_scaling_factor\": 2.49");
    assert_ne!(config, changed);
    std::fs::write(&path, changed).expect("the config is written");
    let device = Device::flex();
    let model = DeepseekModel::load(copy.path(), &device, FloatDType::F32, &mut |_| {}).expect("the checkpoint loads");
    let rows = verify(&model, copy.path(), &VerifyOptions::default()).expect("the stored results are complete");
    assert!(rows.iter().all(|row| !row.passed()), "{rows:?}");
}
