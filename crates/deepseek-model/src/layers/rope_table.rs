use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, Tensor, TensorData};
use mla_ops::check_written;

use crate::config::RopeConfig;
use crate::step::ints;

/// Positions that a table has at least.
const LEAST: usize = 1024;

/// The rotations of rotary position embedding, of all positions that were asked for so far: computed once on the host, and then read
/// on the device.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    rope: RopeConfig,
    /// `dr`.
    width: usize,
    rows: Arc<Mutex<Option<Rows>>>,
}

/// Cosines and sines, f32 `[positions, dr / 2]` each.
type Rows = [Tensor<2>; 2];

impl RopeTable {
    /// Of a rotary width `dr`.
    pub(crate) fn new(rope: &RopeConfig, width: usize) -> Self {
        Self { rope: rope.clone(), width, rows: Arc::default() }
    }

    /// `dr`.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Cosines and sines at these positions, f32 `[N, dr / 2]` each.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Rows {
        let places = ints(positions.iter().map(|&position| position as i32).collect(), device);
        let end = positions.iter().max().map_or(0, |position| position + 1);
        self.first(end, device).map(|rows| rows.select(0, places.clone()))
    }

    /// Those of the first positions, as many at least.
    pub(crate) fn first(&self, end: usize, device: &Device) -> Rows {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let known = rows.take().filter(|[cos, _]| cos.dims()[0] >= end && cos.device() == *device);
        if known.is_some() {
            *rows = known.clone();
        }
        known.unwrap_or_else(|| {
            let new = self.computed(end.max(LEAST).next_power_of_two(), device);
            // A table that the device had no memory for would be without numbers for ever.
            *rows = new.iter().all(|rows| check_written("rows", rows).is_ok()).then(|| new.clone());
            new
        })
    }

    fn computed(&self, positions: usize, device: &Device) -> Rows {
        let (cos, sin) = self.rope.cos_sin(self.width, &(0..positions).collect::<Vec<_>>());
        let shape = [positions, self.width / 2];
        [cos, sin].map(|values| Tensor::from_data(TensorData::new(values, shape), (device, DType::F32)))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_grows_has_the_rotations_of_each_position() {
        let (rope, width, device) = (RopeConfig { rope_theta: 1e4, yarn: None }, 8, Device::flex());
        let table = RopeTable::new(&rope, width);
        for positions in [vec![], vec![3, 0, 3], vec![LEAST - 1], vec![LEAST, 1], vec![5 * LEAST, 0], vec![7]] {
            let (cos, sin) = rope.cos_sin(width, &positions);
            let read = table.at(&positions, &device).map(|rows| rows.into_data().try_to_vec::<f32>().expect("f32"));
            assert_eq!(read, [cos, sin], "{positions:?}");
        }
    }
}
