//! Decode with matrix instructions, for devices that have them with `ldmatrix` and asynchronous copies (NVIDIA from sm_80 on).
//!
//! The same items, tiles and outputs as the [plain](super::plain) kernel; both products of a tile go to the matrix units.
//! A cube has eight planes. They divide the scores of a tile among them by rows, keys and channels (sums over channels are
//! completed through shared memory), then the softmax by rows, then the output by channels: every plane accumulates all
//! rows of the tile for its channels of the value, in registers.
//!
//! Keys arrive in a ring of stages, copied asynchronously: while a tile is computed, the next ones are on their way. Weights
//! are rounded to the element type before they meet the values, as the matrix units need them.

mod load;
mod products;
mod softmax;
mod tile;

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

use self::load::{load_keys, load_queries, stage_barriers, wait_for_stage};
use self::products::{accumulate, accumulators, clear_all, scale_rows, score, write_out};
use self::softmax::{OwnRow, SoftmaxState, row_sum, weigh};
use self::tile::PLANES;
pub(super) use self::tile::VECTOR;
pub(super) use self::tile::{K, LANES, M, MmaTile, N, best_mma_tile};
use super::problem::{DecodeArgs, Grid, KernelSizes};
use super::row::RowEnd;
use crate::cache_rows::CacheRows;
use crate::common::launch::or_dummy;

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, tile: MmaTile, grid: Grid) {
    let sizes = args.sizes;
    // SAFETY: the buffers have the sizes that the arguments state, and slots are clamped to the cache. Items are taken as the
    // planner has made them.
    unsafe {
        decode_mma_kernel::launch_unchecked(
            client,
            grid.cubes,
            CubeDim::new_2d(LANES as u32, PLANES as u32),
            grid.address,
            VECTOR,
            2,
            args.q,
            args.kv_cache.rows(client, [sizes.slots(), sizes.key_width, VECTOR]),
            or_dummy(client, args.page_table, sizes.max_pages),
            args.seq_lens,
            args.items,
            args.cube_ptr,
            args.partial_out,
            args.partial_lse,
            sizes.of_kernel(),
            args.softmax_scale,
            f32::NEG_INFINITY.to_bits(),
            tile,
            sizes.elem,
        );
    }
}

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn decode_mma_kernel<E: Float, V: Size, P: Size>(
    q: &[Vector<E, V>],
    kv_cache: CacheRows<E, V>,
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
    cube_ptr: &[i32],
    partial_out: &mut [Vector<f32, P>],
    partial_lse: &mut [f32],
    sizes: KernelSizes,
    softmax_scale: f32,
    // Of -inf, which not every compiler can write as a constant.
    empty_lse: u32,
    #[comptime] tile: MmaTile,
    #[define(E)] _elem: ElemType,
) {
    let unit = (UNIT_POS_Y * LANES as u32 + UNIT_POS_X) as usize;
    let rows = sizes.rows();
    let first_row = CUBE_POS_X as usize * tile.rows;
    let def = MmaDefinition::<E, E, f32>::new(M, N, K);

    let mut queries = Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(tile.rows * tile.stride()), 128usize);
    let mut keys =
        Shared::<[Vector<E, V>]>::new_aligned_slice(comptime!(tile.stages * tile.keys * tile.stride()), 128usize);
    // [slices, rows, keys], in pairs of keys
    let score_count = comptime!(tile.slices * tile.rows * tile.score_stride());
    let mut scores = Shared::<[Vector<f32, P>]>::new_aligned_slice(score_count, 16usize);
    // [rows, keys], in pairs of keys
    let mut weights = Shared::<[Vector<E, P>]>::new_aligned_slice(comptime!(tile.rows * tile.weight_stride()), 16usize);
    // By how much each row's accumulators shrink.
    let mut factors = Shared::<[f32]>::new_slice(tile.rows);
    let arrived = stage_barriers(unit, tile);

    let own = OwnRow { row: unit / comptime!(tile.row_units()), place: unit % comptime!(tile.row_units()) };
    let row = first_row + own.row;
    let size!(NC) = def.vector_size(MatrixIdent::Accumulator);
    let mut acc = accumulators::<NC>(tile);

    // Tiles computed so far, of all items: says which stage is next, and how often it was filled.
    let mut turn = 0u32;
    let mut item = cube_ptr[CUBE_POS_Y as usize] as usize;
    let end_item = cube_ptr[CUBE_POS_Y as usize + 1] as usize;
    while item < end_item {
        let sequence = items[item * 4] as usize;
        let first_key = items[item * 4 + 1] as usize;
        let end_key = items[item * 4 + 2] as usize;
        let mut row_end = 0usize;
        if row < rows {
            row_end = sizes.visible_end(seq_lens, sequence, row, end_key, tile.causal);
        }
        let last_row = min(first_row + comptime!(tile.rows - 1), rows - 1);
        let tile_end = sizes.visible_end(seq_lens, sequence, last_row, end_key, tile.causal);
        let pages = sizes.pages(sequence);

        // Keys first: they are the longer way.
        #[unroll]
        for ahead in 0..comptime!(tile.stages - 1) {
            let (turn, base) = (turn + ahead as u32, first_key + ahead * tile.keys);
            load_keys::<E, V>(&kv_cache, page_table, &mut keys, &arrived, &pages, turn, base, tile_end, tile);
        }
        load_queries::<E, V>(q, &mut queries, sequence * rows, first_row, rows, unit, tile);
        clear_all::<NC>(&mut acc, tile);
        let mut state = SoftmaxState::new();
        let mut base = first_key;
        while base < tile_end {
            // All planes are done with the tile before, whose stage is filled anew.
            sync_cube();
            let ahead_turn = turn + comptime!(tile.stages as u32 - 1);
            let ahead = base + comptime!((tile.stages - 1) * tile.keys);
            load_keys::<E, V>(&kv_cache, page_table, &mut keys, &arrived, &pages, ahead_turn, ahead, tile_end, tile);
            // All lanes execute `ldmatrix` together, whichever keys there were for them to copy.
            sync_plane();
            let stage = turn % comptime!(tile.stages as u32);
            wait_for_stage(&arrived, stage, turn / comptime!(tile.stages as u32) % 2, tile);
            let stage_start = stage as usize * comptime!(tile.keys * tile.stride());
            score::<E, V, P>(&def, &queries, &keys, stage_start, &mut scores, tile);
            sync_cube();
            weigh::<E, P>(&mut state, &scores, &mut weights, &mut factors, &own, base, row_end, softmax_scale, tile);
            sync_cube();
            scale_rows::<E, NC>(&def, &mut acc, &factors, tile);
            accumulate::<E, V, P, NC>(&def, &weights, &keys, stage_start, &mut acc, tile);
            base += tile.keys;
            turn += 1;
        }
        // Tiles past the end, which were loaded ahead, took their turns, too.
        turn += comptime!(tile.stages as u32 - 1);

        let total = row_sum(state.sum, tile);
        // The last tile's factors have been used by all.
        sync_cube();
        if own.place == 0 {
            let end = RowEnd::of(state.highest, total, row_end > first_key, empty_lse);
            factors[own.row] = end.factor;
            if row < rows {
                partial_lse[item * rows + row] = end.lse;
            }
        }
        sync_cube();
        scale_rows::<E, NC>(&def, &mut acc, &factors, tile);
        write_out::<E, P, NC>(&def, &acc, partial_out, item * rows, first_row, rows, tile);
        item += 1;
    }
}

