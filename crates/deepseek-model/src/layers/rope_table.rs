use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Tensor};
use mla_ops::batch::index_tensor;
use mla_ops::{MlaError, RopeConfig, check_written};

/// Positions that a table has at least.
const LEAST: usize = 1024;

/// The rotations of rotary position embedding, of all positions that were asked for so far: computed once on the host, and then read
/// on the device.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    rope: RopeConfig,
    /// `dr`.
    width: usize,
    tables: Arc<Mutex<Option<Tables>>>,
}

/// At the first positions.
#[derive(Debug)]
struct Tables {
    /// Cosines of all, then sines, f32 `[2 · positions, dr / 2]`.
    joined: Tensor<2>,
    /// The same.
    rows: Rows,
}

/// Cosines and sines, f32 `[positions, dr / 2]` each.
type Rows = [Tensor<2>; 2];

impl RopeTable {
    /// Of a rotary width `dr`.
    pub(crate) fn new(rope: &RopeConfig, width: usize) -> Self {
        Self { rope: rope.clone(), width, tables: Arc::default() }
    }

    /// Cosines and sines at these positions, f32 `[N, dr / 2]` each.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Result<Rows, MlaError> {
        let end = positions.iter().max().map_or(0, |position| position + 1);
        let rows = self.first(end, device)?;
        // One behind the other, as those of a prompt are: most often where they lie, with no launch.
        if let Some(&first) = positions.first()
            && positions.iter().copied().eq(first..end)
        {
            return Ok(rows.map(|rows| rows.narrow(0, first, end - first)));
        }
        let places = index_tensor(positions.iter().map(|&position| position as i32).collect(), device);
        Ok(rows.map(|rows| rows.select(0, places.clone())))
    }

    /// Those of the first positions, as many at least.
    pub(crate) fn first(&self, end: usize, device: &Device) -> Result<Rows, MlaError> {
        self.tables(end, device, |tables| tables.rows.clone())
    }

    /// The same in one table, first all cosines: f32 `[2 · positions, dr / 2]`.
    pub(crate) fn joined(&self, end: usize, device: &Device) -> Result<Tensor<2>, MlaError> {
        self.tables(end, device, |tables| tables.joined.clone())
    }

    fn tables<T>(&self, end: usize, device: &Device, part: impl Fn(&Tables) -> T) -> Result<T, MlaError> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let known = tables.take().filter(|known| known.rows[0].dims()[0] >= end && known.joined.device() == *device);
        if let Some(known) = known {
            return Ok(part(tables.insert(known)));
        }
        let count = end.max(LEAST).next_power_of_two();
        let positions: Vec<usize> = (0..count).collect();
        let joined = Tensor::cat(self.rope.tables(self.width, &positions, device)?.to_vec(), 0);
        let rows = [0, count].map(|first| joined.clone().narrow(0, first, count));
        let new = Tables { joined, rows };
        let taken = part(&new);
        // A table that the device had no memory for would be without numbers for ever.
        *tables = check_written("rows", &new.joined).is_ok().then_some(new);
        Ok(taken)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_grows_has_the_rotations_of_each_position() {
        let (rope, width, device) = (RopeConfig { rope_theta: 1e4, yarn: None }, 8, Device::flex());
        let table = RopeTable::new(&rope, width);
        for positions in
            [vec![], vec![3, 0, 3], vec![LEAST - 1], vec![LEAST, 1], vec![5 * LEAST, 0], vec![7], vec![4, 5, 6]]
        {
            let (cos, sin) = rope.cos_sin(width, &positions).expect("legal");
            let rows = table.at(&positions, &device).expect("legal");
            let read = rows.map(|rows| rows.into_data().try_to_vec::<f32>().expect("f32"));
            assert_eq!(read, [cos, sin], "{positions:?}");
        }
    }
}
