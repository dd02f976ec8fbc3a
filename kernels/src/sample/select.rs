//! How rows are divided among cubes.

use cubecl::prelude::*;

use crate::common::launch::io_vector_size;

/// Numbers that a unit loads before it looks at the first.
pub(crate) const NUMBERS: usize = 16;
/// Units of a cube that has a part of a row. Every runtime has this many.
pub(crate) const CHUNK_UNITS: usize = 256;
/// Units of a cube that has a whole row, where the device has them and the row something for each.
const MANY_UNITS: usize = 512;
/// Units whose sums are added up together.
pub(crate) const GROUP: usize = 32;

/// Bits of a key by which the first histogram counts: sign, exponent, and the first of the mantissa.
pub(crate) const FIRST_BITS: u32 = 10;
/// Its bins.
pub(crate) const FIRST_BINS: usize = 1 << FIRST_BITS;
/// Bits of the next ones: a row is read twice more for a key, where a cube has the memory, otherwise three times.
const MANY_BITS: u32 = 11;
const FEW_BITS: u32 = 8;

/// What the code of the kernel depends on that has a whole row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Units of a cube, a multiple of [`GROUP`].
    pub units: usize,
    /// Bits of a key that a pass over the row finds out, at least.
    pub bits: u32,
}

impl Form {
    /// For rows of so many numbers.
    pub fn choose(device: &DeviceProperties, width: usize) -> Self {
        let hardware = &device.hardware;
        let fits = |form: &Self| {
            let has_units = hardware.max_units_per_cube as usize >= form.units;
            has_units && hardware.max_shared_memory_size >= form.shared_bytes()
        };
        let many = (width >= MANY_UNITS * NUMBERS).then_some(MANY_UNITS);
        let units = many.into_iter().chain([CHUNK_UNITS]);
        let mut forms = units.flat_map(|units| [MANY_BITS, FEW_BITS].map(|bits| Self { units, bits }));
        forms.find(fits).unwrap_or(Self { units: CHUNK_UNITS, bits: FEW_BITS })
    }

    /// Bins of the largest histogram.
    pub fn bins(&self) -> usize {
        FIRST_BINS.max(1 << self.bits)
    }

    /// Shared memory of a cube.
    fn shared_bytes(&self) -> usize {
        let sums = 3 * (self.units + self.units / GROUP);
        (3 * self.bins() + sums + 1) * size_of::<u32>()
    }
}

/// Numbers that a unit loads at once.
pub(crate) fn vector_size(device: &DeviceProperties, width: usize, elem: ElemType) -> usize {
    io_vector_size(device, &[width], elem.size())
}

/// Vectors of a part of a row.
pub(crate) fn chunk_vectors(vector: usize) -> usize {
    CHUNK_UNITS * (NUMBERS / vector).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 KiB are what every wgpu device has.
    #[test]
    fn the_smallest_form_fits_on_every_device() {
        let smallest = Form { units: CHUNK_UNITS, bits: FEW_BITS };
        assert!(smallest.shared_bytes() <= 16 << 10, "{}", smallest.shared_bytes());
    }
}
