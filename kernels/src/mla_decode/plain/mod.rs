//! Decode for any device: plain arithmetic, no matrix instructions.
//!
//! # Shared memory
//! At most 32 KiB, whatever the device has: a tile of query rows and a tile of keys in the element type (rows are padded by
//! one vector against bank conflicts), and the scores of the tile in f32. D = 576 fits with 8 rows and 16 keys of two bytes
//! each (29.0 KiB), or with 4 rows and 8 keys of f32 (28.4 KiB). The tiles are halved until they fit; a single row and key
//! of more than 32 KiB are refused.

mod loads;
mod products;
mod tile;

use cubecl::prelude::*;

use self::loads::{find_slots, load_keys, load_queries};
use self::products::{accumulate, score, score_of, write_out};
use self::tile::UNITS;
#[cfg(feature = "offline")]
use self::tile::largest_plain_tile;
pub(super) use self::tile::{PLAIN_ROWS, Tile, plain_tile};
use super::problem::{DecodeArgs, Grid, KernelSizes, LOWEST};
use super::row::RowEnd;
use crate::cache_rows::CacheRows;
use crate::common::launch::or_dummy;

/// Bytes of a key at most: beside it, a query row and the scores fit into the shared memory.
pub const MAX_KEY_BYTES: usize = 16_000;

