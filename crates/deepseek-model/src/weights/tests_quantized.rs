use burn::tensor::{Device, FloatDType};
use half::bf16;
use rstest::rstest;
use safetensors::Dtype;

use super::tests::{Tensors, f32s, report, single};
use super::*;
use crate::config::Quantization;
use crate::parallel::Cut;

const SMALL_BLOCKS: Quantization = Quantization { block: [2, 2], fp4_experts: true };

fn loader(checkpoint: &Checkpoint) -> WeightLoader<'_> {
    WeightLoader::new(checkpoint, &Device::flex(), FloatDType::F32, None).with_quantization(Some(SMALL_BLOCKS))
}

/// 1, 2, 4 and their negatives, 3 by 3, in blocks of 2 by 2; scales f32.
fn sound() -> Tensors {
    vec![
        ("a.weight", Dtype::F8_E4M3, vec![3, 3], vec![0x38, 0x40, 0x48, 0xb8, 0xc0, 0xc8, 0x38, 0x38, 0x38]),
        f32s("a.weight_scale_inv", &[2, 2], &[1.0, 0.5, 0.1, 3.0]),
    ]
}

const SOUND: [f32; 9] = [1.0, 2.0, 2.0, -1.0, -2.0, -2.0, 0.1, 0.1, 3.0];

fn values<const D: usize>(tensor: burn::tensor::Tensor<D>) -> Vec<f32> {
    tensor.cast(FloatDType::F32).into_data().try_to_vec().unwrap()
}

#[test]
fn fp8_blocks_load_as_what_they_stand_for() {
    let (_dir, checkpoint) = single(sound());
    let mut loader = loader(&checkpoint);
    assert_eq!(values(loader.tensor("a.weight", [3, 3], Cut::Whole)), SOUND);
    assert_eq!(loader.finish().unwrap(), LoadSummary { tensors: 2, bytes: 9 + 16, skipped: 0 });
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::BF16, None);
    loader = loader.with_quantization(Some(SMALL_BLOCKS));
    assert_eq!(
        values(loader.tensor("a.weight", [3, 3], Cut::Whole)),
        SOUND.map(|value| bf16::from_f32(value).to_f32())
    );
    // Norms and routers are f32 whatever the weights are.
    assert_eq!(values(loader.tensor_f32("a.weight", [3, 3], Cut::Whole)), SOUND);
}

/// The scales of DeepSeek-V4 have names and a type of their own; FP4 only where it is said, and only in routed experts.
#[test]
fn v4_blocks_and_fp4_experts_load() {
    let mut tensors = sound();
    tensors[1] = ("a.scale", Dtype::F8_E8M0, vec![2, 2], vec![127, 126, 128, 130]);
    tensors.push(("l.experts.0.w1.weight", Dtype::I8, vec![2, 2], vec![0x21, 0xf7, 0x0a, 0x43]));
    tensors.push(("l.experts.0.w1.scale", Dtype::F8_E8M0, vec![2, 1], vec![128, 126]));
    let (_dir, checkpoint) = single(tensors);
    let mut loader = loader(&checkpoint);
    let expected = [1.0, 2.0, 2.0, -1.0, -2.0, -2.0, 2.0, 2.0, 8.0];
    assert_eq!(values(loader.tensor("a.weight", [3, 3], Cut::Whole)), expected);
    let expert = values(loader.tensor("l.experts.0.w1.weight", [2, 4], Cut::Whole));
    assert_eq!(expert, [1.0, 2.0, 12.0, -12.0, -0.5, 0.0, 0.75, 1.0]);
    loader.finish().unwrap();
    let fp8 = Quantization { fp4_experts: false, ..SMALL_BLOCKS };
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::F32, None);
    loader = loader.with_quantization(Some(fp8));
    loader.tensor("l.experts.0.w1.weight", [2, 4], Cut::Whole);
    assert_eq!(report(loader).wrong_quantization.len(), 1);
}

/// 2 by 32 numbers in NVFP4: row 0 has 1 and 2 in turns, row 1 -6 and 0.5; blocks of 16 have 1, 0.5, 0 and 448, and all of them 0.25.
fn nvfp4() -> Tensors {
    let codes = [vec![0x42; 16], vec![0x1f; 16]].concat();
    vec![
        ("l.experts.0.w1.weight", Dtype::U8, vec![2, 16], codes),
        ("l.experts.0.w1.weight_scale", Dtype::F8_E4M3, vec![2, 2], vec![0x38, 0x30, 0x00, 0x7e]),
        f32s("l.experts.0.w1.weight_scale_2", &[], &[0.25]),
        f32s("l.experts.0.w1.input_scale", &[], &[3.0]),
    ]
}

#[test]
fn nvfp4_loads_as_what_it_stands_for() {
    let (_dir, checkpoint) = single(nvfp4());
    let mut loader = loader(&checkpoint);
    let found = values(loader.tensor("l.experts.0.w1.weight", [2, 32], Cut::Whole));
    let row = |pair: [f32; 2], scales: [f32; 2]| scales.map(|scale| pair.map(|value| value * scale * 0.25).repeat(8));
    let expected = [row([1.0, 2.0], [1.0, 0.5]), row([-6.0, 0.5], [0.0, 448.0])].concat().concat();
    assert_eq!(found, expected);
    // What activations are multiplied by is of no use here.
    assert_eq!(loader.finish().unwrap(), LoadSummary { tensors: 4, bytes: 32 + 4 + 4, skipped: 0 });
}

