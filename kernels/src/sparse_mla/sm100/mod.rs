//! Sparse attention for Blackwell (sm_100a): rows gathered by TMA, products by tcgen05. The README of the operation has the schedule.

#[cfg(feature = "offline")]
mod offline;
mod pair;
mod range;
mod single;

use cubecl::prelude::*;

#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use self::pair::sparse_sm100_pair_kernel;
use self::single::sparse_sm100_kernel;
use super::launch::Call;
use super::{ScopeArgs, SparseMlaError};
use crate::common::launch::{address_type, or_dummy, share};
use crate::ptx::tma;
use crate::tiles::form::{Form as TileForm, TILE_WIDTH};
use crate::tiles::output::COLUMNS;

/// Launches the kernel.
pub(super) fn launch(client: &Client, call: Call) -> Result<(), SparseMlaError> {
    let (args, form) = (call.args, call.form);
    let rows = |scope: &ScopeArgs| {
        let rows = or_dummy(client, share(scope.rows.buffer()), scope.row_count);
        rows_map(rows, form.tile, scope.row_count, args.sizes.elem)
    };
    let (query, rows_a, rows_b) = (call.query_map()?, rows(&args.first)?, rows(call.second)?);
    let (pages, scale) = (call.pages(), call.scale());
    let address = address_type(client, &[&call.out, &call.partial_out]);
    let ([slots_a, slots_b], [lengths_a, lengths_b]) = (call.slots, call.lengths);
    let ([items, cube_ptr, split_ptr], grid) = (call.plan, call.grid);
    macro_rules! launch {
        ($kernel:ident, $units:expr) => {
            // SAFETY: the buffers have the sizes that the arguments state; rows outside of theirs are zeros.
            unsafe {
                $kernel::launch_unchecked(
                    client,
                    grid.cubes(),
                    CubeDim::new_1d($units),
                    address,
                    COLUMNS,
                    query,
                    rows_a,
                    rows_b,
                    slots_a,
                    lengths_a,
                    slots_b,
                    lengths_b,
                    items,
                    cube_ptr,
                    split_ptr,
                    call.sink,
                    call.partial_out,
                    call.partial_lse,
                    call.out,
                    call.lse,
                    args.sizes.heads as u32,
                    args.first.most as u32,
                    call.second.most as u32,
                    grid.head_tiles,
                    grid.splits,
                    grid.items,
                    pages,
                    scale,
                    f32::NEG_INFINITY.to_bits(),
                    form,
                    args.sizes.elem,
                );
            }
        };
    }
    match form.pair {
        true => launch!(sparse_sm100_pair_kernel, pair::UNITS),
        false => launch!(sparse_sm100_kernel, single::UNITS),
    }
    Ok(())
}

/// Rows, of which a load names four and brings 64 channels of each.
fn rows_map(
    rows: BufferArg,
    tile: TileForm,
    count: usize,
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, SparseMlaError> {
    let BufferArg::Handle { handle } = rows else { return Err(SparseMlaError::NoKernel) };
    let width = tile.tiles * TILE_WIDTH;
    // A map has no dimension of 0; without rows no list names one.
    let (shape, strides, boxes) = ([count.max(1), width], [width, 1], [1, TILE_WIDTH]);
    // SAFETY: there are as many rows of as many channels.
    Ok(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &boxes, elem, TensorMapSwizzle::B128) })
}
