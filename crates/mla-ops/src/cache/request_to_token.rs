//! The map from a request's token positions to slots, on the device.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::CacheError;
use crate::MlaError;
use crate::check::Check;

const OP: &str = "RequestToToken";

/// `req_to_token`: an i32 tensor `[R, T]` whose entry (row, position) is the slot (`page * page_size + offset`) of that token.
///
/// A request owns one row. Entries past a request's length hold anything. Writes send only the new entries to the device and
/// change the tensor in place, as long as there is no handle of an earlier [`Self::tensor`]; a kept handle makes
/// the next write copy the map, and goes on showing the old one.
///
/// ```
/// use burn::tensor::Device;
/// use mla_ops::cache::RequestToToken;
///
/// let mut map = RequestToToken::new(2, 8, &Device::flex())?;
/// let row = map.take_row()?;
/// map.write(row, 0, &[12, 13, 14])?; // the slots of its first three tokens
/// assert_eq!(map.tensor().dims(), [2, 8]);
/// map.free_row(row)?;
/// # Ok::<(), mla_ops::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct RequestToToken {
    map: Tensor<2, Int>,
    /// Rows from this one on were never taken.
    fresh: u32,
    /// Those below that are free again.
    free_rows: Vec<u32>,
}

impl RequestToToken {
    /// A map with `max_requests` rows (R) of `max_tokens` entries (T), all rows free.
    ///
    /// # Errors
    /// [`MlaError::UnsupportedDevice`]; [`MlaError::Value`] for a size that i32 does not count; [`MlaError::DeviceLimit`] for a
    /// map that the device has no memory for: nothing is allocated.
    pub fn new(max_requests: u32, max_tokens: usize, device: &Device) -> Result<Self, MlaError> {
        let (check, shape) = (Check::on(OP, device)?, [max_requests as usize, max_tokens]);
        check.index_range("max_requests", shape[0])?;
        check.index_range("max_tokens", max_tokens)?;
        check.allocation("max_requests * max_tokens", DType::I32, shape)?;
        let map = match shape.contains(&0) {
            true => Tensor::empty(shape, (device, DType::I32)),
            false => Tensor::<1, Int>::zeros([shape[0] * shape[1]], (device, DType::I32)).reshape(shape),
        };
        Ok(Self { map, fresh: 0, free_rows: Vec::new() })
    }

    /// Takes a free row.
    ///
    /// # Errors
    /// [`CacheError::OutOfRequests`] if there is none.
    pub fn take_row(&mut self) -> Result<u32, CacheError> {
        if let Some(row) = self.free_rows.pop() {
            return Ok(row);
        }
        let (row, max) = (self.fresh, self.max_requests());
        if row as usize >= max {
            return Err(CacheError::OutOfRequests { max });
        }
        self.fresh += 1;
        Ok(row)
    }

    /// Gives a row back.
    ///
    /// # Errors
    /// [`MlaError::Value`] if the row does not exist or is free already.
    pub fn free_row(&mut self, row: u32) -> Result<(), CacheError> {
        self.check_row(row)?;
        self.free_rows.push(row);
        Ok(())
    }

    /// Writes the slots of the tokens from position `start` on.
    ///
    /// # Errors
    /// [`MlaError::Value`] if the row is not taken or the slots do not fit into it.
    pub fn write(&mut self, row: u32, start: usize, slots: &[i32]) -> Result<(), CacheError> {
        self.check_row(row)?;
        let end = start.saturating_add(slots.len());
        self.check_end(end)?;
        if slots.is_empty() {
            return Ok(());
        }
        let device = self.map.device();
        let data = TensorData::new(slots.to_vec(), [1, slots.len()]);
        let slots = Tensor::from_data(data, (&device, DType::I32));
        self.assign(row, start..end, slots);
        Ok(())
    }

    /// The map, i32 `[R, T]`: another handle of the same buffer.
    pub fn tensor(&self) -> Tensor<2, Int> {
        self.map.clone()
    }

    /// Rows there are (R).
    pub fn max_requests(&self) -> usize {
        self.map.dims()[0]
    }

    /// Entries of a row (T).
    pub fn max_tokens(&self) -> usize {
        self.map.dims()[1]
    }

    fn assign(&mut self, row: u32, positions: std::ops::Range<usize>, slots: Tensor<2, Int>) {
        let row = row as usize;
        // `inplace` moves the tensor out of `self`, so that its buffer has one owner during the assignment.
        self.map.inplace(|map| map.slice_assign([row..row + 1, positions], slots));
    }

    fn check_row(&self, row: u32) -> Result<(), MlaError> {
        if row < self.fresh && !self.free_rows.contains(&row) {
            return Ok(());
        }
        Err(MlaError::Value {
            op: OP,
            argument: "row",
            actual: row.to_string(),
            expected: format!("a taken row below {}", self.max_requests()),
        })
    }

    fn check_end(&self, end: usize) -> Result<(), MlaError> {
        if end <= self.max_tokens() {
            return Ok(());
        }
        Err(MlaError::Value {
            op: OP,
            argument: "end of the range",
            actual: end.to_string(),
            expected: format!("at most {} entries in a row", self.max_tokens()),
        })
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn values(map: &RequestToToken) -> Vec<i32> {
        map.tensor().into_data().try_into_vec().unwrap()
    }

    fn address(map: &RequestToToken) -> *const u8 {
        let primitive = map.tensor().try_into_primitive::<Flex>().unwrap();
        primitive.bytes().as_ptr()
    }

    #[test]
    fn writes_land_in_place() {
        let mut map = RequestToToken::new(3, 4, &Device::flex()).unwrap();
        let before = address(&map);
        let (a, b) = (map.take_row().unwrap(), map.take_row().unwrap());
        map.write(a, 0, &[7, 8, 9]).unwrap();
        map.write(a, 3, &[5]).unwrap();
        map.write(b, 0, &[7, 8]).unwrap();
        map.write(b, 1, &[]).unwrap();
        assert_eq!(values(&map), [7, 8, 9, 5, 7, 8, 0, 0, 0, 0, 0, 0]);
        assert_eq!(address(&map), before);
        assert_eq!(map.tensor().dtype(), DType::I32);
    }

    #[test]
    fn rows_are_bounded_and_reused() {
        let mut map = RequestToToken::new(2, 4, &Device::flex()).unwrap();
        let (a, b) = (map.take_row().unwrap(), map.take_row().unwrap());
        assert_eq!((a, b), (0, 1));
        assert_eq!(map.take_row(), Err(CacheError::OutOfRequests { max: 2 }));
        map.free_row(a).unwrap();
        assert_eq!(map.take_row(), Ok(a));
    }

    #[test]
    fn writes_outside_are_errors() {
        let mut map = RequestToToken::new(2, 4, &Device::flex()).unwrap();
        let row = map.take_row().unwrap();
        assert!(map.write(row, 3, &[1, 2]).is_err());
        assert!(map.write(row, usize::MAX, &[1]).is_err());
        assert!(map.write(1, 0, &[1]).is_err(), "row 1 is free");
        assert!(map.write(2, 0, &[1]).is_err());
        assert!(map.free_row(1).is_err());
        assert_eq!(values(&map), [0; 8]);
    }
}
