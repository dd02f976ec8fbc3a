//! Sums over parts of the channels, and their sum: where rows and outputs are too few for all multiprocessors to have a tile.

use cubecl::prelude::*;

use super::VECTOR;
use crate::common::launch::{address_type, dummy};

/// Parts at most.
pub(in crate::linear) const MOST_SPLITS: usize = 8;
/// Units of a cube.
const UNITS: u32 = 128;

/// f32 `[splits, rows, outputs]`; nothing with a single split.
pub(super) struct Partial {
    buffer: BufferArg,
    sizes: [usize; 3],
}

impl Partial {
    pub(super) fn new(client: &Client, splits: usize, rows: usize, outputs: usize) -> Self {
        let len = splits * rows * outputs;
        let buffer = match splits {
            1 => dummy(client),
            // SAFETY: the buffer is made for so many numbers.
            _ => unsafe { BufferArg::from_raw_parts(client.empty(len * size_of::<f32>()), len) },
        };
        Self { buffer, sizes: [splits, rows, outputs] }
    }

    pub(super) fn arg(&self) -> BufferArg {
        crate::common::launch::share(&self.buffer)
    }

    /// Writes `out`, E `[rows, outputs]`: the sums over all parts, in their order.
    pub(super) fn add_up(self, client: &Client, out: BufferArg, elem: ElemType) {
        let [splits, rows, outputs] = self.sizes;
        let (vectors, cube) = (rows * outputs / VECTOR, CubeDim::new_1d(UNITS));
        let (cubes, address) =
            (cubecl::calculate_cube_count_elemwise(client, vectors, cube), address_type(client, &[&self.buffer]));
        add_up_kernel::launch(client, cubes, cube, address, VECTOR, self.buffer, out, vectors, splits, elem);
    }
}

/// A unit has a vector of the output.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn add_up_kernel<E: Float, V: Size>(
    partial: &[Vector<f32, V>],
    out: &mut [Vector<E, V>],
    vectors: usize,
    splits: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        // All loads before the first sum.
        let mut parts = Sequence::<Vector<f32, V>>::new();
        #[unroll]
        for split in 0..MOST_SPLITS {
            let mut part = Vector::<f32, V>::new(0.0f32);
            if split < splits {
                part = partial[split * vectors + at];
            }
            parts.push(part);
        }
        let mut sum = Vector::<f32, V>::new(0.0f32);
        #[unroll]
        for split in 0..MOST_SPLITS {
            sum += parts[split];
        }
        out[at] = Vector::cast_from(sum);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::AddressType;

    use crate::offline::{Arch, Entry, FloatKind, form};
    let (cube, elem) = (CubeDim::new_1d(UNITS), ElemType::Float(FloatKind::BF16));
    let form = form!(add_up_kernel, cube, [AddressType::U32, VECTOR, _, _, 1, 1, elem]);
    vec![Entry::of(FloatKind::BF16, "linear.sm90.add_up", form).on(|arch| arch == Arch::Sm90a)]
}
