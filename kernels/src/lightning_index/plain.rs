//! Ranks of the scores of a tile of keys, for one query token.

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::problem::{LightningIndexArgs, LightningIndexSizes, one_each, visible_keys};
use crate::cache_rows::CacheRows;
use crate::common::device::UNITS;
use crate::common::keys::SequencePages;
use crate::common::launch::share;

/// Units along a side of a cube that scores.
const SIDE: usize = 16;
/// Keys of a unit; they are a cube's side apart, so that neighbours read neighbouring banks.
const UNIT_KEYS: usize = 4;
/// Heads of a unit at most: 64 of a cube, as many as DeepSeek's models have.
const MAX_UNIT_HEADS: usize = 4;
/// Keys that a cube scores.
const TILE: usize = SIDE * UNIT_KEYS;
/// Channels that are in shared memory together.
const DEPTH: usize = 32;
/// Row stride in shared memory. Odd: units that read a column read different banks.
const STRIDE: usize = DEPTH + 1;
/// Bytes that a unit loads at once.
const LOAD_BYTES: usize = 16;

/// The rank of a score of 0.
const RANK_OF_ZERO: u32 = 1 << 31;
/// The bits of +inf.
const INFINITY_BITS: u32 = 0x7f80_0000;

const _: () = assert!(SIDE * SIDE == UNITS, "a unit for each place");
const _: () = assert!(SIDE * TILE <= stage_len(1), "the sums fit where the channels were");
const _: () = assert!((stage_len(MAX_UNIT_HEADS) + TILE) * 4 <= 32 * 1024, "wgpu's devices have 32 KiB");

/// Elements of the shared memory that holds a slice of channels of heads and keys.
const fn stage_len(unit_heads: usize) -> usize {
    (unit_heads * SIDE + TILE) * STRIDE
}

/// The shared memory of a cube, in bytes: heads and keys, and where the keys are.
pub(super) fn shared_bytes(sizes: &LightningIndexSizes) -> usize {
    (stage_len(unit_heads(sizes)) + TILE) * size_of::<f32>()
}

/// Heads of a unit.
fn unit_heads(sizes: &LightningIndexSizes) -> usize {
    sizes.heads.div_ceil(SIDE).next_power_of_two().min(MAX_UNIT_HEADS)
}

/// Elements that a unit loads at once: as many as divide the rows and the slices of them in shared memory.
fn vector_size(client: &Client, sizes: &LightningIndexSizes) -> usize {
    let (width, size) = (sizes.width, sizes.elem.size());
    let divides = |n: &usize| width.is_multiple_of(*n) && DEPTH.is_multiple_of(*n) && n * size <= LOAD_BYTES;
    client.io_optimized_vector_sizes(size).find(divides).unwrap_or(1)
}

/// Scores the keys of `rows` query tokens, from `first_row` on: a cube for each of them and tile of keys.
pub(super) fn launch(client: &Client, args: &LightningIndexArgs, address: AddressType, first_row: usize, rows: usize) {
    let sizes = &args.sizes;
    let (vector, tiles) = (vector_size(client, sizes), sizes.max_keys().div_ceil(TILE));
    score_kernel::launch(
        client,
        one_each(client, rows * tiles),
        CubeDim::new_1d(UNITS as u32),
        address,
        vector,
        share(&args.q),
        args.keys.share().rows(client, [sizes.slots(), sizes.width, vector]),
        share(&args.page_table),
        share(&args.head_weights),
        share(&args.visible),
        share(&args.scores),
        first_row,
        rows,
        sizes.query_len,
        sizes.heads,
        sizes.width / vector,
        sizes.max_pages,
        sizes.max_keys() as u32,
        sizes.score_stride(),
        tiles,
        sizes.slots() as u32,
        sizes.page_size.ilog2(),
        sizes.k as u32,
        args.scale,
        unit_heads(sizes),
        sizes.elem,
        args.weights_elem,
    );
}

