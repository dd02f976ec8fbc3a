//! MLA decode for Hopper (sm_90a): tile loads by TMA, products by wgmma. The README beside this file has the schedule.

use cubecl::prelude::*;

use crate::common::launch::or_dummy;
use crate::common::select::Path;
use crate::mla_decode::problem::{DecodeArgs, DecodeError, Grid};
use crate::mla_decode::tma::tile_map;
use crate::ptx::wgmma::{Layout, Mma, Source, descriptor};
use crate::ptx::{fence, mbarrier, shared_address, tma, warp, wgmma};
use crate::tiles::form::{Form, GROUP, KEYS, LOWEST, ROWS, STAGES, TILE_BYTES, VALUE_WIDTH, load_query};
use crate::tiles::loader::{Item, Loader, PagedKeys, Stages, Tile};
use crate::tiles::output::{COLUMNS, is_whole, scale_rows, write_lses, write_rows};
use crate::tiles::softmax::{SoftmaxState, clear_keys, inverse, log_sum, quad_sum, store_weights, weigh};

/// Units of the cube: a warpgroup each for scores, left half of the output, right half.
const UNITS: u32 = 3 * GROUP;

/// How queries and keys lie, seen as rows of terms.
const ROWS_OF_TERMS: Layout = Layout::Terms { rows: ROWS };
/// How keys lie, seen as values: a row is one term for all channels.
const VALUES: Layout = Layout::Across { terms: KEYS };
/// How weights lie.
const WEIGHTS: Layout = Layout::Cores { rows: ROWS };

impl Form {
    /// Scores of a block.
    fn scores(self) -> Mma {
        let (steps, elem, b) = (4 * self.tiles, self.elem(), ROWS_OF_TERMS);
        Mma { n: KEYS, steps, elem, a: Source::Shared(ROWS_OF_TERMS), b, groups: 1 }
    }