#[rstest]
#[case(|t: &mut Tensors| t[1].3[2] = 0x7f, "w1.weight_scale", "NaN", "at [1, 0]", "from 0 on")]
#[case(|t: &mut Tensors| t[1].3[1] = 0xb8, "w1.weight_scale", "-1", "at [0, 1]", "from 0 on")]
#[case(|t: &mut Tensors| t[2].3 = f32::NAN.to_le_bytes().to_vec(), "w1.weight_scale_2", "NaN", "is", "above 0")]
#[case(|t: &mut Tensors| t[2].3 = 0f32.to_le_bytes().to_vec(), "w1.weight_scale_2", "0e0", "is", "above 0")]
#[case(|t: &mut Tensors| t[2].3 = 1e36f32.to_le_bytes().to_vec(), "w1.weight_scale", "4.48e2", "at [1, 1]", "at most")]
#[case(|t: &mut Tensors| t[2] = f32s("l.experts.0.w1.weight_scale_2", &[2], &[1.0, 1.0]), "w1.weight_scale_2", "wrong shape", "[2]", "[]")]
#[case(|t: &mut Tensors| { t.remove(2); }, "w1.weight_scale_2", "missing", "w1.weight_scale_2", "")]
#[case(|t: &mut Tensors| { t.remove(1); }, "w1.weight", "has no scales", "w1.weight_scale [2, 2]", "F8_E4M3")]
#[case(|t: &mut Tensors| t[1] = ("l.experts.0.w1.weight_scale", Dtype::F8_E8M0, vec![2, 2], vec![127; 4]), "w1.weight_scale", "F8_E8M0", "wrong dtype", "F8_E4M3")]
#[case(|t: &mut Tensors| t[0] = ("l.experts.0.w1.weight", Dtype::U8, vec![2, 32], vec![0; 64]), "w1.weight", "wrong shape", "[2, 32]", "[2, 16]")]
fn damaged_nvfp4_is_reported_by_tensor(
    #[case] damage: fn(&mut Tensors),
    #[case] tensor: &str,
    #[case] actual: &str,
    #[case] at: &str,
    #[case] expected: &str,
) {
    let mut tensors = nvfp4();
    damage(&mut tensors);
    let (_dir, checkpoint) = single(tensors);
    let mut loader = loader(&checkpoint);
    loader.tensor("l.experts.0.w1.weight", [2, 32], Cut::Whole);
    let report = report(loader);
    // One fault makes no tensor beside it one too many, but where there are no scales to look beside.
    assert!(report.unexpected.is_empty() || actual == "has no scales", "{report}");
    let text = report.to_string();
    for needle in [tensor, actual, at, expected] {
        assert!(text.contains(needle), "`{needle}` is not in: {text}");
    }
}

/// Experts may be plain numbers and codes side by side.
#[test]
fn stacks_take_quantised_tensors() {
    let mut tensors = sound();
    tensors.push(f32s("b.weight", &[3, 3], &[9.0; 9]));
    let (_dir, checkpoint) = single(tensors);
    let mut loader = loader(&checkpoint);
    let names = ["b.weight", "a.weight", "b.weight"].map(str::to_string);
    let stack: burn::tensor::Tensor<3> = loader.stacked(&names, [3, 3, 3], Cut::Whole);
    let nines = [9.0; 9];
    assert_eq!(values(loader.reshape(stack, [9, 3])), [nines, SOUND, nines].concat());
    loader.finish().unwrap();
}