/// Ranks of the scores of a tile of keys, for one query token.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn score_kernel<E: Float, W: Float, V: Size>(
    q: &[Vector<E, V>],
    keys: CacheRows<E, V>,
    page_table: &[i32],
    head_weights: &[W],
    visible: &[i32],
    scores: &mut [u32],
    first_row: usize,
    rows: usize,
    query_len: usize,
    heads: usize,
    width: usize,
    max_pages: usize,
    max_keys: u32,
    stride: usize,
    tiles: usize,
    slot_count: u32,
    page_shift: u32,
    k: u32,
    scale: f32,
    #[comptime] unit_heads: usize,
    #[define(E)] _elem: ElemType,
    #[define(W)] _weights_elem: ElemType,
) {
    let row = first_row + CUBE_POS / tiles;
    let first_key = CUBE_POS % tiles * TILE;
    let mut count = 0usize.runtime();
    if CUBE_POS < rows * tiles {
        count = visible_keys(visible, row, max_keys);
    }
    // A branch, not a return: the barriers below must be met by all units of a cube, and this says that they are.
    if count > k as usize && count > first_key {
        let unit = UNIT_POS as usize;
        let (x, y) = (unit % SIDE, unit / SIDE);
        let mut stage = Shared::<[f32]>::new_slice(comptime!(stage_len(unit_heads)));
        let mut slots = Shared::<[u32]>::new_slice(TILE);
        let tile_keys = min(count - first_key, TILE);
        if unit < tile_keys {
            let pages = SequencePages { table_row: row / query_len * max_pages, page_shift, slot_count };
            slots[unit] = pages.slot(page_table, first_key + unit);
        }

        // Of the keys `x + 16 j`, over the heads `y + 16 i`.
        let mut sums = zeros(UNIT_KEYS);
        let mut head = 0usize.runtime();
        while head < heads {
            let block =
                Block { query: row * heads + head, heads: min(heads - head, comptime!(unit_heads * SIDE)), tile_keys };
            let products = products::<E, V>(q, &keys, &mut stage, &slots, &block, width, unit_heads);
            #[unroll]
            for i in 0..unit_heads {
                let own = y + comptime!(i * SIDE);
                // Not even with a weight of 0: where there is no head, the product with an infinite key is NaN.
                if own < block.heads {
                    let weight = f32::cast_from(head_weights[block.query + own]);
                    #[unroll]
                    for j in 0..UNIT_KEYS {
                        let product = products[comptime!(i * UNIT_KEYS + j)];
                        // Not the maximum with 0, which of NaN would be 0.
                        sums[j] += weight * select(product < 0.0, 0.0, product);
                    }
                }
            }
            head += comptime!(unit_heads * SIDE);
        }

        #[unroll]
        for j in 0..UNIT_KEYS {
            stage[y * TILE + x + comptime!(j * SIDE)] = sums[j];
        }
        sync_cube();
        // Past the last key too: the selection loads ranks that it does not look at.
        if unit < min(stride - first_key, TILE) {
            let mut score = 0.0f32;
            for part in 0..SIDE {
                score += stage[part * TILE + unit];
            }
            if unit < tile_keys {
                score = keys.with_scale(score, slots[unit] as usize);
            }
            scores[(row - first_row) * stride + first_key + unit] = rank(score * scale);
        }
    }
}

/// Some heads of a query token, and the keys of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Block {
    /// The row of q that is the first head.
    query: usize,
    /// Heads.
    heads: usize,
    /// Keys.
    tile_keys: usize,
}

/// Products of queries and keys: heads `y + 16 i`, keys `x + 16 j` for the unit (x, y), at `4 i + j`. Leaves the shared
/// memory free.
#[cube]
fn products<E: Float, V: Size>(
    q: &[Vector<E, V>],
    keys: &CacheRows<E, V>,
    stage: &mut Shared<[f32]>,
    slots: &Shared<[u32]>,
    block: &Block,
    width: usize,
    #[comptime] unit_heads: usize,
) -> Array<f32> {
    let vector = V::value().comptime();
    let mut products = zeros(comptime!(unit_heads * UNIT_KEYS));
    let mut channel = 0usize.runtime();
    while channel < width {
        // The slots are there, and everybody has read the slice before.
        sync_cube();
        stage_channels::<E, V>(q, keys, stage, slots, block, channel, width, unit_heads);
        sync_cube();
        add_products(stage, &mut products, unit_heads);
        channel += comptime!(DEPTH / vector);
    }
    sync_cube();
    products
}

