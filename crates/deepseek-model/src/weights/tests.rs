use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, FloatDType};
use half::{bf16, f16};
use rstest::rstest;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::*;
use crate::error::WeightReport;
use crate::models::deepseek_v3::{DeepseekV3Config, skip_unused};
use crate::models::deepseek_v4::expect;
use crate::parallel::Cut;

pub(super) type Tensors = Vec<(&'static str, Dtype, Vec<usize>, Vec<u8>)>;

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).expect("a test tensor fits its shape"))
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(super) fn f32s(name: &'static str, shape: &[usize], values: &[f32]) -> (&'static str, Dtype, Vec<usize>, Vec<u8>) {
    (name, Dtype::F32, shape.to_vec(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

pub(super) fn single(tensors: Tensors) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join(SINGLE), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn sharded(map: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("a.safetensors"), &vec![f32s("one", &[2], &[1.0, 2.0])]);
    write(&dir.path().join("b.safetensors"), &vec![f32s("two", &[1, 2], &[3.0, 4.0])]);
    let map: BTreeMap<_, _> = map.iter().copied().collect();
    let index = serde_json::json!({"metadata": {"total_size": 16}, "weight_map": map});
    std::fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
    dir
}

fn loader(checkpoint: &Checkpoint) -> WeightLoader<'_> {
    WeightLoader::new(checkpoint, &Device::flex(), FloatDType::F32, None)
}

pub(super) fn report(loader: WeightLoader<'_>) -> WeightReport {
    match loader.finish() {
        Err(ModelError::Weights(report)) => *report,
        other => panic!("expected a report, got {other:?}"),
    }
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
}

#[test]
fn shards_are_read_as_one_checkpoint() {
    let dir = sharded(&[("one", "a.safetensors"), ("two", "b.safetensors")]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["one", "two"]);
    assert_eq!(checkpoint.total_bytes(), 16);
    let mut steps = Vec::new();
    let mut note = |step: LoadProgress<'_>| steps.push((step.loaded_bytes, step.total_bytes, step.tensor.to_string()));
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), FloatDType::F32, Some(&mut note));
    assert_eq!(loader.tensor("one", [2], Cut::Whole).into_data().try_to_vec::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(loader.tensor("two", [1, 2], Cut::Whole).into_data().try_to_vec::<f32>().unwrap(), [3.0, 4.0]);
    assert_eq!(loader.finish().unwrap(), LoadSummary { tensors: 2, bytes: 16, skipped: 0 });
    assert_eq!(steps, [(8, 16, "one".to_string()), (16, 16, "two".to_string())]);
}

#[test]
fn a_missing_shard_is_named_with_its_index() {
    let dir = sharded(&[("one", "a.safetensors"), ("two", "gone.safetensors")]);
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("gone.safetensors") && message.contains(INDEX), "{message}");
}

#[test]
fn a_tensor_that_its_listed_shard_lacks_is_missing() {
    let dir = sharded(&[("one", "a.safetensors"), ("two", "b.safetensors"), ("three", "b.safetensors")]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut loader = loader(&checkpoint);
    loader.tensor("one", [2], Cut::Whole);
    loader.tensor("two", [1, 2], Cut::Whole);
    assert_eq!(loader.tensor("three", [2, 2], Cut::Whole).dims(), [2, 2]);
    assert_eq!(report(loader).missing, ["three"]);
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let dir = sharded(&[("one", "a.safetensors"), ("two", "b.safetensors")]);
    write(&dir.path().join("b.safetensors"), &vec![f32s("one", &[1], &[3.0])]);
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("tensor one is also in"), "{message}");
}

#[test]
fn a_folder_without_weights_says_what_it_needs() {
    let dir = tempfile::tempdir().unwrap();
    let message = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains(SINGLE) && message.contains(INDEX), "{message}");
    std::fs::write(dir.path().join(INDEX), "{}").unwrap();
    assert!(matches!(Checkpoint::open(dir.path()), Err(ModelError::Json { .. })));
}

