//! MLA decode of few heads over FP8 rows, for Hopper and later: codes are what is kept in shared memory, and become numbers in the
//! registers that multiply them. The README beside this file has the schedule.

mod cube;
mod form;
mod load;
#[cfg(feature = "offline")]
mod offline;
mod output;
mod query;
mod scales;
mod scores;
mod weights;

#[cfg(feature = "offline")]
pub(super) use self::offline::offline;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use self::cube::Cube;
pub(super) use self::form::Form;
use self::form::{ROW_BYTES, SCALES, SCORE_STRIDE, STAGE_BYTES, STAGES, WEIGHT_STRIDE};
use self::load::{Loads, Pages};
use self::query::VECTOR;
use self::weights::Softmax;
use super::problem::{DecodeArgs, Grid};
use crate::common::launch::{or_dummy, share};
use crate::compiler::names_all_sizes;
use crate::ptx::{mbarrier, shared_address, warp};
use crate::tiles::form::KEYS;
use crate::tiles::loader::{Item, Plan, Tile};
use crate::tiles::output::{COLUMNS, Results, Target};

fn is_bf16(elem: ElemType) -> bool {
    elem == ElemType::Float(FloatKind::BF16)
}

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: &DecodeArgs, form: Form, grid: &Grid) {
    if names_all_sizes() {
        // Another number of query tokens has the other form.
        form.all().into_iter().for_each(|form| launch_form(client, args, form, grid));
    } else {
        launch_form(client, args, form, grid);
    }
}

fn launch_form(client: &Client, args: &DecodeArgs, form: Form, grid: &Grid) {
    let sizes = args.sizes;
    let words = or_dummy(client, share(args.kv_cache.buffer()), sizes.slots() * (ROW_BYTES as usize / 4));
    // SAFETY: the buffers have the sizes that the arguments state, and pages are those of the cache. Items are taken as the planner has
    // made them.
    unsafe {
        decode_fp8_kernel::launch_unchecked(
            client,
            grid.cubes.clone(),
            CubeDim::new_1d(form.units()),
            grid.address,
            VECTOR,
            COLUMNS,
            share(&args.q),
            words,
            or_dummy(client, share(&args.page_table), sizes.max_pages),
            share(&args.seq_lens),
            share(&args.items),
            share(&args.cube_ptr),
            share(&args.split_ptr),
            share(&args.partial_out),
            share(&args.partial_lse),
            share(&args.out),
            share(&args.lse),
            sizes.query_len as u32,
            sizes.heads as u32,
            sizes.max_pages as u32,
            sizes.pages.max(1) as u32,
            sizes.page_size.ilog2(),
            args.softmax_scale * std::f32::consts::LOG2_E,
            f32::NEG_INFINITY.to_bits(),
            form,
            sizes.elem,
        );
    }
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn decode_fp8_kernel<E: Float, V: Size, P: Size>(
    q: &[Vector<E, V>],
    words: &[u32],
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
    page_count: u32,
    page_shift: u32,
    scale: f32,
    empty_lse: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let rows = comptime!(form.rows());
    let keys = Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * STAGE_BYTES / 4) as usize), 128usize);
    let scores = Shared::<[f32]>::new_aligned_slice(comptime!(SCALES * rows * SCORE_STRIDE), 128usize);
    let weights = Shared::<[u32]>::new_aligned_slice(comptime!(SCALES * rows * WEIGHT_STRIDE / 2), 128usize);
    let scales = Shared::<[f32]>::new_aligned_slice(comptime!(SCALES * KEYS), 128usize);
    let exceeded = Shared::<[u32]>::new_aligned_slice(comptime!(form.warps()), 128usize);
    let factors = Shared::<[f32]>::new_aligned_slice(comptime!(SCALES * rows), 128usize);
    let ends = Shared::<[f32]>::new_aligned_slice(comptime!(SCALES * rows), 128usize);
    let powers = Shared::<[f32]>::new_aligned_slice(rows, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(STAGES as usize), 128usize);
    let query_rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(rows as u32);
    let last_row = min(tile_row + comptime!(rows as u32 - 1), query_rows - 1);
    let cube = Cube {
        keys_at: shared_address(&keys),
        scores_at: shared_address(&scores),
        weights_at: shared_address(&weights),
        scales_at: shared_address(&scales),
        exceeded_at: shared_address(&exceeded),
        factors_at: shared_address(&factors),
        ends_at: shared_address(&ends),
        powers_at: shared_address(&powers),
        full: shared_address(&barriers),
        warp: warp::uniform(UNIT_POS / 32),
        lane: UNIT_POS % 32,
        rows: query_rows,
        tile_row,
        tile: Tile { query_len, heads, last_row, causal: form.causal },
        first: warp::uniform(cube_ptr[CUBE_POS_Y as usize] as u32),
        end: warp::uniform(cube_ptr[CUBE_POS_Y as usize + 1] as u32),
        form,
    };
    if UNIT_POS == 0 {
        cube.init();
    }
    sync_cube();
    let plan = Plan::new(items, split_ptr, seq_lens, page_table);
    let mut results = Results::<E, P>::new(out, lse, partial_out, partial_lse, query_rows);
    let pages = Pages::new(words, page_shift, max_pages, page_count);
    let mut loads = Loads::none();
    if cube.warp == 0 {
        loads.fill(&pages, &cube, &plan);
    }
    let mut turn = 0u32;
    let mut index = cube.first;
    while index < cube.end {
        let mut item = Item::none();
        item.read(&plan, index, &cube.tile);
        let target = Target::of(&plan, &item, index);
        let blocks = warp::uniform(item.blocks);
        query::write_powers::<E, V>(q, &cube, item.sequence);
        sync_cube();
        let query = query::load::<E, V>(q, &cube, item.sequence);
        let mut softmax = Softmax::new(&cube, &plan, &item, scale);
        let mut sums = output::zeros(&cube);
        if blocks > 0 {
            write_scores(&query, &cube, turn, softmax.power);
        }
        let mut block = 0u32;
        let mut base = warp::uniform(item.first_key);
        while block < blocks {
            let stage_at = cube.keys_at + turn % STAGES * STAGE_BYTES;
            sync_cube();
            if cube.warp == 0 && turn > 0 {
                // The block before has been computed.
                loads.next(&pages, &cube, &plan);
            }
            softmax.weigh(&cube, stage_at, base, turn);
            sync_cube();
            // Scores of the next block and the output of this one wait for each other nowhere.
            if block + 1 < blocks {
                write_scores(&query, &cube, turn + 1, softmax.power);
            }
            output::add(&mut sums, &cube, stage_at);
            base += comptime!(KEYS as u32);
            turn += 1;
            block = warp::next(block);
        }
        softmax.finish::<E, P>(&cube, &target, empty_lse, &mut results);
        sync_cube();
        output::scale(&mut sums, &cube, cube.ends_at, true);
        output::write::<E, P>(&sums, &cube, &target, &mut results);
        index = warp::next(index);
    }
}

/// Writes this warp's scores and scales of a block, once it has come.
#[cube]
fn write_scores(query: &Array<Vector<u32, Const<4>>>, cube: &Cube, turn: u32, power: f32) {
    let stage = turn % STAGES;
    mbarrier::wait(cube.full + stage * 8, turn / STAGES % 2);
    // Matrix instructions are next, which all lanes execute together.
    sync_plane();
    let stage_at = cube.keys_at + stage * STAGE_BYTES;
    scales::write(cube, stage_at, power, turn);
    scores::write(query, cube, stage_at);
}
