//! Boxes of tensors as rows of bytes (PTX ISA, "Tensors": bounding box, out-of-boundary access, swizzling).
use super::global::Global;
use crate::error::Fault;
use crate::tensor::{TensorElem, TensorMap, TensorSwizzle};

/// A row of a box: neighbours in global memory, and in shared memory but for the swizzle.
pub(super) struct Row {
    /// Where it begins in shared memory, before the swizzle.
    shared: u64,
    swizzle: TensorSwizzle,
    /// All bytes of the row in shared memory.
    pub bytes: u64,
    /// Which of them lie in the tensor, and where that is in global memory.
    inside: std::ops::Range<u64>,
    global: u64,
    /// What the others are.
    fill: u8,
}

impl Row {
    /// Bytes without a tensor.
    pub fn whole(shared: u64, global: u64, bytes: u64) -> Self {
        Self { shared, swizzle: TensorSwizzle::None, bytes, inside: 0..bytes, global, fill: 0 }
    }

    /// The addresses of its units of 16 bytes.
    pub fn chunks(&self) -> impl Iterator<Item = u64> {
        let (shared, swizzle) = (self.shared, self.swizzle);
        (0..self.bytes).step_by(16).map(move |at| swizzle.place(shared + at))
    }

    /// What comes to shared memory.
    pub fn read(&self, global: &Global) -> Result<Vec<u8>, Fault> {
        let mut bytes = vec![self.fill; self.bytes as usize];
        if !self.inside.is_empty() {
            let found = global.copy_from(self.global, self.inside.end - self.inside.start)?;
            bytes[self.inside.start as usize..self.inside.end as usize].copy_from_slice(&found);
        }
        Ok(bytes)
    }

    /// Writes what lies in the tensor, or adds to it.
    pub fn write(&self, global: &Global, bytes: &[u8], add: Option<TensorElem>) -> Result<(), Fault> {
        if self.inside.is_empty() {
            return Ok(());
        }
        let inside = &bytes[self.inside.start as usize..self.inside.end as usize];
        let Some(elem) = add else { return global.copy_to(self.global, inside) };
        // An addition is atomic: it conflicts with no other.
        let global = global.memory;
        let mut sum = global.copy_from(self.global, inside.len() as u64)?;
        let size = elem.bytes() as usize;
        for (old, new) in sum.chunks_exact_mut(size).zip(inside.chunks_exact(size)) {
            add_to(elem, old, new)?;
        }
        global.copy_to(self.global, &sum)
    }
}

/// Adds integers and f32.
fn add_to(elem: TensorElem, old: &mut [u8], new: &[u8]) -> Result<(), Fault> {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let (x, y) = (number(old), number(new));
    let sum = match elem {
        TensorElem::Int(4 | 8) => x.wrapping_add(y),
        TensorElem::Float(4) => u64::from((f32::from_bits(x as u32) + f32::from_bits(y as u32)).to_bits()),
        _ => return Err(Fault::Bulk { problem: format!("adding elements like {elem:?}") }),
    };
    let count = old.len();
    old.copy_from_slice(&sum.to_le_bytes()[..count]);
    Ok(())
}

/// The rows of the box at these coordinates, which begins at an address of shared memory. `gather`: one row at each of
/// the last four coordinates.
pub(super) fn rows(map: &TensorMap, coords: &[i64], gather: bool, shared: u64) -> Vec<Row> {
    let rank = map.dims.len();
    let taken: Vec<u64> = (1..rank).map(|dim| map.taken(dim)).collect();
    let count = if gather { 4 } else { taken.iter().product() };
    let size = map.elem.bytes();
    let first = coords[0];
    let row = |index: u64| {
        let (mut left, mut inside, mut global) = (index, true, map.address);
        for dim in 1..rank {
            let position = if gather {
                coords[1 + index as usize]
            } else {
                let extent = taken[dim - 1];
                let position = coords[dim] + (left % extent * u64::from(map.steps[dim])) as i64;
                left /= extent;
                position
            };
            inside &= (0..map.dims[dim] as i64).contains(&position);
            global = global.wrapping_add((position as u64).wrapping_mul(map.strides[dim - 1]));
        }
        let last = (map.dims[0] as i64 - first).clamp(0, i64::from(map.boxes[0])) as u64;
        let begin = ((-first).max(0) as u64).min(last);
        let inside = if inside { begin * size..last * size } else { 0..0 };
        Row {
            shared: shared + index * map.pitch(),
            swizzle: map.swizzle,
            bytes: map.row_bytes(),
            global: global.wrapping_add((first.max(0) as u64) * size),
            inside,
            fill: if map.fill_nan { 0xff } else { 0 },
        }
    };
    (0..count).map(row).collect()
}
