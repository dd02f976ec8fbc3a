//! A pair of cubes for 128 heads of a token: products of 128 rows, of which each cube has 64, over blocks of 128 entries.

mod codes;
mod loads;
mod phases;
mod softmax;

use cubecl::prelude::*;

use self::codes::load_codes;
use self::loads::{load_chunks, load_queries, multiply, pass_chunks};
use self::softmax::Softmax;
use super::range::{Maps, Range};
use super::rows::{self, Rows};
use crate::ptx::tcgen05::{self, Cubes};
use crate::ptx::{barrier, mbarrier, shared_address, tma, warp};
use crate::sparse_mla::codes::{Codes, RowPages};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::{Lists, PagedKeys};
use crate::tiles::output::Results;
use crate::tiles::pair::{BARRIERS, Barriers, CHUNK_BYTES, COLUMNS as TENSOR_COLUMNS, Cube, RING, WEIGHT_WORDS};

/// Warps: four for the softmax, then one each for products (of the first cube alone), chunks that have come, and queries, and some for the
/// rows of a chunk.
const PRODUCTS: u32 = 4;
const ROWS_COME: u32 = 5;
const QUERY_LOADS: u32 = 6;
const ROW_LOADS: u32 = 7;

/// Warps that load the rows of a chunk.
fn loaders(form: Form) -> u32 {
    if form.fp8() { rows::WARPS } else { 2 }
}

/// Units of a cube.
pub(super) fn units(form: Form) -> u32 {
    (ROW_LOADS + loaders(form)) * 32
}

/// Blocks of which shared memory has what their entries are: when it is used anew, the softmax has weighed that block.
const ENTRY_BLOCKS: u32 = 4;

/// What a cube knows of the entries of blocks. Each cube reads all for itself.
#[derive(CubeType)]
struct Entries {
    /// Bit `i / 4` of word `i % 4` says whether entry `i` is a row; where there are FP8 rows, of entry `i` of half `h` bit `16 h + i % 16` of
    /// word `i / 16`.
    seen: Shared<[Vector<u32, Const<4>>]>,
    /// Barriers that say that `seen` is there.
    published: u32,
}

/// Cubes `2 * i` and `2 * i + 1` compute the same blocks of tiles `2 * t` and `2 * t + 1` of a token: every so-many-th split of all, or
/// what the plan gives them.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = CubeDim::new_3d(2, 1, 1)
)]
pub(super) fn sparse_sm100_pair_kernel<E: Float, P: Size>(
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
    let chunks = Shared::<[u32]>::new_aligned_slice(comptime!((RING * CHUNK_BYTES / 4) as usize), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(form.tile.stage_bytes() as usize / 4), 1024usize);
    // Two tiles of 64 keys
    let mut weights = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(WEIGHT_WORDS / 4), 1024usize);
    // What the units of a row tell each other, for each of two times.
    let mut told = Shared::<[f32]>::new_aligned_slice(256usize, 128usize);
    let seen = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(ENTRY_BLOCKS as usize), 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(BARRIERS + ENTRY_BLOCKS as usize), 128usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let (chunks_at, query_at, weights_at) = (shared_address(&chunks), shared_address(&query), shared_address(&weights));
    let barriers_at = shared_address(&barriers);
    let barriers = Barriers::new(barriers_at);
    let mut entries = Entries { seen, published: barriers_at + comptime!(8 * BARRIERS as u32) };
    let (mut first, mut end, mut step) = (CUBE_POS as u32, items, CUBE_COUNT as u32);
    if comptime!(form.planned()) {
        first = warp::uniform(cube_ptr[CUBE_POS_Y as usize] as u32);
        end = warp::uniform(cube_ptr[CUBE_POS_Y as usize + 1] as u32);
        step = 1u32;
    }
    let (warp, lane, rank) = (warp::uniform(UNIT_POS / 32), UNIT_POS % 32, CUBE_POS_CLUSTER_X);
    let maps = Maps { a: tma::tensor_map_address::<E, Tiled>(rows_a), b: tma::tensor_map_address::<E, Tiled>(rows_b) };
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        tma::prefetch(maps.a);
        if comptime!(form.second) {
            tma::prefetch(maps.b);
        }
        #[unroll]
        for i in 0..ENTRY_BLOCKS {
            mbarrier::init(entries.published + i * 8, comptime!(if form.fp8() { rows::WARPS } else { 1 }));
        }
        barriers.init(comptime!(loaders(form)));
    }
    // Without work both cubes of the pair exit early.
    if first >= end {
        terminate!();
    }
    if warp == QUERY_LOADS {
        tcgen05::allocate(shared_address(&columns), TENSOR_COLUMNS, Cubes::Pair);
    }
    barrier::sync_cluster();
    let tensor = columns[0];
    let cube = Cube { chunks_at, query_at, weights_at, tensor, barriers, warp, lane };
    let range = Range { first, end, step, heads, form };
    let lists = Lists::new(
        slots_a, lengths_a, slots_b, lengths_b, most_a, most_b, head_tiles, splits, pages, plan_items, split_ptr, form,
    );
    if warp == PRODUCTS {
        if rank == 0 && warp::elect() {
            multiply(&cube, &range, &lists);
        }
    } else if warp == ROWS_COME {
        pass_chunks(&cube, &range, &lists);
    } else if warp == QUERY_LOADS {
        load_queries::<E>(&cube, &range, &lists, q_map);
    } else if warp >= ROW_LOADS {
        if comptime!(form.fp8()) {
            let (codes_a, codes_b) = (Codes::new(words_a, pages_a), Codes::new(words_b, pages_b));
            let rows = Rows::new(maps, codes_a, codes_b, warp - ROW_LOADS, lane, form);
            load_codes(&cube, &range, &lists, &rows, rank, &entries);
        } else if warp == ROW_LOADS {
            load_chunks(&cube, &range, &lists, maps, rank, &mut entries, 0u32);
        } else {
            load_chunks(&cube, &range, &lists, maps, rank, &mut entries, 1u32);
        }
    } else {
        let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, heads);
        let mut softmax = Softmax::new(&cube, scale, empty_lse);
        softmax.run::<E, P>(&cube, &range, &lists, sink, &entries, &mut weights, &mut told, &mut results);
    }
    // Nobody leaves while the other cube may arrive here, or products read from here.
    tcgen05::fence_before();
    barrier::sync_cluster();
    if warp == QUERY_LOADS {
        tcgen05::deallocate(tensor, TENSOR_COLUMNS, Cubes::Pair);
    }
}