/// Every tile where it fits, for V3's rows.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::{AddressType, FloatKind};

    use self::tile::MMA_TILES;
    use crate::cache_rows::{OFFLINE_FP8, RowFormat, offline_rows};
    use crate::mla_decode::problem::KernelSizesLaunch;
    use crate::offline::{Arch, Entry, form};
    let entry_of = |kind, bits, tile: MmaTile, format: RowFormat| {
        let MmaTile { rows, keys, key_groups, causal, .. } = tile;
        let mut name = format!("mla_decode.mma.{rows}x{keys}.{key_groups}");
        name += if causal { "" } else { ".full" };
        name += if bits == AddressType::U64 { ".64_bits" } else { "" };
        name += if format == RowFormat::Dense { "" } else { ".fp8" };
        let (dim, elem) = (CubeDim::new_2d(LANES as u32, PLANES as u32), ElemType::Float(kind));
        #[rustfmt::skip]
        let form = form!(decode_mma_kernel, dim, [
            bits, VECTOR, 2, _, offline_rows(format, [576, VECTOR]), _, _, _, _, _, _, KernelSizesLaunch::new(1, 1, 1, 1, 1), 1.0, 1, tile, elem
        ]);
        let fits = move |arch: Arch| arch >= Arch::Sm80 && tile.shared_bytes() <= arch.shared_memory();
        Entry::of(kind, &name, form).unchecked().on(fits)
    };
    let entry = |kind, bits, tile| entry_of(kind, bits, tile, RowFormat::Dense);
    let tiles = MMA_TILES.map(|choice| MmaTile::new(choice, (576, 512), true));
    let all = tiles.map(|tile| entry(FloatKind::BF16, AddressType::U32, tile));
    // Of a rank with 16 heads, and of all 128, on a Hopper.
    let usual = [16, 128].into_iter().flat_map(|heads| {
        let choose =
            |causal| best_mma_tile(heads, (576, 512), causal, Arch::Sm90a.shared_memory()).expect("V3 has a tile");
        [
            entry(FloatKind::F16, AddressType::U32, choose(true)),
            entry(FloatKind::BF16, AddressType::U32, choose(false)),
            entry(FloatKind::BF16, AddressType::U64, choose(true)),
            entry_of(FloatKind::BF16, AddressType::U32, choose(true), OFFLINE_FP8),
        ]
        .map(|entry| entry.on(|arch| arch == Arch::Sm90a))
    });
    all.into_iter().chain(usual).collect()
}
