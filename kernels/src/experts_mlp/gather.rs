//! Rows of tokens in the order of the experts.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, address_type, grid_row, is_row};

/// Vectors that a unit loads before it writes the first: it would wait for each otherwise.
const AHEAD: usize = 4;

/// E `[pairs, width]`: for each pair of the `order`, which has `top_k` pairs for each row of x, E `[pairs / top_k, width]`, that
/// row. Where the order has no pair, nothing is written. There is a pair, and a channel.
pub(crate) fn launch(
    client: &Client,
    x: BufferArg,
    order: BufferArg,
    [pairs, top_k, width]: [usize; 3],
    elem: ElemType,
) -> BufferArg {
    let sorted = client.empty(pairs * width * elem.size());
    // SAFETY: the buffer has been made for so many elements.
    let arg = || unsafe { BufferArg::from_raw_parts(sorted.clone(), pairs * width) };
    let RowGrid { cube_count, cube_dim, vector_size } = RowGrid::new(client, pairs, &[width], elem.size());
    let (out, address) = (arg(), address_type(client, &[&x, &arg()]));
    gather_kernel::launch(
        client,
        cube_count,
        cube_dim,
        address,
        vector_size,
        x,
        order,
        out,
        pairs,
        width / vector_size,
        top_k,
        elem,
    );
    arg()
}

/// Some units have a row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn gather_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    order: &[i32],
    sorted: &mut [Vector<E, N>],
    pairs: usize,
    vectors: usize,
    top_k: usize,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    if row < pairs {
        let pair = order[row];
        if is_row(pair, pairs) {
            let from = usize::cast_from(pair) / top_k * vectors;
            let mut column = UNIT_POS_X as usize;
            while column < vectors {
                let mut loaded = Sequence::<Vector<E, N>>::new();
                #[unroll]
                for i in 0..AHEAD {
                    // Of columns past the last one that one, which is there.
                    loaded.push(x[from + min(column + i * CUBE_DIM_X as usize, vectors - 1)]);
                }
                #[unroll]
                for i in 0..AHEAD {
                    let to = column + i * CUBE_DIM_X as usize;
                    if to < vectors {
                        sorted[row * vectors + to] = loaded[i];
                    }
                }
                column += AHEAD * CUBE_DIM_X as usize;
            }
        }
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::AddressType;

    use crate::offline::{Entry, FLOATS, form};
    let entry = |kind| {
        let elem = ElemType::Float(kind);
        let cube = CubeDim::new_1d(RowGrid::UNITS as u32);
        let form = form!(gather_kernel, cube, [AddressType::U32, 16 / elem.size(), _, _, _, 1, 1, 1, elem]);
        Entry::of(kind, "gather_rows", form)
    };
    FLOATS.into_iter().map(entry).collect()
}
