//! One cube for 64 query rows: products of 64 rows, whose accumulators share columns of tensor memory two by two.

mod items;
mod loads;
mod softmax;

use cubecl::prelude::*;

use self::items::{Items, multiply};
use self::loads::{load_keys, load_queries};
use self::softmax::Softmax;
use crate::ptx::tcgen05::{self, Cubes};
use crate::ptx::{shared_address, tma, warp};
use crate::tiles::form::{Form, STAGES};
use crate::tiles::loader::{PagedKeys, Plan, Tile};
use crate::tiles::one_cube::{BARRIERS, Barriers, COLUMNS, Cube};
use crate::tiles::output::Results;

/// Warps: four for the softmax, then one each for products, keys and queries.
const PRODUCTS: u32 = 4;
const KEY_LOADS: u32 = 5;
const QUERY_LOADS: u32 = 6;
/// Units of the cube.
pub(super) const UNITS: u32 = 7 * 32;

/// Cube `(0, c)` computes all query rows, up to 64, for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(super) fn decode_sm100_kernel<E: Float, P: Size>(
    kv_map: &TensorMap<E, Tiled>,
    q_map: &TensorMap<E, Tiled>,
    page_table: &[i32],
    seq_lens: &[i32],
    plan_items: &[i32],
    cube_ptr: &[i32],
    split_ptr: &[i32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    out: &mut [Vector<E, P>],
    lse: &mut [f32],
    query_len: u32,
    heads: u32,
    max_pages: u32,
    page_shift: u32,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let mut keys = Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * form.stage_bytes() / 4) as usize), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(form.stage_bytes() as usize / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(BARRIERS, 128usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let keys_at = shared_address(&keys);
    let query_at = shared_address(&query);
    let barriers = Barriers::new(shared_address(&barriers));
    let first = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    let warp = warp::uniform(UNIT_POS / 32);
    let lane = UNIT_POS % 32;
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        barriers.init(1u32);
    }
    // Without items the cube exits early.
    if first >= end {
        terminate!();
    }
    if warp == QUERY_LOADS {
        tcgen05::allocate(shared_address(&columns), COLUMNS, Cubes::One);
    }
    sync_cube();
    let tensor = columns[0];

    let rows = query_len * heads;
    let causal_tile = Tile { query_len, heads, last_row: rows - 1, causal: form.causal };
    let tile = Tile { query_len, heads, last_row: rows - 1, causal: false };
    let cube = Cube { keys_at, query_at, tensor, barriers, warp, lane };
    let items = Items { rows, tile, first, end };
    let plan = Plan::new(plan_items, split_ptr, seq_lens, page_table);
    if warp == PRODUCTS {
        if warp::elect() {
            multiply(&cube, &items, &plan, form);
        }
    } else if warp == KEY_LOADS {
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        load_keys(&cube, &items, &plan, paged, form);
    } else if warp == QUERY_LOADS {
        load_queries::<E>(&cube, &items, &plan, q_map, form);
    } else {
        let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, rows);
        let mut softmax = Softmax::new(&cube, causal_tile, scale, empty_lse, form);
        softmax.run::<E, P>(&cube, &items, &plan, &mut keys, &mut results);
    }
    tcgen05::fence_before();
    sync_cube();
    if warp == QUERY_LOADS {
        tcgen05::deallocate(tensor, COLUMNS, Cubes::One);
    }
}
