//! Models without a checkpoint, with random weights.

use burn::tensor::{DType, Device, FloatDType};
use burn_mla::model::{DeepseekModel, ModelConfig};
use rstest::rstest;

use crate::devices::{for_each_device, supports};
use crate::model_parity::{folder, logits_in_steps};

fn config(fixture: &str) -> ModelConfig {
    ModelConfig::read(&folder("tests/fixtures").join(fixture)).expect("a configuration")
}

fn random(config: ModelConfig, seed: u64, device: &Device, dtype: FloatDType) -> DeepseekModel {
    let mut last = (0, 0);
    let model = DeepseekModel::random(config, seed, device, dtype, &mut |progress| {
        assert!(progress.loaded_bytes > last.0);
        last = (progress.loaded_bytes, progress.total_bytes);
    });
    assert_eq!(last.0, last.1, "all bytes are accounted for");
    model.expect("a model without a checkpoint")
}

#[rstest]
fn model_without_a_checkpoint_is_the_same_for_a_seed(
    #[values("v3-tiny", "v32-tiny", "v2lite-tiny", "v3-realdims", "v4-tiny", "v4-realdims")] fixture: &str,
) {
    for_each_device(|device| {
        let ids: Vec<u32> = (0..24).map(|i| i * 7 % 512).collect();
        let logits = |seed| logits_in_steps(&random(config(fixture), seed, device, FloatDType::F32), &ids, 16);
        let first = logits(1);
        assert!(first.iter().all(|logit| logit.is_finite()));
        let spread = first.iter().map(|logit| logit * logit).sum::<f32>() / first.len() as f32;
        assert!((0.3..3.0).contains(&spread), "logits of variance {spread}");
        assert_eq!(first, logits(1));
        assert_ne!(first, logits(2));
    });
}

/// A layer is the same whichever others there are, and fewer layers are a smaller model.
#[test]
fn model_without_a_checkpoint_may_have_fewer_layers() {
    for_each_device(|device| {
        for fixture in ["v3-tiny", "v4-tiny"] {
            let config = config(fixture).with_layers(1).expect("a layer");
            let model = random(config, 1, device, FloatDType::F32);
            assert_eq!(model.config().num_layers(), 1);
            assert!(logits_in_steps(&model, &[1, 2, 3], 2).iter().all(|logit| logit.is_finite()));
        }
        if supports(device, DType::BF16) {
            let model = random(config("v2lite-tiny"), 1, device, FloatDType::BF16);
            assert!(logits_in_steps(&model, &[1, 2, 3], 2).iter().all(|logit| logit.is_finite()));
        }
    });
}
