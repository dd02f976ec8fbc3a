//! Sparse attention for Blackwell (sm_100a): rows gathered by TMA, or read as FP8 codes, products by tcgen05. The README of the operation has the schedule.

#[cfg(feature = "offline")]
mod offline;
mod pair;
mod range;
mod rows;
mod single;

use cubecl::prelude::*;

#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use self::pair::sparse_sm100_pair_kernel;
use self::single::sparse_sm100_kernel;
use super::codes::{RowPagesLaunch, row_words, words};
use super::form::Stored;
use super::launch::Call;
use super::{ScopeArgs, SparseMlaError};
use crate::cache_rows::RowFormat;
use crate::common::launch::{address_type, or_dummy, share};
use crate::ptx::tma;
use crate::tiles::form::{Form as TileForm, TILE_WIDTH};
use crate::tiles::output::COLUMNS;

/// Launches the kernel.
pub(super) fn launch(client: &Client, call: Call) -> Result<(), SparseMlaError> {
    let (args, form) = (call.args, call.form);
    let rows = |scope: &ScopeArgs, stored| {
        let rows = or_dummy(client, share(scope.rows.buffer()), scope.row_count);
        rows_map(rows, form.tile, stored, row_count(scope), args.sizes.elem)
    };
    let (first, second) = (&args.first, call.second);
    let (query, rows_a, rows_b) = (call.query_map()?, rows(first, form.rows[0])?, rows(second, form.rows[1])?);
    let [words_a, words_b] = [first, second].map(|scope| words(client, scope));
    let [pages_a, pages_b] = [first, second].map(|scope| RowPagesLaunch::of(scope.rows.format()));
    let (pages, scale) = (call.pages(), call.scale());
    let address = address_type(client, &[&words_a, &words_b, &call.out, &call.partial_out]);
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
                    words_a,
                    pages_a,
                    words_b,
                    pages_b,
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
                    first.most as u32,
                    second.most as u32,
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
        true => launch!(sparse_sm100_pair_kernel, pair::units(form)),
        false => launch!(sparse_sm100_kernel, single::units(form)),
    }
    Ok(())
}

/// Rows of a scope's map: where scales lie behind pages, as many as they fill count, too.
fn row_count(scope: &ScopeArgs) -> usize {
    match scope.rows.format() {
        RowFormat::Dense => scope.row_count,
        RowFormat::Fp8(layout) => {
            scope.row_count.div_ceil(layout.page_rows().max(1)) * layout.page_words() / layout.row_words().max(1)
        }
    }
}

/// Rows, of which a load names four and brings 64 channels of each. FP8 rows are columns of two bytes there, as their rotary channels are.
fn rows_map(
    rows: BufferArg,
    tile: TileForm,
    stored: Stored,
    count: usize,
    elem: ElemType,
) -> Result<TensorMapArg<Tiled>, SparseMlaError> {
    let BufferArg::Handle { handle } = rows else { return Err(SparseMlaError::NoKernel) };
    let width = if stored == Stored::Dense { tile.tiles * TILE_WIDTH } else { 2 * row_words(stored)[0] };
    // A map has no dimension of 0; without rows no list names one.
    let (shape, strides, boxes) = ([count.max(1), width], [width, 1], [1, TILE_WIDTH]);
    // SAFETY: there are as many rows of as many channels.
    Ok(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &boxes, elem, TensorMapSwizzle::B128) })
}
