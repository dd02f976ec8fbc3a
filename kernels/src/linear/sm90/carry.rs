//! Channels of x that are copied behind the products of their head.

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::VECTOR;
use crate::common::launch::{RowGrid, grid_row};

/// From E `[rows, inputs + carried]` to E `[rows, outputs + carried]`: the last `carried` channels.
pub(super) fn launch(
    client: &Client,
    x: BufferArg,
    out: BufferArg,
    [rows, inputs, outputs, carried]: [usize; 4],
    address: AddressType,
    elem: ElemType,
) {
    let RowGrid { cube_count, cube_dim, .. } = RowGrid::new(client, rows, &[carried], elem.size());
    let [inputs, outputs, carried] = [inputs, outputs, carried].map(|channels| channels / VECTOR);
    carry_kernel::launch(client, cube_count, cube_dim, address, VECTOR, x, out, rows, inputs, outputs, carried, elem);
}

/// Some units have a row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn carry_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    out: &mut [Vector<E, V>],
    rows: usize,
    inputs: usize,
    outputs: usize,
    carried: usize,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    if row < rows {
        let mut column = UNIT_POS_X as usize;
        while column < carried {
            out[row * (outputs + carried) + outputs + column] = x[row * (inputs + carried) + inputs + column];
            column += CUBE_DIM_X as usize;
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FloatKind, form};
    let (cube, elem) = (CubeDim::new_2d(8, 16), ElemType::Float(FloatKind::BF16));
    let form = form!(carry_kernel, cube, [AddressType::U32, VECTOR, _, _, 1, 1, 1, 1, elem]);
    vec![Entry::of(FloatKind::BF16, "linear.sm90.carry", form).on(|arch| arch == Arch::Sm90a)]
}