/// Launches the kernel.
pub(super) fn launch(client: &Client, args: DecodeArgs, tile: Tile, grid: Grid) {
    let sizes = args.sizes;
    decode_kernel::launch(
        client,
        grid.cubes,
        CubeDim::new_1d(UNITS as u32),
        grid.address,
        tile.vector,
        args.q,
        args.kv_cache.rows(client, [sizes.slots(), sizes.key_width, tile.vector]),
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

/// Cube `(t, c)` computes tile `t` of the query rows for the items of cube `c` of the plan.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn decode_kernel<E: Float, V: Size>(
    q: &[Vector<E, V>],
    kv_cache: CacheRows<E, V>,
    page_table: &[i32],
    seq_lens: &[i32],
    items: &[i32],
    cube_ptr: &[i32],
    partial_out: &mut [Vector<f32, V>],
    partial_lse: &mut [f32],
    sizes: KernelSizes,
    softmax_scale: f32,
    // Of -inf, which a shader cannot write as a constant.
    empty_lse: u32,
    #[comptime] tile: Tile,
    #[define(E)] _elem: ElemType,
) {
    let unit = UNIT_POS as usize;
    let rows = sizes.rows();
    let first_row = CUBE_POS_X as usize * tile.rows;

    let mut queries = Shared::<[Vector<E, V>]>::new_slice(comptime!(tile.rows * tile.stride()));
    let mut keys = Shared::<[Vector<E, V>]>::new_slice(comptime!(tile.keys * tile.stride()));
    // The row of the cache that each key of the next tile is in.
    let mut slots = Shared::<[u32]>::new_slice(tile.keys);
    // [slices, rows, keys]
    let mut scores = Shared::<[f32]>::new_slice(comptime!(tile.slices * tile.rows * tile.keys));
    // [rows, keys]
    let mut weights = Shared::<[f32]>::new_slice(comptime!(tile.rows * tile.keys));
    // By how much each row's accumulators shrink.
    let mut factors = Shared::<[f32]>::new_slice(tile.rows);

    // The row and the key of the tile whose weight this unit computes.
    let has_weight = unit < comptime!(tile.rows * tile.keys);
    let weight_row = unit / tile.keys;
    let weight_key = unit % tile.keys;
    let row = first_row + weight_row;

    let mut acc = Array::<Vector<f32, V>>::new(comptime!(tile.group_rows() * tile.unit_vectors()));

    let mut item = cube_ptr[CUBE_POS_Y as usize] as usize;
    let end_item = cube_ptr[CUBE_POS_Y as usize + 1] as usize;
    while item < end_item {
        let sequence = items[item * 4] as usize;
        let first_key = items[item * 4 + 1] as usize;
        let end_key = items[item * 4 + 2] as usize;

        // Keys that this unit's row sees, and those that any row of the tile does.
        let mut row_end = 0usize;
        if row < rows {
            row_end = sizes.visible_end(seq_lens, sequence, row, end_key, tile.causal);
        }
        let last_row = min(first_row + comptime!(tile.rows - 1), rows - 1);
        let tile_end = sizes.visible_end(seq_lens, sequence, last_row, end_key, tile.causal);

        load_queries::<E, V>(q, &mut queries, sequence * rows, first_row, rows, tile);
        let pages = sizes.pages(sequence);
        find_slots(page_table, &mut slots, &pages, first_key, tile_end, tile);
        #[unroll]
        for i in 0..comptime!(tile.group_rows() * tile.unit_vectors()) {
            acc[i] = Vector::new(0.0f32);
        }
        let mut state = SoftmaxState { highest: f32::new(LOWEST), sum: 0.0f32 };
        sync_cube();

        let mut base = first_key;
        while base < tile_end {
            load_keys::<E, V>(&kv_cache, &mut keys, &slots, base, tile_end, tile);
            sync_cube();
            score::<E, V>(&queries, &keys, &mut scores, tile);
            find_slots(page_table, &mut slots, &pages, base + tile.keys, tile_end, tile);
            sync_cube();
            if has_weight {
                let factor = weigh(
                    &mut state,
                    &scores,
                    &mut weights,
                    weight_row,
                    weight_key,
                    base,
                    row_end,
                    softmax_scale,
                    tile,
                );
                if weight_key == 0 {
                    factors[weight_row] = factor;
                }
            }
            sync_cube();
            accumulate::<E, V>(&keys, &weights, &factors, &mut acc, min(tile_end - base, tile.keys), tile);
            sync_cube();
            base += tile.keys;
        }

        if has_weight {
            weights[unit] = state.sum;
        }
        sync_cube();
        if has_weight && weight_key == 0 {
            let mut total = 0.0f32;
            for k in 0..tile.keys {
                total += weights[unit + k];
            }
            let end = RowEnd::of(state.highest, total, row_end > first_key, empty_lse);
            factors[weight_row] = end.factor;
            if row < rows {
                partial_lse[item * rows + row] = end.lse;
            }
        }
        sync_cube();
        write_out::<V>(&acc, &factors, partial_out, item * rows, first_row, rows, tile);
        item += 1;
    }
}

/// Of a row: its highest score, and the sum of the weights that this unit has computed.
#[derive(CubeType, Clone, Copy)]
struct SoftmaxState {
    highest: f32,
    sum: f32,
}

/// Computes this unit's weight of a tile of keys, of which `base` is the first and the row sees those before `end`. Returns
/// the factor that the output so far shrinks by.
#[cube]
fn weigh(
    state: &mut SoftmaxState,
    scores: &Shared<[f32]>,
    weights: &mut Shared<[f32]>,
    row: usize,
    key: usize,
    base: usize,
    end: usize,
    softmax_scale: f32,
    #[comptime] tile: Tile,
) -> f32 {
    let mut top = state.highest;
    for k in 0..tile.keys {
        if base + k < end {
            top = max(top, score_of(scores, row, k, tile) * softmax_scale);
        }
    }
    let mut weight = 0.0f32;
    if base + key < end {
        weight = (score_of(scores, row, key, tile) * softmax_scale - top).exp();
    }
    let factor = (state.highest - top).exp();
    state.sum = state.sum * factor + weight;
    state.highest = top;
    weights[UNIT_POS as usize] = weight;
    factor
}

/// V3's rows: any number of heads from 8 on has the same tile.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::AddressType;

    use crate::cache_rows::{OFFLINE_FP8, RowFormat, offline_rows};
    use crate::mla_decode::problem::{DecodeSizes, KernelSizesLaunch};
    use crate::offline::{Entry, FLOATS, FloatKind, form};
    let entry = |name, kind, causal, rows| {
        let elem = ElemType::Float(kind);
        let sizes = DecodeSizes { causal, rows, ..DecodeSizes::one_sequence(elem, 128, (576, 512)) };
        let tile = largest_plain_tile(&sizes, usize::MAX).expect("V3's keys fit");
        let (bits, dim) = (AddressType::U32, CubeDim::new_1d(UNITS as u32));
        #[rustfmt::skip]
        let form = form!(decode_kernel, dim, [
            bits, tile.vector, _, offline_rows(rows, [576, tile.vector]), _, _, _, _, _, _, KernelSizesLaunch::new(1, 1, 1, 1, 1), 1.0, 1, tile, elem
        ]);
        Entry::of(kind, name, form)
    };
    let causal = FLOATS.map(|kind| entry("mla_decode.plain.causal", kind, true, RowFormat::Dense));
    let fp8 = FLOATS.map(|kind| entry("mla_decode.plain.fp8", kind, true, OFFLINE_FP8));
    let full = entry("mla_decode.plain.full", FloatKind::F16, false, RowFormat::Dense);
    causal.into_iter().chain(fp8).chain([full]).collect()
}
