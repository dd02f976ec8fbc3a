//! Sparse attention for Blackwell (sm_100a): rows gathered by TMA, products by tcgen05. The README of the operation has the schedule.

mod gather;
#[cfg(feature = "offline")]
mod offline;
mod range;
mod softmax;

use cubecl::prelude::*;

use self::gather::{Maps, load_half};
#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use self::range::{Range, load_queries, multiply};
use self::softmax::Softmax;
use super::form::Form;
use super::launch::Call;
use super::work::{Lists, PagedKeys};
use super::{ScopeArgs, SparseMlaError};
use crate::common::launch::{address_type, or_dummy, share};
use crate::ptx::tcgen05::{self, Cubes};
use crate::ptx::{shared_address, tma, warp};
use crate::tiles::form::{Form as TileForm, STAGES, TILE_WIDTH};
use crate::tiles::one_cube::{BARRIERS, Barriers, COLUMNS as TENSOR_COLUMNS, Cube};
use crate::tiles::output::{COLUMNS, Results};

/// Warps: four for the softmax, then one each for products, both halves of a block, and queries.
const PRODUCTS: u32 = 4;
const LEFT_ROWS: u32 = 5;
const RIGHT_ROWS: u32 = 6;
const QUERY_LOADS: u32 = 7;
/// Units of the cube.
const UNITS: u32 = 8 * 32;

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
    // SAFETY: the buffers have the sizes that the arguments state; rows outside of theirs are zeros.
    unsafe {
        sparse_sm100_kernel::launch_unchecked(
            client,
            grid.cubes(),
            CubeDim::new_1d(UNITS),
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

/// A cube computes every so-many-th split of all tiles, or what the plan gives it of one of each query token's tiles.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn sparse_sm100_kernel<E: Float, P: Size>(
    q_map: &TensorMap<E, Tiled>,
    rows_a: &TensorMap<E, Tiled>,
    rows_b: &TensorMap<E, Tiled>,
    slots_a: &[i32],
    lengths_a: &[i32],
    slots_b: &[i32],
    lengths_b: &[i32],
    plan_items: &[i32],
    cube_ptr: &[i32],
    split_ptr: &[i32],
    sink: &[f32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    out: &mut [Vector<E, P>],
    lse: &mut [f32],
    heads: u32,
    most_a: u32,
    most_b: u32,
    head_tiles: u32,
    splits: u32,
    items: u32,
    pages: PagedKeys,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let tile_bytes = comptime!(form.tile.stage_bytes() as usize);
    let keys = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES as usize * tile_bytes / 4), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(tile_bytes / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(BARRIERS, 128usize);
    // A bit for each row of a half.
    let mut seen = Shared::<[u32]>::new_aligned_slice(comptime!(2 * STAGES as usize), 16usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let (keys_at, query_at) = (shared_address(&keys), shared_address(&query));
    let barriers = Barriers::new(shared_address(&barriers));
    let (mut first, mut end, mut step) = (CUBE_POS as u32, items, CUBE_COUNT as u32);
    if comptime!(form.planned()) {
        first = warp::uniform(cube_ptr[CUBE_POS_Y as usize] as u32);
        end = warp::uniform(cube_ptr[CUBE_POS_Y as usize + 1] as u32);
        step = 1u32;
    }
    let warp = warp::uniform(UNIT_POS / 32);
    let lane = UNIT_POS % 32;
    let maps = Maps { a: tma::tensor_map_address::<E, Tiled>(rows_a), b: tma::tensor_map_address::<E, Tiled>(rows_b) };
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        tma::prefetch(maps.a);
        if comptime!(form.second) {
            tma::prefetch(maps.b);
        }
        barriers.init();
    }
    // A cube without work exits early.
    if first >= end {
        terminate!();
    }
    if warp == QUERY_LOADS {
        tcgen05::allocate(shared_address(&columns), TENSOR_COLUMNS, Cubes::One);
    }
    sync_cube();
    let tensor = columns[0];
    let cube = Cube { keys_at, query_at, tensor, barriers, warp, lane };
    let range = Range { first, end, step, heads, form };
    let lists = Lists::new(
        slots_a, lengths_a, slots_b, lengths_b, most_a, most_b, head_tiles, splits, pages, plan_items, split_ptr, form,
    );
    if warp == PRODUCTS {
        if warp::elect() {
            multiply(&cube, &range, &lists);
        }
    } else if warp == LEFT_ROWS {
        load_half(&cube, &range, &lists, &maps, &mut seen, 0u32);
    } else if warp == RIGHT_ROWS {
        load_half(&cube, &range, &lists, &maps, &mut seen, 1u32);
    } else if warp == QUERY_LOADS {
        load_queries::<E>(&cube, &range, &lists, q_map);
    } else {
        let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, heads);
        let mut softmax = Softmax::new(&cube, scale, empty_lse);
        softmax.run::<E, P>(&cube, &range, &lists, sink, &seen, &mut results);
    }
    tcgen05::fence_before();
    sync_cube();
    if warp == QUERY_LOADS {
        tcgen05::deallocate(tensor, TENSOR_COLUMNS, Cubes::One);
    }
}
