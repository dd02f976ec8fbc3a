//! A pair of cubes for 128 query rows: products of 128 rows, of which each cube has 64, over blocks of 128 keys.

use cubecl::prelude::*;

use super::chunks::{CHUNK_BYTES, ChunkLoader, PAIR_KEYS, RING, Ring, passes};
use super::rows::{RowState, partner, scale_output, store_weights, weigh_row};
use crate::ptx::tcgen05::{self, Cubes, LANE, Layout, Mma, Shape, Source, descriptor};
use crate::ptx::{barrier, fence, mbarrier, shared_address, tma, warp};
use crate::tiles::form::{Form, LOWEST, ROWS, TILE_BYTES, VALUE_WIDTH, load_query};
use crate::tiles::loader::{Item, PagedKeys, Tile};
use crate::tiles::output::{is_whole, scale_rows, write_rows};
use crate::tiles::softmax::{inverse, log_sum};

/// Warps: four for the softmax, then one each for products (of the first cube alone), keys, keys that have come, and queries.
const PRODUCTS: u32 = 4;
const KEY_LOADS: u32 = 5;
const KEYS_COME: u32 = 6;
const QUERY_LOADS: u32 = 7;
/// Units of a cube.
pub(super) const UNITS: u32 = 8 * 32;

/// Words of the weights of a cube's rows.
pub(super) const WEIGHT_WORDS: usize = ROWS * PAIR_KEYS as usize / 2;

/// Columns of tensor memory: all. A second cube would have no room in shared memory either.
const COLUMNS: u32 = 512;
/// The output, as two products have it: columns 0 to 127 and 256 to 383 of a row in lanes 0 to 63, the others above.
const OUTPUT_AT: u32 = 0;
const OUTPUT_COLUMNS: u32 = 128;
/// Scores of two blocks: of the first 64 keys in lanes 0 to 63, of the others above.
const SCORES_AT: u32 = 2 * OUTPUT_COLUMNS;
const SCORES_COLUMNS: u32 = PAIR_KEYS / 2;

/// How queries, keys and weights lie.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };

/// Scores of a block, over the channels of a chunk.
fn scores(form: Form, tiles: usize) -> Mma {
    let (n, steps, elem, a) = (PAIR_KEYS as usize, 4 * tiles, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::Pair, m: 2 * ROWS, n, steps, elem, a, b: ROWS_OF_TERMS }
}

