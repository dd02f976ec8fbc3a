//! One cube for 64 query rows: products of 64 rows, whose accumulators share columns of tensor memory two by two.

use cubecl::prelude::*;

use crate::ptx::tcgen05::{self, Cubes, LANE, Layout, Mma, Shape, Source, descriptor};
use crate::ptx::{fence, mbarrier, shared_address, tma, warp};
use crate::tiles::form::{Form, GROUP, KEYS, LOWEST, ROWS, STAGES, TILE_BYTES, VALUE_WIDTH, load_query};
use crate::tiles::loader::{Item, Loader, PagedKeys, Stages, Tile};
use crate::tiles::output::{is_whole, scale_rows, write_lses, write_rows};
use crate::tiles::softmax::{SoftmaxState, clear_keys, inverse, log_sum, quad_sum, weigh};

/// Warps: four for the softmax, then one each for products, keys and queries.
const PRODUCTS: u32 = 4;
const KEY_LOADS: u32 = 5;
const QUERY_LOADS: u32 = 6;
/// Units of the cube.
pub(super) const UNITS: u32 = 7 * 32;

/// Columns of tensor memory: all. A second cube would have no room in shared memory either.
const COLUMNS: u32 = 512;
/// The output, 64 rows of 512 channels: the left half in lane 0 and its like, the right half in lane 16.
const OUTPUT_AT: u32 = 0;
/// Scores of two blocks of 64 keys, in lane 0.
const SCORES_AT: u32 = 256;
const SCORES_COLUMNS: u32 = KEYS as u32;
/// Weights of a block, two in a column; the same in lanes 0 and 16, for each half of the output.
const WEIGHTS_AT: u32 = SCORES_AT + 2 * SCORES_COLUMNS;
/// The lane of the right half.
const RIGHT: u32 = 16 * LANE;

/// How queries and keys lie, seen as rows of terms.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
const VALUES: Layout = Layout::Across { terms: KEYS };

/// Scores of a block.
fn scores(form: Form) -> Mma {
    let (steps, elem, a) = (4 * form.tiles, form.elem(), Source::Shared(ROWS_OF_TERMS));
    Mma { cubes: Cubes::One, m: ROWS, n: KEYS, steps, elem, a, b: ROWS_OF_TERMS }
}

/// Half of the output of half a block.
fn output(form: Form) -> Mma {
    let (steps, elem) = (KEYS / 32, form.elem());
    Mma { cubes: Cubes::One, m: ROWS, n: VALUE_WIDTH / 2, steps, elem, a: Source::Tensor, b: VALUES }
}