/// Copies `DEPTH` channels of heads and keys to shared memory, as f32; 0 where there are none.
#[cube]
fn stage_channels<E: Float, V: Size>(
    q: &[Vector<E, V>],
    keys: &CacheRows<E, V>,
    stage: &mut Shared<[f32]>,
    slots: &Shared<[u32]>,
    block: &Block,
    first_channel: usize,
    width: usize,
    #[comptime] unit_heads: usize,
) {
    let vector = V::value().comptime();
    let columns = comptime!(DEPTH / vector);
    let first_key = comptime!(unit_heads * SIDE);
    let mut i = UNIT_POS as usize;
    while i < comptime!((unit_heads * SIDE + TILE) * columns) {
        let row = i / columns;
        let channel = first_channel + i % columns;
        let mut values = Vector::<f32, V>::zeroed();
        if channel < width {
            if row < first_key {
                if row < block.heads {
                    values = Vector::cast_from(q[(block.query + row) * width + channel]);
                }
            } else if row - first_key < block.tile_keys {
                values = Vector::cast_from(keys.load_unscaled(slots[row - first_key] as usize, channel));
            }
        }
        #[unroll]
        for n in 0..vector {
            stage[row * STRIDE + i % columns * vector + n] = values.extract(n);
        }
        i += UNITS;
    }
}

/// Adds the products of the channels in shared memory.
#[cube]
fn add_products(stage: &mut Shared<[f32]>, products: &mut Array<f32>, #[comptime] unit_heads: usize) {
    let x = UNIT_POS as usize % SIDE;
    let y = UNIT_POS as usize / SIDE;
    let first_key = comptime!(unit_heads * SIDE);
    for c in 0..DEPTH {
        let mut key_parts = Array::<f32>::new(UNIT_KEYS);
        #[unroll]
        for j in 0..UNIT_KEYS {
            key_parts[j] = stage[(first_key + x + comptime!(j * SIDE)) * STRIDE + c];
        }
        #[unroll]
        for i in 0..unit_heads {
            let query_part = stage[(y + comptime!(i * SIDE)) * STRIDE + c];
            #[unroll]
            for j in 0..UNIT_KEYS {
                products[comptime!(i * UNIT_KEYS + j)] += query_part * key_parts[j];
            }
        }
    }
}

#[cube]
fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = 0.0f32;
    }
    array
}

/// A number that is greater where the score is, and equal where it is, +0 and -0 included. NaN is below all others. By
/// its bits, for a shader may assume that there is no NaN.
#[cube]
pub(crate) fn rank(score: f32) -> u32 {
    let bits = score.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let mut rank = 0u32;
    if magnitude <= INFINITY_BITS {
        rank = select(bits == magnitude, RANK_OF_ZERO + magnitude, RANK_OF_ZERO - magnitude);
    }
    rank
}

/// With DeepSeek's 64 heads of 128 channels, and with few heads.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::cache_rows::{OFFLINE_FP8_KEYS, RowFormat, offline_rows};
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let entry_of = |name, kind, bits, unit_heads: usize, rows: RowFormat| {
        let (dim, elem) = (CubeDim::new_1d(UNITS as u32), ElemType::Float(kind));
        let n = LOAD_BYTES / elem.size();
        #[rustfmt::skip]
        let form = form!(score_kernel, dim, [
            bits, n, _, offline_rows(rows, [128, n]), _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1.0, unit_heads, elem, elem
        ]);
        Entry::of(kind, name, form)
    };
    let entry = |name, kind, bits, unit_heads| entry_of(name, kind, bits, unit_heads, RowFormat::Dense);
    let many = FLOATS.map(|kind| entry("lightning_index.score", kind, AddressType::U32, MAX_UNIT_HEADS));
    let few = entry("lightning_index.score.few_heads", FloatKind::F16, AddressType::U32, 1);
    let large = entry("lightning_index.score.64_bits", FloatKind::BF16, AddressType::U64, MAX_UNIT_HEADS);
    let fp8 = |kind| entry_of("lightning_index.score.fp8", kind, AddressType::U32, MAX_UNIT_HEADS, OFFLINE_FP8_KEYS);
    many.into_iter().chain([few, large.on(|arch| arch == Arch::Sm90a)]).chain(FLOATS.map(fp8)).collect()
}
