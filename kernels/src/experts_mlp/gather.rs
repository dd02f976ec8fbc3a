//! Rows of tokens in the order of the experts.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, address_type, is_row};

/// Vectors of a unit, which loads all before it writes the first: it would wait for each otherwise. So few that the cache has room for a
/// slice of thousands of rows.
const AHEAD: usize = 2;

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
    let (cube_dim, vector_size) = RowGrid::cube(client.properties(), &[width], elem.size());
    let slices = (width / vector_size).div_ceil(AHEAD * cube_dim.x as usize);
    let rows = pairs.next_multiple_of(cube_dim.y as usize);
    let cube_count = RowGrid::cubes(client, rows * slices, cube_dim);
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

/// Some units have a slice of a row. All rows' first slices come first: a row that several pairs want is still in the cache then.
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
    let cubes_of_slice = pairs.div_ceil(CUBE_DIM_Y as usize);
    let row = CUBE_POS % cubes_of_slice * CUBE_DIM_Y as usize + UNIT_POS_Y as usize;
    let column = CUBE_POS / cubes_of_slice * AHEAD * CUBE_DIM_X as usize + UNIT_POS_X as usize;
    if row < pairs && column < vectors {
        let pair = order[row];
        if is_row(pair, pairs) {
            let from = usize::cast_from(pair) / top_k * vectors;
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