/// What is wrong, and the tensor, the fault and the expectation that the report names.
#[rstest]
#[case(|t: &mut Tensors| t[0].3[4] = 0x7f, "a.weight", "0x7f", "at [1, 1]", "finite numbers")]
#[case(|t: &mut Tensors| t[0].3[8] = 0xff, "a.weight", "0xff", "at [2, 2]", "finite numbers")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[2, 2], &[1.0, 1.0, f32::NAN, 1.0]), "a.weight_scale_inv", "NaN", "at [1, 0]", "above 0")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[2, 2], &[1.0, f32::INFINITY, 1.0, 1.0]), "a.weight_scale_inv", "inf", "at [0, 1]", "above 0")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[2, 2], &[1.0, 1.0, 1.0, 0.0]), "a.weight_scale_inv", "0", "at [1, 1]", "above 0")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[2, 2], &[-1.0, 1.0, 1.0, 1.0]), "a.weight_scale_inv", "-1", "at [0, 0]", "above 0")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[2, 2], &[1.0, 1e36, 1.0, 1.0]), "a.weight_scale_inv", "1e36", "at [0, 1]", "at most 7.5")]
#[case(|t: &mut Tensors| t[1] = ("a.scale", Dtype::F8_E8M0, vec![2, 2], vec![127, 254, 127, 127]), "a.scale", "1.7014118e38", "at [0, 1]", "at most")]
#[case(|t: &mut Tensors| t[1] = ("a.scale", Dtype::F8_E8M0, vec![2, 2], vec![127, 255, 127, 127]), "a.scale", "NaN", "at [0, 1]", "above 0")]
#[case(|t: &mut Tensors| t.truncate(1), "a.weight", "has no scales", "a.weight_scale_inv or a.scale", "[2, 2]")]
#[case(|t: &mut Tensors| t[1] = f32s("a.weight_scale_inv", &[1, 2], &[1.0, 1.0]), "a.weight_scale_inv", "wrong shape", "[1, 2]", "[2, 2]")]
#[case(|t: &mut Tensors| t[1] = ("a.weight_scale_inv", Dtype::BF16, vec![2, 2], vec![0; 8]), "a.weight_scale_inv", "wrong dtype", "BF16", "F32 or F8_E8M0")]
#[case(|t: &mut Tensors| t[0] = ("a.weight", Dtype::F8_E4M3, vec![1, 9], vec![0; 9]), "a.weight", "wrong shape", "[1, 9]", "[3, 3]")]
#[case(|t: &mut Tensors| t[0].1 = Dtype::I8, "a.weight", "I8", "wrong quantisation", "quantization_config")]
fn damage_is_reported_by_tensor(
    #[case] damage: fn(&mut Tensors),
    #[case] tensor: &str,
    #[case] actual: &str,
    #[case] at: &str,
    #[case] expected: &str,
) {
    let mut tensors = sound();
    damage(&mut tensors);
    tensors.push(f32s("b.weight", &[3, 3], &[9.0; 9]));
    let (_dir, checkpoint) = single(tensors);
    let mut loader = loader(&checkpoint);
    let names = ["b.weight", "a.weight"].map(str::to_string);
    let stack: burn::tensor::Tensor<3> = loader.stacked(&names, [2, 3, 3], Cut::Whole);
    assert_eq!(loader.reshape(stack, [6, 3]).dims(), [6, 3]);
    let text = report(loader).to_string();
    for needle in [tensor, actual, at, expected] {
        assert!(text.contains(needle), "`{needle}` is not in: {text}");
    }
}

/// A scale that f32 holds, and f16 does not with the largest code.
#[test]
fn scales_that_overflow_the_dtype_are_reported() {
    let mut tensors = sound();
    tensors[1] = f32s("a.weight_scale_inv", &[2, 2], &[1.0, 1.0, 200.0, 1.0]);
    let (_dir, checkpoint) = single(tensors);
    let mut half = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::F16, None);
    half = half.with_quantization(Some(SMALL_BLOCKS));
    half.tensor("a.weight", [3, 3], Cut::Whole);
    let text = report(half).to_string();
    assert!(text.contains("holds 2e2 at [1, 0]") && text.contains("F16"), "{text}");
    let mut wide = loader(&checkpoint);
    wide.tensor("a.weight", [3, 3], Cut::Whole);
    wide.finish().unwrap();
}

/// A block that is larger than the weight is no reason to make numbers for all of it.
#[test]
fn huge_blocks_cost_nothing() {
    let mut tensors = sound();
    tensors[1] = f32s("a.weight_scale_inv", &[1, 1], &[2.0]);
    let (_dir, checkpoint) = single(tensors);
    let block = [usize::MAX, 1 << 40];
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::F32, None);
    loader = loader.with_quantization(Some(Quantization { block, fp4_experts: false }));
    assert_eq!(values(loader.tensor("a.weight", [3, 3], Cut::Whole))[..4], [2.0, 4.0, 8.0, -2.0]);
    loader.finish().unwrap();
}

#[test]
fn codes_without_a_quantization_config_are_reported() {
    let (_dir, checkpoint) = single(sound());
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::F32, None);
    loader.tensor("a.weight", [3, 3], Cut::Whole);
    let report = report(loader);
    assert_eq!(report.wrong_quantization[0].name, "a.weight");
    assert!(report.to_string().contains("a.weight is F8_E4M3, expected a `quantization_config`"), "{report}");
}

#[test]
fn all_damaged_experts_are_reported_at_once() {
    let bad = |name, scale, value: f32| {
        let codes: (_, _, _, Vec<u8>) = (name, Dtype::F8_E4M3, vec![2, 2], vec![0x38; 4]);
        [codes, f32s(scale, &[1, 1], &[value])]
    };
    let tensors =
        [bad("0.weight", "0.weight_scale_inv", 0.0), bad("1.weight", "1.weight_scale_inv", f32::NAN)].concat();
    let (_dir, checkpoint) = single(tensors);
    let mut loader = loader(&checkpoint);
    let _: burn::tensor::Tensor<3> =
        loader.stacked(&["0.weight".to_string(), "1.weight".to_string()], [2, 2, 2], Cut::Whole);
    let names: Vec<_> = report(loader).wrong_quantization.into_iter().map(|wrong| wrong.name).collect();
    assert_eq!(names, ["0.weight_scale_inv", "1.weight_scale_inv"]);
}