#[test]
fn a_file_cut_anywhere_or_with_a_tail_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(SINGLE);
    write(&path, &vec![f32s("one", &[2], &[1.0, 2.0]), f32s("two", &[1], &[3.0])]);
    let whole = std::fs::read(&path).unwrap();
    let damaged = (0..whole.len()).map(|cut| whole[..cut].to_vec()).chain([[whole.as_slice(), &[0]].concat()]);
    for bytes in damaged {
        std::fs::write(&path, &bytes).unwrap();
        match Checkpoint::open(dir.path()) {
            Err(ModelError::Safetensors { path: named, .. }) => assert_eq!(named, path),
            other => panic!("{} of {} bytes: {other:?}", bytes.len(), whole.len()),
        }
    }
}

#[test]
fn everything_wrong_is_reported_together() {
    let (_dir, checkpoint) = single(vec![
        f32s("shape", &[2], &[1.0, 2.0]),
        f32s("extra", &[1], &[1.0]),
        f32s("good", &[1], &[1.0]),
        ("integers", Dtype::I64, vec![1], vec![0; 8]),
        ("wide", Dtype::F64, vec![1], vec![0; 8]),
    ]);
    let mut loader = loader(&checkpoint);
    loader.tensor("good", [1], Cut::Whole);
    assert_eq!(loader.tensor("shape", [1, 2], Cut::Whole).dims(), [1, 2]);
    loader.tensor("integers", [1], Cut::Whole);
    loader.tensor_f32("wide", [1], Cut::Whole);
    loader.stacked(&["gone".to_string(), "good".to_string(), "lost".to_string()], [3, 1], Cut::Whole);
    let report = report(loader);
    assert_eq!(report.missing, ["gone", "lost"]);
    assert_eq!(report.unexpected, ["extra"]);
    let shapes: Vec<_> = report.wrong_shape.into_iter().map(|w| (w.name, w.actual, w.expected)).collect();
    assert_eq!(shapes, [("shape".to_string(), vec![2], vec![1, 2])]);
    let dtypes: Vec<_> = report.wrong_dtype.into_iter().map(|w| (w.name, w.actual)).collect();
    assert_eq!(dtypes, [("integers".to_string(), "I64".to_string()), ("wide".to_string(), "F64".to_string())]);
}

#[rstest]
#[case(Dtype::F8_E5M2)]
#[case(Dtype::F8_E4M3FNUZ)]
fn other_8_bit_numbers_are_refused_by_name(#[case] dtype: Dtype) {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join(SINGLE), &vec![("w", dtype, vec![4], vec![0; 4])]);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, ModelError::UnsupportedQuantization { .. }), "{message}");
    assert!(message.contains(&format!("tensor w is {dtype:?}")) && message.contains("bfloat16"), "{message}");
}

#[rstest]
#[case(FloatDType::F32, DType::F32)]
#[case(FloatDType::F16, DType::F16)]
#[case(FloatDType::BF16, DType::BF16)]
fn equal_numbers_load_equally_from_every_dtype(#[case] to: FloatDType, #[case] dtype: DType) {
    let values = [0.0f32, -1.5, 2.0, 0.0078125, -96.0, 3.140625];
    let halves = |bits: fn(f32) -> [u8; 2]| values.iter().flat_map(|&v| bits(v)).collect::<Vec<u8>>();
    let (_dir, checkpoint) = single(vec![
        // One byte first: the tensors after it in the file are not aligned.
        ("a", Dtype::U8, vec![1], vec![0]),
        f32s("f32", &[2, 3], &values),
        ("f16", Dtype::F16, vec![2, 3], halves(|v| f16::from_f32(v).to_le_bytes())),
        ("bf16", Dtype::BF16, vec![2, 3], halves(|v| bf16::from_f32(v).to_le_bytes())),
    ]);
    let mut loader = WeightLoader::new(&checkpoint, &Device::flex(), to, None);
    loader.skip("a byte that shifts the others", |name| name == "a");
    for name in ["f32", "f16", "bf16"] {
        let tensor = loader.tensor(name, [2, 3], Cut::Whole);
        assert_eq!(tensor.dtype(), dtype);
        assert_eq!(tensor.into_data().convert::<f32>().try_to_vec::<f32>().unwrap(), values, "{name}");
        assert_eq!(loader.tensor_f32(name, [2, 3], Cut::Whole).dtype(), DType::F32);
    }
    let stacked = loader.stacked(&["f16".to_string(), "f32".to_string()], [2, 2, 3], Cut::Whole);
    assert_eq!(stacked.into_data().convert::<f32>().try_to_vec::<f32>().unwrap(), [values, values].concat());
    assert_eq!(loader.finish().unwrap().skipped, 1);
}

