//! Sums over parts of the channels, and their sum: where rows and outputs are too few for all multiprocessors to have a tile. Or of
//! the terms of weights in f32.

use cubecl::prelude::*;

use super::VECTOR;
use crate::common::launch::{address_type, dummy};

/// Parts at most.
pub(in crate::linear) const MOST_SPLITS: usize = 8;
/// Units of a cube.
const UNITS: u32 = 128;

/// f32 `[splits, rows, terms, outputs]`; nothing with one of one.
pub(super) struct Partial {
    buffer: BufferArg,
    sizes: [usize; 4],
}

impl Partial {
    pub(super) fn new(client: &Client, [splits, rows, terms, outputs]: [usize; 4]) -> Self {
        let len = splits * rows * terms * outputs;
        let buffer = match splits * terms {
            1 => dummy(client),
            // SAFETY: the buffer is made for so many numbers.
            _ => unsafe { BufferArg::from_raw_parts(client.empty(len * size_of::<f32>()), len) },
        };
        Self { buffer, sizes: [splits, rows, terms, outputs] }
    }

    /// Whether there is anything to add up.
    pub(super) fn is_needed(&self) -> bool {
        let [splits, _, terms, _] = self.sizes;
        splits * terms > 1
    }

    pub(super) fn arg(&self) -> BufferArg {
        crate::common::launch::share(&self.buffer)
    }

    /// Writes `out`, E `[rows, outputs]`: the sums over all parts, in their order.
    pub(super) fn add_up(self, client: &Client, out: BufferArg, elem: ElemType) {
        let [splits, rows, terms, outputs] = self.sizes;
        let (vectors, cube) = (rows * outputs / VECTOR, CubeDim::new_1d(UNITS));
        let (cubes, address) =
            (cubecl::calculate_cube_count_elemwise(client, vectors, cube), address_type(client, &[&self.buffer]));
        add_up_kernel::launch(
            client,
            cubes,
            cube,
            address,
            VECTOR,
            self.buffer,
            out,
            vectors,
            outputs / VECTOR,
            splits,
            terms,
            elem,
        );
    }
}

/// A unit has a vector of the output.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn add_up_kernel<E: Float, V: Size>(
    partial: &[Vector<f32, V>],
    out: &mut [Vector<E, V>],
    vectors: usize,
    row_vectors: usize,
    splits: usize,
    #[comptime] terms: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let mut first = at;
        if comptime!(terms > 1) {
            first += at / row_vectors * row_vectors * comptime!(terms - 1);
        }
        // All loads of a term before the first sum.
        let mut sum = Vector::<f32, V>::new(0.0f32);
        #[unroll]
        for term in 0..terms {
            // The least first.
            let from = first + row_vectors * comptime!(terms - 1 - term);
            let mut parts = Sequence::<Vector<f32, V>>::new();
            #[unroll]
            for split in 0..MOST_SPLITS {
                let mut part = Vector::<f32, V>::new(0.0f32);
                if split < splits {
                    part = partial[split * vectors * terms + from];
                }
                parts.push(part);
            }
            #[unroll]
            for split in 0..MOST_SPLITS {
                sum += parts[split];
            }
        }
        out[at] = Vector::cast_from(sum);
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::AddressType;

    use crate::offline::{Arch, Entry, FloatKind, form};
    let cube = CubeDim::new_1d(UNITS);
    let entry = |name, kind, terms| {
        let elem = ElemType::Float(kind);
        let form = form!(add_up_kernel, cube, [AddressType::U32, VECTOR, _, _, 1, 1, 1, terms, elem]);
        Entry::of(kind, name, form).on(|arch| arch == Arch::Sm90a)
    };
    vec![
        entry("linear.sm90.add_up", FloatKind::BF16, 1),
        entry("linear.sm90.add_up.wide", FloatKind::F32, super::wide::TERMS),
    ]
}
