//! A cube for a tile of up to 64 heads.

mod codes;
mod loads;
mod softmax;

use cubecl::prelude::*;

use self::codes::load_rows;
use self::loads::{load_half, load_queries, multiply};
use self::softmax::Softmax;
use super::range::{Maps, Range};
use super::rows::{self, Rows};
use crate::ptx::tcgen05::{self, Cubes};
use crate::ptx::{shared_address, tma, warp};
use crate::sparse_mla::codes::{Codes, RowPages};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::{Lists, PagedKeys};
use crate::tiles::form::STAGES;
use crate::tiles::one_cube::{BARRIERS, Barriers, COLUMNS as TENSOR_COLUMNS, Cube};
use crate::tiles::output::Results;

/// Warps: four for the softmax, then one for products, one for queries, and one for each half of a block, or two where there are FP8 rows.
const PRODUCTS: u32 = 4;
const QUERY_LOADS: u32 = 5;
const ROW_LOADS: u32 = 6;

/// Warps that load half a block.
fn loaders(form: Form) -> u32 {
    if form.fp8() { rows::WARPS / 2 } else { 1 }
}

/// Units of the cube.
pub(super) fn units(form: Form) -> u32 {
    (ROW_LOADS + 2 * loaders(form)) * 32
}

/// A cube computes every so-many-th split of all tiles, or what the plan gives it of one of each query token's tiles.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(super) fn sparse_sm100_kernel<E: Float, P: Size>(
    q_map: &TensorMap<E, Tiled>,
    rows_a: &TensorMap<E, Tiled>,
    rows_b: &TensorMap<E, Tiled>,
    words_a: &[u32],
    pages_a: RowPages,
    words_b: &[u32],
    pages_b: RowPages,
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
        barriers.init(comptime!(loaders(form)));
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
    } else if warp == QUERY_LOADS {
        load_queries::<E>(&cube, &range, &lists, q_map);
    } else if warp >= ROW_LOADS {
        if comptime!(form.fp8()) {
            let (codes_a, codes_b) = (Codes::new(words_a, pages_a), Codes::new(words_b, pages_b));
            let rows = Rows::new(maps, codes_a, codes_b, warp - ROW_LOADS, lane, form);
            load_rows(&cube, &range, &lists, &rows, &mut seen);
        } else if warp == ROW_LOADS {
            load_half(&cube, &range, &lists, &maps, &mut seen, 0u32);
        } else {
            load_half(&cube, &range, &lists, &maps, &mut seen, 1u32);
        }
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
