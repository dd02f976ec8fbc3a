//! Sparse attention for Hopper (sm_90a): rows by asynchronous copies, products by wgmma. The README beside this file has the
//! schedule.

mod cluster;
mod cube;
mod form;
mod fp8;
mod gather;
mod list;
#[cfg(feature = "offline")]
mod offline;
mod output;
mod scores;

use cubecl::prelude::*;

use self::cube::{Barriers, Cube, barrier_count};
use self::form::units;
use self::fp8::Rows;
use self::gather::{Gather, VECTOR};
use self::list::List;
#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use self::output::Output;
use self::scores::{Exchange, Scores};
use super::codes::{Codes, RowPages, RowPagesLaunch, words};
use super::form::Form;
use super::launch::Call;
use super::work::{Ahead, Lists, PagedKeys, RING};
use super::{ScopeArgs, SparseMlaError};
use crate::cache_rows::RowFormat;
use crate::common::launch::{address_type, or_dummy, share};
use crate::ptx::{registers, shared_address, tma, warp};
use crate::tiles::form::{GROUP, KEYS, ROWS, STAGES};
use crate::tiles::output::{COLUMNS, Results};

/// Registers of a unit, where there are FP8 rows: of the warpgroup of the scores, of those of the output, of that of the rows. Four have
/// 512 in all.
const SCORE_REGISTERS: u32 = 80;
const OUTPUT_REGISTERS: u32 = 160;
const ROW_REGISTERS: u32 = 104;

/// Launches the kernel.
pub(super) fn launch(client: &Client, call: Call) -> Result<(), SparseMlaError> {
    let (args, form, second) = (call.args, call.form, call.second);
    let first = &args.first;
    let (query, pages, scale) = (call.query_map()?, call.pages(), call.scale());
    let address = [first.rows.buffer(), second.rows.buffer(), &call.out, &call.partial_out];
    let address = address_type(client, &address);
    // Rows are numbers or words.
    let rows = |scope: &ScopeArgs| {
        let count = if scope.rows.format() == RowFormat::Dense { scope.row_count } else { 0 };
        or_dummy(client, share(scope.rows.buffer()), count)
    };
    let ([slots_a, slots_b], [lengths_a, lengths_b]) = (call.slots, call.lengths);
    let ([items, cube_ptr, split_ptr], grid) = (call.plan, call.grid);
    // SAFETY: the buffers have the sizes that the arguments state, and slots are those of rows.
    unsafe {
        sparse_sm90_kernel::launch_unchecked(
            client,
            grid.cubes(),
            CubeDim::new_1d(units(form)),
            address,
            COLUMNS,
            VECTOR,
            query,
            rows(first),
            words(client, first),
            RowPagesLaunch::of(first.rows.format()),
            slots_a,
            lengths_a,
            rows(second),
            words(client, second),
            RowPagesLaunch::of(second.rows.format()),
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
    Ok(())
}

/// A cube computes every so-many-th split of all tiles, or what the plan gives it of one of each sequence's or query token's tiles.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    create_dummy_kernel,
    cluster_dim = CubeDim::new_3d(form.cluster(), 1, 1)
)]
fn sparse_sm90_kernel<E: Float, P: Size, V: Size>(
    q_map: &TensorMap<E, Tiled>,
    rows_a: &[Vector<E, V>],
    words_a: &[u32],
    pages_a: RowPages,
    slots_a: &[i32],
    lengths_a: &[i32],
    rows_b: &[Vector<E, V>],
    words_b: &[u32],
    pages_b: RowPages,
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
    // [keys / 8][rows][8], what wgmma takes without swizzle
    let weights = Shared::<[u32]>::new_aligned_slice(comptime!(ROWS * KEYS / 2), 1024usize);
    let factors = Shared::<[f32]>::new_aligned_slice(ROWS, 128usize);
    let slots = Shared::<[i32]>::new_aligned_slice(comptime!(RING as usize * KEYS), 128usize);
    let kinds = Shared::<[u32]>::new_aligned_slice(comptime!(RING as usize), 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(barrier_count(form)), 128usize);
    let (keys_at, query_at, weights_at) = (shared_address(&keys), shared_address(&query), shared_address(&weights));
    let barriers = Barriers::new(shared_address(&barriers), form);
    let mut exchange = Exchange { weights, factors, slots, kinds };
    let lists = Lists::new(
        slots_a, lengths_a, slots_b, lengths_b, most_a, most_b, head_tiles, splits, pages, plan_items, split_ptr, form,
    );
    let (mut first, mut end, mut step) = (CUBE_POS as u32, items, CUBE_COUNT as u32);
    if comptime!(form.planned()) {
        first = warp::uniform(cube_ptr[CUBE_POS_Y as usize] as u32);
        end = warp::uniform(cube_ptr[CUBE_POS_Y as usize + 1] as u32);
        step = 1u32;
    }
    if comptime!(form.merges()) {
        first = cluster::split(&lists, items, form);
    }
    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS % GROUP / 32);
    let lane = UNIT_POS % 32;
    let own_row = warp * 16 + lane / 4;
    let cube = Cube { keys_at, query_at, weights_at, barriers, warp, lane, heads, own_row, first, end, step, form };
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        barriers.init(form);
    }
    let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, heads);
    if group == 0 {
        let place = UNIT_POS % comptime!(KEYS as u32);
        let mut ahead = Ahead::new(&lists, first, end, step, place, UNIT_POS < comptime!(KEYS as u32));
        if comptime!(form.fp8()) {
            registers::fewer(SCORE_REGISTERS);
        } else {
            #[unroll]
            for _ in 0..STAGES {
                ahead.publish(&lists, &mut exchange.slots, &mut exchange.kinds);
                ahead.advance(&lists);
            }
        }
        cube::sync(form);
        let mut scores = Scores::new(scale, empty_lse);
        scores.run::<E, P>(&cube, &lists, q_map, sink, &mut ahead, &mut exchange, &mut results);
        cluster::sync(form);
    } else if comptime!(form.fp8()) && group == 3 {
        registers::fewer(ROW_REGISTERS);
        let list_a = List::<E, V>::new(rows_a, Codes::new(words_a, pages_a));
        let list_b = List::<E, V>::new(rows_b, Codes::new(words_b, pages_b));
        let rows = Rows::<E, V>::new(list_a, list_b, warp, lane, form);
        let mut ahead = rows.ahead(&cube, &lists);
        cube::sync(form);
        rows.run(&cube, &lists, &mut ahead, &mut exchange);
        cluster::sync(form);
    } else {
        if comptime!(form.fp8()) {
            registers::more(OUTPUT_REGISTERS);
        }
        cube::sync(form);
        let gather = Gather::<E, V>::new(rows_a, rows_b, group - 1, warp, lane);
        let mut output = Output::new(group - 1);
        output.run::<E, P, V>(&cube, &lists, &gather, &exchange, &mut results);
        cluster::sync(form);
        if comptime!(form.merges()) {
            cluster::merge::<E, P>(&cube, &lists, sink, empty_lse, &mut results);
        }
    }
    if comptime!(form.pair) {
        // The other cube has its last rows from this one's memory.
        cube::sync(form);
    }
}