#[test]
fn prediction_layers_and_rotary_frequencies_are_left_out() {
    let (_dir, checkpoint) = single(vec![
        f32s("model.layers.3.self_attn.rotary_emb.inv_freq", &[1], &[1.0]),
        f32s("model.layers.3.norm", &[1], &[1.0]),
        f32s("model.layers.4.eh_proj.weight", &[1], &[1.0]),
        f32s("model.layers.5.norm", &[1], &[1.0]),
    ]);
    let mut config = DeepseekV3Config::read(&fixture("v3-tiny").join("config.json")).unwrap();
    config.num_nextn_predict_layers = 1;
    let mut loader = loader(&checkpoint);
    skip_unused(&mut loader, &config);
    loader.tensor("model.layers.3.norm", [1], Cut::Whole);
    assert_eq!(report(loader).unexpected, ["model.layers.5.norm"]);
}

#[test]
fn tables_of_numbers_are_checked() {
    let table = |values: [i64; 4]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let (_dir, checkpoint) = single(vec![
        ("good", Dtype::I64, vec![2, 2], table([0, 3, 2, 1])),
        ("beyond", Dtype::I64, vec![2, 2], table([0, 4, 2, 1])),
        ("below", Dtype::I64, vec![2, 2], table([0, 3, -1, 1])),
        f32s("floats", &[2, 2], &[0.0; 4]),
    ]);
    let mut loader = loader(&checkpoint);
    let good = loader.index_table("good", [2, 2], 4);
    assert_eq!(good.into_data().try_to_vec::<i32>().unwrap(), [0, 3, 2, 1]);
    for name in ["beyond", "below", "floats", "gone"] {
        assert_eq!(loader.index_table(name, [2, 2], 4).dims(), [2, 2]);
    }
    let report = report(loader);
    assert_eq!(report.out_of_range, ["beyond holds 4, expected 0 to 3", "below holds -1, expected 0 to 3"]);
    assert_eq!((report.wrong_dtype.len(), report.missing), (1, vec!["gone".to_string()]));
}

#[test]
fn v4_files_may_have_either_names_and_prediction_layers() {
    let (_dir, checkpoint) = single(vec![
        f32s("model.embed_tokens.weight", &[1], &[1.0]),
        f32s("model.layers.0.input_layernorm.weight", &[1], &[2.0]),
        f32s("model.mtp.0.norm.weight", &[1], &[3.0]),
        f32s("mtp.0.e_proj.weight", &[1], &[3.0]),
    ]);
    let mut loader = loader(&checkpoint);
    expect(&mut loader);
    loader.tensor("embed.weight", [1], Cut::Whole);
    assert_eq!(
        loader.tensor("layers.0.attn_norm.weight", [1], Cut::Whole).into_data().try_to_vec::<f32>().unwrap(),
        [2.0]
    );
    assert!(loader.has("layers.0.attn_norm.weight") && !loader.has("layers.0.ffn_norm.weight"));
    assert_eq!(loader.finish().unwrap().skipped, 2);
}

#[rstest]
#[case("v3-tiny", 128)]
#[case("v2lite-tiny", 96)]
fn fixtures_open_whole(#[case] name: &str, #[case] hidden_size: usize) {
    let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
    let mut loader = loader(&checkpoint);
    let embed = loader
        .tensor("model.embed_tokens.weight", [512, hidden_size], Cut::Whole)
        .into_data()
        .try_to_vec::<f32>()
        .unwrap();
    assert!(embed.iter().all(|v| v.is_finite()) && embed.iter().any(|&v| v != 0.0));
    let report = report(loader);
    assert_eq!(report.unexpected.len() + 1, checkpoint.tensor_names().count());
    assert_eq!(WeightReport { unexpected: Vec::new(), checkpoint: PathBuf::new(), ..report }, WeightReport::default());
}
