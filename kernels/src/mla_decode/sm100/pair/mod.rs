//! A pair of cubes for 128 query rows: products of 128 rows, of which each cube has 64, over blocks of 128 keys.

mod come;
mod loads;
mod output;
mod places;
mod products;
mod query;
mod softmax;
mod walk;

use cubecl::prelude::*;

use self::come::pass_chunks;
use self::loads::load_chunks;
use self::places::{BARRIERS, Places, SLOTS, barriers, has_key_tile, query_tiles};
use self::products::Products;
use self::query::load_and_write;
use self::softmax::Softmax;
use self::walk::Range;
use crate::ptx::tcgen05::{self, Cubes};
use crate::ptx::{barrier, shared_address, tma, warp};
use crate::tiles::form::{Form, ROWS, TILE_BYTES};
use crate::tiles::loader::{PagedKeys, Plan, Tile};
use crate::tiles::output::Results;
use crate::tiles::pair::{CHUNK_BYTES, COLUMNS as TENSOR_COLUMNS, Cube, WEIGHT_WORDS};

/// Warps: four for the softmax, four for queries and output, then one each for products (of the first cube alone), chunks, and chunks that have come.
const QUERIES: u32 = 4;
const PRODUCTS: u32 = 8;
const LOADS: u32 = 9;
const COME: u32 = 10;
/// Units of a cube.
pub(super) const UNITS: u32 = 11 * 32;

/// Cubes `(2 * t, c)` and `(2 * t + 1, c)` compute tiles `2 * t` and `2 * t + 1` of the query rows for the items of cube `c` of
/// the plan.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = CubeDim::new_3d(2, 1, 1)
)]
pub(super) fn decode_sm100_pair_kernel<E: Float, P: Size>(
    kv_map: &TensorMap<E, Tiled>,
    q_map: &TensorMap<E, Tiled>,
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
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
    let mut chunks =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!((SLOTS * CHUNK_BYTES / 16) as usize), 1024usize);
    let key_tile = Shared::<[u32]>::new_aligned_slice(
        comptime!(if has_key_tile(form) { TILE_BYTES as usize / 4 } else { 32 }),
        1024usize,
    );
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(query_tiles(form) * TILE_BYTES as usize / 4), 1024usize);
    // Two tiles of 64 keys
    let mut weights = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(WEIGHT_WORDS / 4), 1024usize);
    // What the units of a row tell each other, for each of two times.
    let mut told = Shared::<[f32]>::new_aligned_slice(256usize, 128usize);
    let mut factors = Shared::<[f32]>::new_aligned_slice(comptime!(2 * ROWS), 128usize);
    let barrier_words = Shared::<[u64]>::new_aligned_slice(BARRIERS, 128usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let (chunks_at, query_at, weights_at) = (shared_address(&chunks), shared_address(&query), shared_address(&weights));
    let barriers = barriers(shared_address(&barrier_words));
    let first = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    let (warp, lane, rank) = (warp::uniform(UNIT_POS / 32), UNIT_POS % 32, CUBE_POS_CLUSTER_X);
    let places = Places::new(rank, shared_address(&key_tile), &barriers);
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        places.init(&barriers);
    }
    // Without items both cubes of the pair exit early.
    if first >= end {
        terminate!();
    }
    if warp == QUERIES {
        tcgen05::allocate(shared_address(&columns), TENSOR_COLUMNS, Cubes::Pair);
    }
    barrier::sync_cluster();
    let tensor = columns[0];

    let rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(ROWS as u32);
    let last_row = (CUBE_POS_X | 1) * comptime!(ROWS as u32) + comptime!(ROWS as u32 - 1);
    let tile = Tile { query_len, heads, last_row, causal: form.causal };
    let cube = Cube { chunks_at, query_at, weights_at, tensor, barriers, warp, lane };
    let range = Range { rows, tile_row, tile, first, end };
    let plan = Plan::new(items, split_ptr, seq_lens, page_table);
    if warp == PRODUCTS {
        if rank == 0 && warp::elect() {
            let mut products = Products::new(form);
            products.multiply(&cube, &places, &range, &plan);
        }
    } else if warp == LOADS {
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        load_chunks::<E>(&cube, &places, &range, &plan, paged, q_map, form);
    } else if warp == COME {
        pass_chunks(&cube, &places, &range, &plan, &mut chunks, form);
    } else if warp >= QUERIES {
        let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, rows);
        load_and_write::<E, P>(&cube, &places, &range, &plan, q_map, &chunks, &factors, &mut results, form);
    } else {
        let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, rows);
        let mut softmax = Softmax::new(&cube, &range, scale, empty_lse, form);
        softmax.run::<E, P>(&cube, &places, &range, &plan, &mut weights, &mut told, &mut factors, &mut results);
    }
    // Nobody leaves while the other cube may arrive here, or products read from here.
    tcgen05::fence_before();
    barrier::sync_cluster();
    if warp == QUERIES {
        tcgen05::deallocate(tensor, TENSOR_COLUMNS, Cubes::Pair);
    }
}
