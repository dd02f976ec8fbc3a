//! Weights larger than what a GPU is given at once, and the operation that writes the parts.

use std::fs;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, bf16};
use burn_mla::model::{Checkpoint, Cut, ModelError, WeightLoader};
use burn_mla::ops::write_data;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};
use tempfile::TempDir;

use crate::devices::for_each_device;

/// 17.2 million bytes in bf16, and three of 8.6 million.
const LARGE: [usize; 2] = [4100, 2100];
const EACH: [usize; 2] = [2050, 2100];

fn bytes([rows, columns]: [usize; 2], seed: usize) -> Vec<u8> {
    let values = (0..rows * columns).map(|at| bf16::from_f32(((at * 37 + seed) % 1021) as f32 / 64.0 - 8.0));
    values.flat_map(bf16::to_le_bytes).collect()
}

type Tensors = Vec<(&'static str, [usize; 2], Vec<u8>)>;

/// A checkpoint of these tensors, and what is in them.
pub fn checkpoint() -> (TempDir, Checkpoint, Tensors) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let shapes = [("large", LARGE), ("a", EACH), ("b", EACH), ("c", EACH)];
    let tensors: Tensors = (0..).zip(shapes).map(|(seed, (name, shape))| (name, shape, bytes(shape, seed))).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (*name, TensorView::new(Dtype::BF16, shape.to_vec(), bytes).expect("bytes of the shape"))
    });
    let file = serialize(views, None).expect("a file");
    fs::write(dir.path().join("model.safetensors"), file).expect("a file that is written");
    let checkpoint = Checkpoint::open(dir.path()).expect("a checkpoint");
    (dir, checkpoint, tensors)
}

/// The large one, and the others in a stack.
pub fn load(checkpoint: &Checkpoint, device: &Device, dtype: FloatDType) -> Result<(Tensor<2>, Tensor<3>), ModelError> {
    let mut loader = WeightLoader::new(checkpoint, device, dtype, None);
    let large = loader.tensor("large", LARGE, Cut::Whole);
    let names = ["a", "b", "c"].map(str::to_string);
    let stack = loader.stacked(&names, [3, EACH[0], EACH[1]], Cut::Whole);
    loader.finish().map(|_| (large, stack))
}

#[test]
fn weights_in_parts_are_those_of_the_files() {
    let (_dir, checkpoint, tensors) = checkpoint();
    let expected = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks::<2>().0.iter().map(|&pair| bf16::from_le_bytes(pair).to_f32()).collect()
    };
    let values = |data: TensorData| data.convert::<f32>().try_to_vec::<f32>().expect("numbers");
    for_each_device(|device| {
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            if device.supports_dtype(DType::from(dtype)) {
                let (large, stack) = load(&checkpoint, device, dtype).expect("all is there");
                assert_eq!(large.dtype(), DType::from(dtype));
                assert!(values(large.into_data()) == expected(&tensors[0].2), "{device:?} {dtype:?}");
                let stacked: Vec<f32> = tensors[1..].iter().flat_map(|(.., bytes)| expected(bytes)).collect();
                assert!(values(stack.into_data()) == stacked, "{device:?} {dtype:?}");
            }
        }
    });
}

#[test]
fn data_is_written_where_it_belongs() {
    for_each_device(|device| {
        let whole = Tensor::<1, Int>::from_data(TensorData::from([1, 2, 3, 4, 5, 6, 7]), (device, DType::I32));
        let written = write_data(whole, 2, TensorData::from([-1, -2, -3])).expect("legal");
        let written = write_data(written, 7, TensorData::new(Vec::<i32>::new(), [0])).expect("legal");
        assert_eq!(written.into_data().try_to_vec::<i32>().expect("numbers"), [1, 2, -1, -2, -3, 6, 7], "{device:?}");
    });
}

/// A tensor with two handles is one that others read.
#[test]
fn data_is_not_written_into_what_others_hold() {
    for_each_device(|device| {
        let held = Tensor::<1>::from_data(TensorData::from([1.0f32, 2.0, 3.0, 4.0]), (device, DType::F32));
        let written = write_data(held.clone(), 1, TensorData::from([9.0f32, 8.0])).expect("legal");
        assert_eq!(written.into_data().try_to_vec::<f32>().expect("numbers"), [1.0, 9.0, 8.0, 4.0], "{device:?}");
        assert_eq!(held.into_data().try_to_vec::<f32>().expect("numbers"), [1.0, 2.0, 3.0, 4.0], "{device:?}");
    });
}

#[test]
fn weights_in_parts_refuse_other_data() {
    for_each_device(|device| {
        let tensor = || Tensor::<1>::zeros([4], device);
        let refused = |first, data| write_data(tensor(), first, data).expect_err("illegal").to_string();
        let beyond = refused(3, TensorData::from([1.0f32, 2.0]));
        assert!(beyond.contains("`first` is 3, expected at most 4 less the 2"), "{beyond}");
        let none = refused(5, TensorData::new(Vec::<f32>::new(), [0]));
        assert!(none.contains("`first` is 5"), "{none}");
        let other = refused(0, TensorData::from([1i32]));
        assert!(other.contains("`data` has dtype I32, expected F32"), "{other}");
    });
}