/// Half of the output, of 64 keys.
fn output(form: Form) -> Mma {
    let (n, elem, a) = (VALUE_WIDTH / 2, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::Pair, m: 2 * ROWS, n, steps: 4, elem, a, b: Layout::Across { terms: ROWS } }
}

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
    let mut chunks = Shared::<[u32]>::new_aligned_slice(comptime!((RING * CHUNK_BYTES / 4) as usize), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(form.stage_bytes() as usize / 4), 1024usize);
    // Two tiles of 64 keys
    let mut weights = Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(WEIGHT_WORDS / 4), 1024usize);
    // What the units of a row tell each other, for each of two times.
    let mut told = Shared::<[f32]>::new_aligned_slice(256usize, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(3 * RING as usize + 7), 128usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let chunks_at = shared_address(&chunks);
    let query_at = shared_address(&query);
    let weights_at = shared_address(&weights);
    // Of each place of the ring: loaded into this cube, loaded into both (in the first cube), and no longer needed.
    let full = shared_address(&barriers);
    let come = full + comptime!(8 * RING);
    let empty = come + comptime!(8 * RING);
    // Scores of a block, for each of two.
    let scored = empty + comptime!(8 * RING);
    // In the first cube: weights of a block, and what its output is added to, are there in both. In each: the output of a block
    // has been added.
    let weighed = scored + 16;
    let summed = weighed + 8;
    // Queries are here, in both (in the first cube), and no longer needed.
    let query_full = summed + 8;
    let query_come = query_full + 8;
    let query_empty = query_come + 8;

    let mut index = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end_index = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    let warp = warp::uniform(UNIT_POS / 32);
    let lane = UNIT_POS % 32;
    let rank = CUBE_POS_CLUSTER_X;
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        #[unroll]
        for i in 0..RING {
            mbarrier::init(full + i * 8, 1u32);
            mbarrier::init(come + i * 8, 2u32);
            mbarrier::init(empty + i * 8, 1u32);
        }
        mbarrier::init(scored, 1u32);
        mbarrier::init(scored + 8, 1u32);
        mbarrier::init(weighed, 8u32);
        mbarrier::init(summed, 1u32);
        mbarrier::init(query_full, 1u32);
        mbarrier::init(query_come, 2u32);
        mbarrier::init(query_empty, 1u32);
        mbarrier::fence_init();
    }
    // Without items both cubes of the pair exit early.
    if index >= end_index {
        terminate!();
    }
    if warp == QUERY_LOADS {
        tcgen05::allocate(shared_address(&columns), COLUMNS, Cubes::Pair);
    }
    barrier::sync_cluster();
    let tensor = columns[0];

    let rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(ROWS as u32);
    // Of both cubes: they do the same blocks. A row past the end sees what the last one sees: all keys.
    let last_row = (CUBE_POS_X | 1) * comptime!(ROWS as u32) + comptime!(ROWS as u32 - 1);
    let tile = Tile { query_len, heads, last_row, causal: form.causal };

    // Blocks, queries and chunks of all items so far.
    let mut turn = 0u32;
    let mut queries = 0u32;
    let mut chunk = 0u32;
    if warp == PRODUCTS {
        if rank == 0 && warp::elect() {
            while index < end_index {
                let mut item = Item::none();
                item.read(items, seq_lens, index, &tile);
                let blocks = item.blocks.div_ceil(2u32);
                if blocks > 0 {
                    mbarrier::wait_cluster(query_come, queries % 2);
                    queries += 1;
                }
                // The scores of a block are issued before the output of the block before it.
                let mut block = 0u32;
                while block < blocks + comptime!(1u32).runtime() {
                    if block < blocks {
                        let next = (turn + block) % 2;
                        #[unroll]
                        for part in 0..comptime!(form.tiles.div_ceil(2)) {
                            let stage = chunk % RING;
                            mbarrier::wait_cluster(come + stage * 8, chunk / RING % 2);
                            tcgen05::mma_ss(
                                tensor + SCORES_AT + next * SCORES_COLUMNS,
                                descriptor(query_at + comptime!(part as u32 * CHUNK_BYTES), ROWS_OF_TERMS),
                                descriptor(chunks_at + stage * CHUNK_BYTES, ROWS_OF_TERMS),
                                comptime!((part > 0) as u32),
                                comptime!(scores(form, (form.tiles - 2 * part).min(2))),
                            );
                            tcgen05::commit_pair(empty + stage * 8);
                            chunk = warp::next(chunk);
                        }
                        tcgen05::commit_pair(scored + next * 8);
                        if block + 1 == blocks {
                            tcgen05::commit_pair(query_empty);
                        }
                    }
                    if block > 0 {
                        let halves = min(item.blocks - (block - 1) * 2, comptime!(2u32).runtime());
                        mbarrier::wait_cluster(weighed, (turn + block - 1) % 2);
                        tcgen05::fence_after();
                        #[unroll]
                        for side in 0..2u32 {
                            let mut half = 0u32;
                            while half < halves {
                                let stage = chunk % RING;
                                mbarrier::wait_cluster(come + stage * 8, chunk / RING % 2);
                                tcgen05::mma_ss(
                                    tensor + comptime!(OUTPUT_AT + side * OUTPUT_COLUMNS),
                                    descriptor(weights_at + half * TILE_BYTES, ROWS_OF_TERMS),
                                    descriptor(chunks_at + stage * CHUNK_BYTES, comptime!(output(form).b)),
                                    u32::cast_from(block > 1 || half > 0),
                                    comptime!(output(form)),
                                );
                                tcgen05::commit_pair(empty + stage * 8);
                                chunk = warp::next(chunk);
                                half = warp::next(half);
                            }
                        }
                        tcgen05::commit_pair(summed);
                    }
                    block = warp::next(block);
                }
                turn += blocks;
                index = warp::next(index);
            }
        }
    } else if warp == KEY_LOADS {
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        let mut loader = ChunkLoader::new(paged, Ring { chunks_at, full, empty }, rank);
        while index < end_index {
            loader.load_item(items, seq_lens, page_table, index, &tile, lane, form);
            index = warp::next(index);
        }
    } else if warp == KEYS_COME {
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &tile);
            let blocks = item.blocks.div_ceil(2u32);
            let mut block = 0u32;
            while block < blocks + comptime!(1u32).runtime() {
                if block < blocks {
                    #[unroll]
                    for _ in 0..comptime!(form.tiles.div_ceil(2)) {
                        passes(&mut chunks, chunk, full, come, comptime!(ROWS as u32).runtime(), lane);
                        chunk = warp::next(chunk);
                    }
                }
                if block > 0 {
                    let first_half = (block - 1) * 2;
                    let halves = min(item.blocks - first_half, comptime!(2u32).runtime());
                    #[unroll]
                    for _ in 0..2u32 {
                        let mut half = 0u32;
                        while half < halves {
                            let first_key = item.first_key + (first_half + half) * comptime!(ROWS as u32);
                            passes(&mut chunks, chunk, full, come, item.tile_end - first_key, lane);
                            chunk = warp::next(chunk);
                            half = warp::next(half);
                        }
                    }
                }
                block = warp::next(block);
            }
            index = warp::next(index);
        }
    } else if warp == QUERY_LOADS {
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &tile);
            if item.blocks > 0 {
                mbarrier::wait_cluster(query_empty, (queries % 2) ^ 1);
                if warp::elect() {
                    load_query::<E>(q_map, query_at, query_full, item.sequence * rows + tile_row, form);
                }
                sync_plane();
                mbarrier::wait(query_full, queries % 2);
                mbarrier::arrive_at_if(query_come, 0u32, lane == 0);
                queries += 1;
            }
            index = warp::next(index);
        }
    } else {
        // Two units have the same row, each half of the keys of a block and half of the channels.
        let half = warp / 2;
        let warp_row = tile_row + warp % 2 * 32;
        let row = warp_row + lane;
        let own = tensor + warp * comptime!(32 * LANE);
        // How often units of a row have told each other something.
        let mut times = 0u32;
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &tile);
            let blocks = item.blocks.div_ceil(2u32);
            let whole = is_whole(split_ptr, item.sequence);
            let end = tile.visible_end(seq_lens, item.sequence, row, item.end_key);
            let mut state = RowState { highest: f32::new(LOWEST), sum: 0.0f32 };
            let mut first_key = item.first_key + half * comptime!(ROWS as u32);
            let mut block = 0u32;
            while block < blocks {
                mbarrier::wait_cluster(scored + turn % 2 * 8, turn / 2 % 2);
                tcgen05::fence_after();
                let s =
                    tcgen05::load::<Const<64>>(own + SCORES_AT + turn % 2 * SCORES_COLUMNS, comptime!(Shape::Lanes));
                let weighed_row = weigh_row(s, &mut state, &mut told, times, first_key, end, scale, form);
                times += 1;
                if block > 0 {
                    // The weights of the block before have been read, and the output may be scaled.
                    mbarrier::wait_cluster(summed, (turn - 1) % 2);
                    tcgen05::fence_after();
                    if warp::any(weighed_row.factor != 1.0f32) {
                        scale_output(own + OUTPUT_AT, weighed_row.factor);
                    }
                }
                store_weights(&weighed_row, &mut weights, half);
                fence::async_shared();
                tcgen05::wait_for_stores();
                tcgen05::fence_before();
                sync_plane();
                mbarrier::arrive_at_if(weighed, 0u32, lane == 0);
                first_key += PAIR_KEYS;
                turn += 1;
                block = warp::next(block);
            }

            let sum = state.sum + partner(&mut told, times, state.sum);
            times += 1;
            if half == 0 && row < rows {
                let row_lse = log_sum(sum, state.highest, empty_lse);
                if whole {
                    lse[(item.sequence * rows + row) as usize] = row_lse;
                } else {
                    partial_lse[(index * rows + row) as usize] = row_lse;
                }
            }
            // Without blocks this waits for nothing: the phase of the last block, if there was one, is over.
            mbarrier::wait_cluster(summed, (turn - 1) % 2);
            tcgen05::fence_after();
            let factor = inverse(sum);
            #[unroll]
            for group in 0..2u32 {
                let group_row = comptime!(group * 16) + lane / 4;
                let factor_a = warp::shuffle::<f32>(factor, group_row);
                let factor_b = warp::shuffle::<f32>(factor, group_row + 8);
                #[unroll]
                for side in 0..2u32 {
                    let mut acc = Vector::<f32, Const<64>>::zeroed();
                    if blocks > 0 {
                        let at = own + comptime!(group * 16 * LANE + OUTPUT_AT + side * OUTPUT_COLUMNS);
                        acc = tcgen05::load::<Const<64>>(at, comptime!(Shape::Pairs));
                    }
                    acc = scale_rows::<Const<64>>(acc, factor_a, factor_b);
                    let column = comptime!(side * VALUE_WIDTH as u32 / 2) + half * comptime!(VALUE_WIDTH as u32 / 4);
                    let row = warp_row + group_row;
                    if whole {
                        write_rows::<E, P, Const<64>>(acc, out, item.sequence * rows, row, rows, column, lane);
                    } else {
                        write_rows::<f32, P, Const<64>>(acc, partial_out, index * rows, row, rows, column, lane);
                    }
                }
            }
            index = warp::next(index);
        }
    }
    // Nobody leaves while the other cube may arrive here, or products read from here.
    tcgen05::fence_before();
    barrier::sync_cluster();
    if warp == QUERY_LOADS {
        tcgen05::deallocate(tensor, COLUMNS, Cubes::Pair);
    }
}
