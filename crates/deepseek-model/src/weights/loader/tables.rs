//! Tables of whole numbers.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use safetensors::Dtype;

use super::{Source, WeightLoader};
use crate::parallel::Cut;
use crate::weights::spec::Listed;
use crate::weights::stored::Stored;
use crate::weights::{Entry, WeightRole, WeightSpec, random};

/// Dtypes that a table of numbers may have in the files.
const INTEGERS: [Dtype; 2] = [Dtype::I64, Dtype::I32];

impl<'a> WeightLoader<'a> {
    /// The tensor `name` of whole numbers below `below` (DeepSeek-V4's `tid2eid`), as i32; every rank has all of it.
    pub fn index_table(&mut self, name: &str, shape: [usize; 2], below: usize) -> Tensor<2, Int> {
        let options = (&self.device.clone(), DType::I32);
        let placeholder = Tensor::<2, Int>::zeros([1; 2], options).expand(shape);
        let spec = WeightSpec { name: name.into(), shape: shape.to_vec(), role: WeightRole::Table, cut: Cut::Whole };
        let (checkpoint, entry) = match self.source {
            Source::Files(checkpoint) => (checkpoint, self.find_table(name, &shape)),
            Source::Random(_) => {
                self.advance((shape[0] * shape[1] * DType::I32.size()) as u64, name);
                return on_device(random::table(shape, below), shape, &self.device);
            }
            Source::Unwritten => return Tensor::<1, Int>::empty([shape[0] * shape[1]], options).reshape(shape),
            Source::Nothing => return self.note(Listed { spec, stored: None, format: None }, placeholder),
        };
        if self.listing.is_some() {
            let stored = entry.map(Stored::plain);
            return self.note(Listed { spec, stored, format: None }, placeholder);
        }
        let Some(entry) = entry else { return placeholder };
        let (wide, _) = checkpoint.bytes(entry).as_chunks::<8>();
        let (narrow, _) = checkpoint.bytes(entry).as_chunks::<4>();
        let values: Vec<i64> = match entry.dtype {
            Dtype::I64 => wide.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
            _ => narrow.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes))).collect(),
        };
        if let Some(value) = values.iter().find(|&&value| value < 0 || value >= below as i64) {
            self.report.out_of_range.push(format!(
                "{} holds {value}, expected 0 to {}",
                self.in_files(name),
                below - 1
            ));
        }
        self.advance(entry.len(), name);
        on_device(values.into_iter().map(|value| value as i32).collect(), shape, &self.device)
    }

    /// Where the table `name` lies, or `None` after recording what is wrong with it.
    fn find_table(&mut self, name: &str, shape: &[usize]) -> Option<&'a Entry> {
        let Source::Files(checkpoint) = self.source else { return None };
        let (name, entry) = checkpoint.find(&self.in_files(name), &mut self.report)?;
        self.asked_for.insert(name);
        let sound = self.report.check_dtype(name, entry.dtype, &INTEGERS)
            && self.report.check_shape(name, &entry.shape, shape.to_vec());
        sound.then_some(entry)
    }
}

/// A table by way of one axis: GPUs pad the rows of matrices, which each step would copy.
fn on_device(values: Vec<i32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let len = values.len();
    Tensor::<1, Int>::from_data(TensorData::new(values, [len]), (device, DType::I32)).reshape(shape)
}