    /// Half of the output of a block: two groups, so that the first half of the keys is done with before the second.
    fn output(self) -> Mma {
        let (steps, elem, b) = (KEYS / 16, self.elem(), VALUES);
        Mma { n: VALUE_WIDTH / 2, steps, elem, a: Source::Shared(WEIGHTS), b, groups: 2 }
    }
}

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, form: Form, grid: Grid) -> Result<(), DecodeError> {
    let sizes = args.sizes;
    let slots = sizes.pages * sizes.page_size;
    let kv_cache = or_dummy(client, args.kv_cache, slots);
    let (path, kv_tile, q_tile) = (Path::Sm90, [1, form.box_keys], [form.tiles, ROWS]);
    let kv_map = tile_map(kv_cache, [form.tiles, slots], args.kv_stride, kv_tile, sizes.elem, path)?;
    let query_rows = sizes.batch * sizes.query_len * sizes.heads;
    let q_map = tile_map(args.q, [form.tiles, query_rows], args.q_stride, q_tile, sizes.elem, path)?;
    // SAFETY: the buffers have the sizes that the arguments state, tile loads outside of the cache give zeros. Items are taken
    // as the planner has made them.
    unsafe {
        decode_sm90_kernel::launch_unchecked(
            client,
            grid.cubes,
            CubeDim::new_1d(UNITS),
            grid.address,
            COLUMNS,
            kv_map,
            q_map,
            or_dummy(client, args.page_table, sizes.max_pages),
            args.seq_lens,
            args.items,
            args.cube_ptr,
            args.split_ptr,
            args.partial_out,
            args.partial_lse,
            args.out,
            args.lse,
            sizes.query_len as u32,
            sizes.heads as u32,
            sizes.max_pages as u32,
            sizes.page_size.ilog2(),
            args.softmax_scale * std::f32::consts::LOG2_E,
            f32::NEG_INFINITY.to_bits(),
            form,
            sizes.elem,
        );
    }
    Ok(())
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
fn decode_sm90_kernel<E: Float, P: Size>(
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
    // [keys / 8][rows][8], what wgmma takes without swizzle
    let mut weights = Shared::<[u32]>::new_aligned_slice(comptime!(ROWS * KEYS / 2), 1024usize);
    let mut factors = Shared::<[f32]>::new_aligned_slice(ROWS, 128usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(4 * STAGES as usize + 4), 128usize);
    let keys_at = shared_address(&keys);
    let query_at = shared_address(&query);
    let weights_at = shared_address(&weights);
    // Of each half of each stage: loaded, and no longer needed.
    let full = shared_address(&barriers);
    let empty = full + comptime!(16 * STAGES);
    // Weights and factors of a block: there, and no longer needed.
    let weighed = empty + comptime!(16 * STAGES);
    let used = weighed + 8;
    let query_full = used + 8;
    let query_empty = query_full + 8;
    if UNIT_POS == 0 {
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(kv_map));
        tma::prefetch(tma::tensor_map_address::<E, Tiled>(q_map));
        #[unroll]
        for i in 0..comptime!(2 * STAGES) {
            mbarrier::init(full + i * 8, 1u32);
            mbarrier::init(empty + i * 8, 8u32);
        }
        mbarrier::init(weighed, GROUP);
        mbarrier::init(used, comptime!(2 * GROUP));
        mbarrier::init(query_full, 1u32);
        mbarrier::init(query_empty, GROUP);
        mbarrier::fence_init();
    }
    sync_cube();

    let group = warp::uniform(UNIT_POS / GROUP);
    let warp = warp::uniform(UNIT_POS % GROUP / 32);
    let lane = UNIT_POS % 32;
    let rows = query_len * heads;
    let tile_row = CUBE_POS_X * comptime!(ROWS as u32);
    // The first of the two rows of the tile that this unit has a part of, in scores and output alike.
    let own_row = warp * 16 + lane / 4;
    let last_row = min(tile_row + comptime!(ROWS as u32 - 1), rows - 1);

    let tile = Tile { query_len, heads, last_row, causal: form.causal };

    let mut index = cube_ptr[CUBE_POS_Y as usize] as u32;
    let end_index = cube_ptr[CUBE_POS_Y as usize + 1] as u32;
    // Blocks, weights and queries of all items so far.
    let mut turn = 0u32;
    let mut round = 0u32;
    let mut queries = 0u32;
    if group == 0 {
        if index < end_index && warp == 0 && lane == 0 {
            load_query::<E>(q_map, query_at, query_full, items[index as usize * 4] as u32 * rows + tile_row, form);
        }
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &tile);
            let whole = is_whole(split_ptr, item.sequence);
            let end_a = tile.visible_end(seq_lens, item.sequence, min(tile_row + own_row, rows - 1), item.end_key);
            let end_b = tile.visible_end(seq_lens, item.sequence, min(tile_row + own_row + 8, rows - 1), item.end_key);
            let mut state =
                SoftmaxState { highest_a: f32::new(LOWEST), highest_b: f32::new(LOWEST), sum_a: 0.0f32, sum_b: 0.0f32 };
            mbarrier::wait(query_full, queries % 2);
            let mut base = item.first_key;
            let mut block = 0u32;
            while block < item.blocks {
                let stage = turn % STAGES;
                let phase = turn / STAGES % 2;
                mbarrier::wait(full + stage * 16, phase);
                mbarrier::wait(full + stage * 16 + 8, phase);
                let keys_of_stage = descriptor(keys_at + stage * comptime!(form.stage_bytes()), ROWS_OF_TERMS);
                let issued = wgmma::mma_ss_zero::<Const<32>>(
                    descriptor(query_at, ROWS_OF_TERMS),
                    keys_of_stage,
                    comptime!(form.scores()),
                );
                let s = wgmma::wait::<Const<32>>(issued, 0u32);
                let weighted = weigh(s, &mut state, base, end_a, end_b, scale, lane, form);
                mbarrier::wait(used, (round % 2) ^ 1);
                store_weights(&weighted, own_row, lane, &mut weights, &mut factors);
                if base + comptime!(KEYS as u32) > item.tile_end {
                    clear_keys(&mut keys, stage, item.tile_end - base, form);
                }
                fence::async_shared();
                mbarrier::arrive(weighed);
                base += comptime!(KEYS as u32);
                turn += 1;
                round += 1;
                block = warp::next(block);
            }
            mbarrier::arrive(query_empty);
            if warp == 0 && index + 1 < end_index {
                mbarrier::wait(query_empty, queries % 2);
                if lane == 0 {
                    let next_row = items[index as usize * 4 + 4] as u32 * rows + tile_row;
                    load_query::<E>(q_map, query_at, query_full, next_row, form);
                }
            }
            queries += 1;

            // The last factors: what normalises the output.
            let sum_a = quad_sum(state.sum_a);
            let sum_b = quad_sum(state.sum_b);
            mbarrier::wait(used, (round % 2) ^ 1);
            let corner = lane % 4;
            if corner == 0 {
                factors[own_row as usize] = inverse(sum_a);
                factors[own_row as usize + 8] = inverse(sum_b);
                let lse_a = log_sum(sum_a, state.highest_a, empty_lse);
                let lse_b = log_sum(sum_b, state.highest_b, empty_lse);
                if whole {
                    write_lses(lse, item.sequence * rows, tile_row + own_row, rows, lse_a, lse_b);
                } else {
                    write_lses(partial_lse, index * rows, tile_row + own_row, rows, lse_a, lse_b);
                }
            }
            mbarrier::arrive(weighed);
            round += 1;
            index = warp::next(index);
        }
    } else {
        let half = group - 1;
        let producer = half == 0 && warp == 0;
        let paged = PagedKeys { map: tma::tensor_map_address::<E, Tiled>(kv_map), page_shift, max_pages };
        let mut loader = Loader::new(paged, Stages { keys_at, full, empty }, index, end_index, false);
        if producer {
            loader.open(items, seq_lens, page_table, &tile, lane, form);
            #[unroll]
            for _ in 0..STAGES {
                if loader.has_block() {
                    loader.load_half(page_table, 0usize, lane, form);
                    loader.load_half(page_table, 1usize, lane, form);
                    loader.advance(items, seq_lens, page_table, &tile, lane, form);
                }
            }
        }
        while index < end_index {
            let mut item = Item::none();
            item.read(items, seq_lens, index, &tile);
            let whole = is_whole(split_ptr, item.sequence);
            let mut acc = Vector::<f32, Const<128>>::zeroed();
            let mut block = 0u32;
            while block < item.blocks {
                let loads = producer && loader.has_block();
                mbarrier::wait(weighed, round % 2);
                let factor_a = factors[own_row as usize];
                let factor_b = factors[own_row as usize + 8];
                if warp::any(factor_a != 1.0f32 || factor_b != 1.0f32) {
                    acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
                }
                let stage = turn % STAGES;
                let value = keys_at + stage * comptime!(form.stage_bytes()) + half * comptime!(4 * TILE_BYTES);
                let issued = wgmma::mma_ss::<Const<128>>(
                    acc,
                    descriptor(weights_at, WEIGHTS),
                    descriptor(value, VALUES),
                    comptime!(form.output()),
                );
                // The first half of the keys is done with while the second is still at work.
                wgmma::wait_for_reads(1u32);
                mbarrier::arrive_if(empty + stage * 16, lane == 0);
                if loads {
                    loader.load_half(page_table, 0usize, lane, form);
                }
                acc = wgmma::wait::<Const<128>>(issued, 0u32);
                mbarrier::arrive_if(empty + stage * 16 + 8, lane == 0);
                mbarrier::arrive(used);
                if loads {
                    loader.load_half(page_table, 1usize, lane, form);
                    loader.advance(items, seq_lens, page_table, &tile, lane, form);
                }
                turn += 1;
                round += 1;
                block = warp::next(block);
            }
            mbarrier::wait(weighed, round % 2);
            let factor_a = factors[own_row as usize];
            let factor_b = factors[own_row as usize + 8];
            acc = scale_rows::<Const<128>>(acc, factor_a, factor_b);
            mbarrier::arrive(used);
            round += 1;
            if whole {
                write_rows::<E, P, Const<128>>(
                    acc,
                    out,
                    item.sequence * rows,
                    tile_row + own_row,
                    rows,
                    half * comptime!(VALUE_WIDTH as u32 / 2),
                    lane,
                );
            } else {
                write_rows::<f32, P, Const<128>>(
                    acc,
                    partial_out,
                    index * rows,
                    tile_row + own_row,
                    rows,
                    half * comptime!(VALUE_WIDTH as u32 / 2),
                    lane,
                );
            }
            index = warp::next(index);
        }
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::{AddressType, FloatKind};

    use crate::offline::{Arch, Entry, buffer};
    let entry = |form: Form| {
        let elem = ElemType::Float(if form.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        let name = format!(
            "mla_decode.sm90.{}.{}.{}",
            form.elem().name(),
            form.tiles * crate::tiles::form::TILE_WIDTH,
            form.box_keys
        );
        Entry::new(name, move |device, target| {
            let path = Path::Sm90;
            let map = || tile_map(buffer(), [form.tiles, 64], 576, [1, 16], elem, path).expect("made of a handle");
            decode_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                AddressType::U32,
                COLUMNS,
                map(),
                map(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                1,
                1,
                1.0,
                1,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    vec![
        entry(Form { tiles: 9, box_keys: 32, bf16: true, causal: true }),
        entry(Form { tiles: 8, box_keys: 16, bf16: false, causal: false }),
    ]
}