/// Cube `(0, c)` computes all query rows, up to 64, for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub(super) fn decode_sm100_kernel<E: Float, P: Size>(
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
    let mut keys = Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * form.stage_bytes() / 4) as usize), 1024usize);
    let query = Shared::<[u32]>::new_aligned_slice(comptime!(form.stage_bytes() as usize / 4), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(4 * STAGES as usize + 6), 128usize);
    let columns = Shared::<[u32]>::new_aligned_slice(4usize, 16usize);
    let keys_at = shared_address(&keys);
    let query_at = shared_address(&query);
    // Of each half of each stage: loaded, and no longer needed.
    let full = shared_address(&barriers);
    let empty = full + comptime!(16 * STAGES);
    // Scores of a block, for each of two.
    let scored = empty + comptime!(16 * STAGES);
    // Weights of a block, and what its output is added to, are there. The output of a block has been added.
    let weighed = scored + 16;
    let summed = weighed + 8;
    let query_full = summed + 8;
    let query_empty = query_full + 8;

    let mut index = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end_index = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    let warp = warp::uniform(UNIT_POS / 32);
    let lane = UNIT_POS % 32;
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            mbarrier::init(full + i * 8, 1u32);
            mbarrier::init(empty + i * 8, 1u32);
        }
        mbarrier::init(scored, 1u32);
        mbarrier::init(scored + 8, 1u32);
        mbarrier::init(weighed, GROUP);
        mbarrier::init(summed, 1u32);
        mbarrier::init(query_full, 1u32);
        mbarrier::init(query_empty, 1u32);
        mbarrier::fence_init();
    }
    // Without items the cube exits early.
    if index >= end_index {
        terminate!();
    }
    if warp == QUERY_LOADS {
        tcgen05::allocate(shared_address(&columns), COLUMNS, Cubes::One);
    }
    sync_cube();
    let tensor = columns[0];

    let rows = query_len * heads;
    let tile = Tile { query_len, heads, last_row: rows - 1, causal: form.causal };
    // The last row sees all keys.
    let all_rows = Tile { query_len, heads, last_row: rows - 1, causal: false };

    // Blocks and queries of all items so far.
    let mut turn = 0u32;
    let mut queries = 0u32;
    if warp == PRODUCTS {
        if warp::elect() {
            while index < end_index {
                let mut item = Item::none();
                item.read(items, seq_lens, index, &all_rows);
                if item.blocks > 0 {
                    mbarrier::wait(query_full, queries % 2);
                    queries += 1;
                }
                // The scores of a block are issued before the output of the block before it.
                let mut block = 0u32;
                while block < item.blocks + comptime!(1u32).runtime() {
                    if block < item.blocks {
                        let next = turn + block;
                        let stage = next % STAGES;
                        mbarrier::wait(full + stage * 16, next / STAGES % 2);
                        mbarrier::wait(full + stage * 16 + 8, next / STAGES % 2);
                        tcgen05::mma_ss(
                            tensor + SCORES_AT + next % 2 * SCORES_COLUMNS,
                            descriptor(query_at, ROWS_OF_TERMS),
                            descriptor(keys_at + stage * comptime!(form.stage_bytes()), ROWS_OF_TERMS),
                            0u32,
                            comptime!(scores(form)),
                        );
                        tcgen05::commit(scored + next % 2 * 8);
                        if block + 1 == item.blocks {
                            tcgen05::commit(query_empty);
                        }
                    }
                    if block > 0 {
                        let last = turn + block - 1;
                        let stage = last % STAGES;
                        let more = u32::cast_from(block > 1);
                        let value = keys_at + stage * comptime!(form.stage_bytes());
                        mbarrier::wait(weighed, last % 2);
                        tcgen05::fence_after();
                        #[unroll]
                        for half in 0..2u32 {
                            #[unroll]
                            for side in 0..2u32 {
                                let tiles = value + comptime!(side * 4 * TILE_BYTES + half * 32 * 128);
                                tcgen05::mma_ts(
                                    tensor + comptime!(side * RIGHT + OUTPUT_AT),
                                    tensor + comptime!(side * RIGHT + WEIGHTS_AT + half * 16),
                                    descriptor(tiles, VALUES),
                                    select(comptime!(half == 0), more, 1u32),
                                    comptime!(output(form)),
                                );
                            }
                            tcgen05::commit(empty + stage * 16 + comptime!(half * 8));
                        }
                        tcgen05::commit(summed);
                    }
                    block = warp::next(block);
                }
                turn += item.blocks;
                index = warp::next(index);
            }
        }
    } else if warp == KEY_LOADS {
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        let mut loader = Loader::new(paged, Stages { keys_at, full, empty }, index, end_index, true);
        loader.open(items, seq_lens, page_table, &all_rows, lane, form);
        while loader.has_block() {
            loader.load_half(page_table, 0usize, lane, form);
            loader.load_half(page_table, 1usize, lane, form);
            loader.advance(items, seq_lens, page_table, &all_rows, lane, form);
        }
    } else if warp == QUERY_LOADS {
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &all_rows);
            if item.blocks > 0 {
                mbarrier::wait(query_empty, (queries % 2) ^ 1);
                if warp::elect() {
                    load_query::<E>(q_map, query_at, query_full, item.sequence * rows, form);
                }
                sync_plane();
                queries += 1;
            }
            index = warp::next(index);
        }
    } else {
        // The first of the two rows that this unit has a part of, in scores and output alike.
        let own_row = warp * 16 + lane / 4;
        let own = tensor + warp * comptime!(32 * LANE);
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &all_rows);
            let whole = is_whole(split_ptr, item.sequence);
            // Rows past the end are computed, but not written.
            let end_a = tile.visible_end(seq_lens, item.sequence, own_row, item.end_key);
            let end_b = tile.visible_end(seq_lens, item.sequence, own_row + 8, item.end_key);
            let mut state =
                SoftmaxState { highest_a: f32::new(LOWEST), highest_b: f32::new(LOWEST), sum_a: 0.0f32, sum_b: 0.0f32 };
            let mut base = item.first_key;
            let mut block = 0u32;
            while block < item.blocks {
                mbarrier::wait(scored + turn % 2 * 8, turn / 2 % 2);
                tcgen05::fence_after();
                let s =
                    tcgen05::load::<Const<32>>(own + SCORES_AT + turn % 2 * SCORES_COLUMNS, comptime!(Shape::Pairs));
                let weighted = weigh(s, &mut state, base, end_a, end_b, scale, lane, form);
                if block > 0 {
                    // The weights of the block before have been read, and the output may be scaled.
                    mbarrier::wait(summed, (turn - 1) % 2);
                    tcgen05::fence_after();
                    if warp::any(weighted.factor_a != 1.0f32 || weighted.factor_b != 1.0f32) {
                        scale_output(own + OUTPUT_AT, weighted.factor_a, weighted.factor_b);
                    }
                }
                #[unroll]
                for side in 0..2u32 {
                    let to = own + comptime!(side * RIGHT + WEIGHTS_AT);
                    tcgen05::store::<u32, Const<16>>(to, weighted.weights, comptime!(Shape::Singles));
                }
                tcgen05::wait_for_stores();
                if base + comptime!(KEYS as u32) > item.tile_end {
                    // All of the block has come: the scores were computed from it.
                    clear_keys(&mut keys, turn % STAGES, item.tile_end - base, form);
                    fence::async_shared();
                }
                tcgen05::fence_before();
                mbarrier::arrive(weighed);
                base += comptime!(KEYS as u32);
                turn += 1;
                block = warp::next(block);
            }

            let sum_a = quad_sum(state.sum_a);
            let sum_b = quad_sum(state.sum_b);
            let corner = lane % 4;
            if corner == 0 {
                let lse_a = log_sum(sum_a, state.highest_a, empty_lse);
                let lse_b = log_sum(sum_b, state.highest_b, empty_lse);
                if whole {
                    write_lses(lse, item.sequence * rows, own_row, rows, lse_a, lse_b);
                } else {
                    write_lses(partial_lse, index * rows, own_row, rows, lse_a, lse_b);
                }
            }
            // Without blocks this waits for nothing: the phase of the last block, if there was one, is over.
            mbarrier::wait(summed, (turn - 1) % 2);
            tcgen05::fence_after();
            let (factor_a, factor_b) = (inverse(sum_a), inverse(sum_b));
            #[unroll]
            for side in 0..2u32 {
                let mut acc = Vector::<f32, Const<128>>::zeroed();
                if item.blocks > 0 {
                    acc =
                        tcgen05::load::<Const<128>>(own + comptime!(side * RIGHT + OUTPUT_AT), comptime!(Shape::Pairs));
                }
                acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
                let column = comptime!(side * VALUE_WIDTH as u32 / 2);
                if whole {
                    write_rows::<E, P, Const<128>>(acc, out, item.sequence * rows, own_row, rows, column, lane);
                } else {
                    write_rows::<f32, P, Const<128>>(acc, partial_out, index * rows, own_row, rows, column, lane);
                }
            }
            index = warp::next(index);
        }
    }
    tcgen05::fence_before();
    sync_cube();
    if warp == QUERY_LOADS {
        tcgen05::deallocate(tensor, COLUMNS, Cubes::One);
    }
}

/// Multiplies a warp's rows of the output, in both halves; `output` is the address of the first. The next products are issued
/// after the stores have been waited for.
#[cube]
fn scale_output(output: u32, factor_a: f32, factor_b: f32) {
    let mut part = 0u32;
    while part < 8u32 {
        let at = output + part % 2 * RIGHT + part / 2 * 64;
        let acc = tcgen05::load::<Const<32>>(at, comptime!(Shape::Pairs));
        tcgen05::store::<f32, Const<32>>(at, scale_rows::<Const<32>>(acc, factor_a, factor_b), comptime!(Shape::Pairs));
        part = warp::next(part);
    }
}
