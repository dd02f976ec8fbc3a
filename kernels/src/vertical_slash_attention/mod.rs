//! Attention to the keys of a vertical-slash index, for every runtime.
//!
//! One cube attends one tile (`tiles/attention.rs`) of the queries of a block row to the row's keys, `TILE` at a time:
//! first those of its key blocks, then its columns. A key's place in this order gives its position, whatever the block
//! size is, so that a tile may hold the end of one block, another block and some columns. Positions of a tile are looked
//! up once, into shared memory; rows of k and v are gathered with them, in vectors. A row's channels lie side by side, so
//! that gathering costs no more than reading neighbours.
//!
//! Every row of `out` and `lse` is cleared first: queries that belong to no sequence, or see no key, stay so.

mod keys;

use cubecl::prelude::*;
use thiserror::Error;

use self::keys::{KeyList, Keys};
use crate::common::device::{DeviceError, UNITS, check_device};
use crate::common::launch::share;
use crate::tiles::attention;
use crate::tiles::attention::{DEPTH, NEG_INFINITY_BITS, TILE, TileAttention};

/// The shared memory of a cube, in bytes: that of its attention, and the positions of a tile's keys.
const SHARED_BYTES: usize = attention::SHARED_BYTES + TILE * size_of::<i32>();
/// Bytes that a unit loads at once.
const LOAD_BYTES: usize = 16;

const _: () = assert!(SHARED_BYTES <= 32 * 1024, "wgpu's devices have 32 KiB");

/// How the sequences of a batch lie in a tensor of `tokens` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Sequence `b` begins at row `b * stride`, and `bounds[b]` is its length. `bounds` is `[B]`.
    Padded {
        /// The same for queries.
        query_stride: usize,
        /// The same for keys.
        key_stride: usize,
    },
    /// Sequence `b` is the rows `bounds[b] .. bounds[b + 1]`. `bounds` is `[B + 1]`.
    Packed,
}

/// Arguments of [`launch`]. B sequences, H query heads, G heads of keys; E is `elem`.
pub struct AttentionArgs {
    /// E `[query_tokens, H, key_width]`.
    pub q: BufferArg,
    /// E `[key_tokens, G, key_width]`.
    pub k: BufferArg,
    /// E `[key_tokens, G, value_width]`.
    pub v: BufferArg,
    /// i32: where the queries of each sequence are, as `layout` says. Taken as within the tensor.
    pub q_bounds: BufferArg,
    /// i32: where the keys of each sequence are.
    pub kv_bounds: BufferArg,
    /// i32 `[B, H, rows]`: key blocks of each block row; taken as within `0 ..= max_blocks`.
    pub block_count: BufferArg,
    /// i32 `[B, H, rows, max_blocks]`: the first key of each; keys that the sequence does not have are not seen.
    pub block_offset: BufferArg,
    /// i32 `[B, H, rows]`: single keys of each block row; taken as within `0 ..= max_columns`.
    pub column_count: BufferArg,
    /// i32 `[B, H, rows, max_columns]`: positions of single keys.
    pub column_index: BufferArg,
    /// E `[query_tokens, H, value_width]`, written: 0 for a query that sees no key.
    pub out: BufferArg,
    /// f32 `[query_tokens, H]`, written: the natural logarithm of the sum, -inf for a query that sees no key.
    pub lse: BufferArg,
    /// How the sequences lie in q, k and v.
    pub layout: Layout,
    /// B.
    pub batch: usize,
    /// Rows of q.
    pub query_tokens: usize,
    /// Rows of k and v.
    pub key_tokens: usize,
    /// H, a multiple of G.
    pub heads: usize,
    /// G.
    pub kv_heads: usize,
    /// Channels of q and k, at least 1.
    pub key_width: usize,
    /// Channels of v, at least 1.
    pub value_width: usize,
    /// Block rows of a sequence. Queries past the last one see no key.
    pub rows: usize,
    /// Capacity of the block lists.
    pub max_blocks: usize,
    /// Capacity of the column lists.
    pub max_columns: usize,
    /// Queries in a block row, at least 1.
    pub block_size_m: usize,
    /// Keys in a key block, at least 1.
    pub block_size_n: usize,
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// Scaled scores `s` become `softcap * tanh(s / softcap)`; 0 leaves them as they are.
    pub softcap: f32,
    /// Query `i` sees the keys up to position `i + kv_len - q_len`; otherwise all of its row's.
    pub causal: bool,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Why [`launch`] did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VerticalSlashError {
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Keys or values without a channel.
    #[error("a key has {key_width} channels and a value {value_width}: both need at least 1")]
    Width {
        /// Channels of a key.
        key_width: usize,
        /// Channels of a value.
        value_width: usize,
    },
    /// Query heads that cannot be dealt out to the heads of the keys.
    #[error("{heads} query heads are no multiple of {kv_heads} heads of keys")]
    Heads {
        /// H.
        heads: usize,
        /// G.
        kv_heads: usize,
    },
    /// More cubes than the device launches at once.
    #[error(
        "{batch} sequences of {rows} block rows and {heads} heads need more cubes than the device launches at once"
    )]
    Cubes {
        /// B.
        batch: usize,
        /// Block rows of a sequence.
        rows: usize,
        /// H.
        heads: usize,
    },
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("a tensor of {0} elements needs 64-bit offsets, which the device does not have")]
    Offsets(usize),
}

/// Computes `out` and `lse`: attention of every query to the keys of its block row, sums in f32.
///
/// # Errors
/// What the device lacks; nothing was launched.
pub fn launch(client: &Client, args: AttentionArgs) -> Result<(), VerticalSlashError> {
    if args.query_tokens * args.heads == 0 {
        return Ok(());
    }
    let (key_width, value_width, heads, kv_heads) = (args.key_width, args.value_width, args.heads, args.kv_heads);
    if key_width == 0 || value_width == 0 {
        return Err(VerticalSlashError::Width { key_width, value_width });
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(VerticalSlashError::Heads { heads, kv_heads });
    }
    check_device(client, args.elem, SHARED_BYTES)?;
    let address = address_type(client, &args)?;
    let count = cube_count(client, &args)?;
    let elements = args.query_tokens * heads * value_width;
    let dim = CubeDim::new_1d(UNITS as u32);
    let clear_count = cubecl::calculate_cube_count_elemwise(client, elements, dim);
    let (out, lse) = (share(&args.out), share(&args.lse));
    clear_rows::launch(client, clear_count, dim, address, out, lse, elements, value_width, args.elem);
    // Without keys there is no more to do, and some devices have no buffers without elements.
    if args.batch * args.rows * args.key_tokens == 0 {
        return Ok(());
    }
    let vector = vector_size(client, &args);
    let (query_stride, key_stride) = match args.layout {
        Layout::Padded { query_stride, key_stride } => (query_stride, key_stride),
        Layout::Packed => (0, 0),
    };
    attend_rows::launch(
        client,
        count,
        dim,
        address,
        vector,
        args.q,
        args.k,
        args.v,
        args.q_bounds,
        args.kv_bounds,
        args.block_count,
        args.block_offset,
        args.column_count,
        args.column_index,
        args.out,
        args.lse,
        args.query_tokens as u32,
        args.key_tokens as u32,
        query_stride as u32,
        key_stride as u32,
        kv_heads as u32,
        args.rows as u32,
        args.max_blocks as u32,
        args.max_columns as u32,
        args.block_size_m as u32,
        args.block_size_n as u32,
        args.softmax_scale,
        args.softcap,
        key_width,
        value_width,
        args.layout == Layout::Packed,
        args.softcap != 0.0,
        args.causal,
        args.elem,
    );
    Ok(())
}

/// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
fn address_type(client: &Client, args: &AttentionArgs) -> Result<AddressType, VerticalSlashError> {
    let lists = args.batch * args.heads * args.rows;
    let queries = args.query_tokens * args.heads * args.key_width.max(args.value_width);
    let keys = args.key_tokens * args.kv_heads * args.key_width.max(args.value_width);
    let elements = queries.max(keys).max(lists * args.max_blocks.max(args.max_columns).max(1));
    let address = AddressType::from_len(elements);
    if !client.features().supports_address(address) {
        return Err(VerticalSlashError::Offsets(elements));
    }
    Ok(address)
}

/// Cubes along x for each block row and part of it, along y for each head, along z for each sequence.
fn cube_count(client: &Client, args: &AttentionArgs) -> Result<CubeCount, VerticalSlashError> {
    let max = client.properties().hardware.max_cube_count;
    let (batch, rows, heads) = (args.batch, args.rows, args.heads);
    let x = rows.saturating_mul(args.block_size_m.div_ceil(TILE));
    let tokens = args.query_tokens.max(args.key_tokens);
    if tokens > i32::MAX as usize || x > max.0 as usize || heads > max.1 as usize || batch > max.2 as usize {
        return Err(VerticalSlashError::Cubes { batch, rows, heads });
    }
    Ok(CubeCount::Static(x as u32, heads as u32, batch as u32))
}

/// Elements that a unit loads at once: as many as divide all rows and the slices of them in shared memory.
fn vector_size(client: &Client, args: &AttentionArgs) -> usize {
    let divides = |size: &usize| {
        let widths = [args.key_width, args.value_width, DEPTH, TILE];
        widths.into_iter().all(|width| width.is_multiple_of(*size)) && size * args.elem.size() <= LOAD_BYTES
    };
    client.io_optimized_vector_sizes(args.elem.size()).find(divides).unwrap_or(1)
}

/// Rows of queries that see nothing. A unit per element.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn clear_rows<E: Float>(
    out: &mut [E],
    lse: &mut [f32],
    elements: usize,
    value_width: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < elements {
        let column = at % value_width;
        out[at] = E::from_int(0);
        if column == 0 {
            lse[at / value_width] = f32::from_bits(NEG_INFINITY_BITS);
        }
    }
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn attend_rows<E: Float, W: Size>(
    q: &[Vector<E, W>],
    k: &[Vector<E, W>],
    v: &[Vector<E, W>],
    q_bounds: &[i32],
    kv_bounds: &[i32],
    block_count: &[i32],
    block_offset: &[i32],
    column_count: &[i32],
    column_index: &[i32],
    out: &mut [E],
    lse: &mut [f32],
    query_tokens: u32,
    key_tokens: u32,
    query_stride: u32,
    key_stride: u32,
    kv_heads: u32,
    rows: u32,
    max_blocks: u32,
    max_columns: u32,
    block_size_m: u32,
    block_size_n: u32,
    softmax_scale: f32,
    softcap: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] packed: bool,
    #[comptime] capped: bool,
    #[comptime] causal: bool,
    #[define(E)] _elem: ElemType,
) {
    let sequence = CUBE_POS_Z;
    let parts = (block_size_m - 1) / comptime!(TILE as u32) + 1;
    let row = CUBE_POS_X / parts;
    let queries = span(q_bounds, sequence, query_stride, query_tokens, packed);
    let kv = span(kv_bounds, sequence, key_stride, key_tokens, packed);
    let first = row * block_size_m + CUBE_POS_X % parts * comptime!(TILE as u32);
    let end = min((row + 1) * block_size_m, queries.len);
    // A branch, not a return: the barriers below must be met by all units of a cube, and this says that they are.
    if first < end {
        let at = (sequence as usize * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize) * rows as usize + row as usize;
        let list = KeyList {
            first_block: at * max_blocks as usize,
            in_blocks: min(u32::cast_from(max(block_count[at], 0)), max_blocks) * block_size_n,
            block_size: block_size_n,
            first_column: at * max_columns as usize,
            columns: min(u32::cast_from(max(column_count[at], 0)), max_columns),
            end: kv.len,
        };
        let mut attention = TileAttention::new(queries.first + first, queries.first + end, key_width, value_width);
        let mut keys = Keys {
            positions: Shared::<[i32]>::new_slice(TILE),
            place: 0u32.runtime(),
            places: list.in_blocks + list.columns,
            first: kv.first,
            head: CUBE_POS_Y / (CUBE_COUNT_Y / kv_heads),
            heads: kv_heads,
            query: i32::cast_from(first) + i32::cast_from(kv.len) - i32::cast_from(queries.len),
            softmax_scale,
            softcap,
            capped,
            causal,
        };
        while keys.place < keys.places {
            keys.find(block_offset, column_index, &list);
            attention.add_keys::<E, W, Keys>(q, k, v, &keys);
            keys.place += comptime!(TILE as u32);
        }
        attention.write::<E>(out, lse);
    }
}

/// Rows of a tensor that belong to a sequence.
#[derive(CubeType)]
struct Span {
    first: u32,
    len: u32,
}

#[cube]
fn span(bounds: &[i32], sequence: u32, stride: u32, tokens: u32, #[comptime] packed: bool) -> Span {
    let entry = u32::cast_from(max(bounds[sequence as usize], 0));
    let mut first = sequence * stride;
    let mut len = min(entry, stride);
    if packed {
        first = min(entry, tokens);
        let end = min(u32::cast_from(max(bounds[sequence as usize + 1], 0)), tokens);
        len = max(end, first) - first;
    }
    Span { first, len }
}

/// Packed and causal with V3's channels; padded, capped and not causal with 128.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, FloatKind, form};
    let (bits, dim) = (AddressType::U32, CubeDim::new_1d(UNITS as u32));
    let attend = |name, kind, key_width, (packed, capped, causal): (bool, bool, bool)| {
        let elem = ElemType::Float(kind);
        // Divides all widths.
        let n = LOAD_BYTES / elem.size();
        #[rustfmt::skip]
        let form = form!(attend_rows, dim, [
            bits, n, _, _, _, _, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1.0, 1.0,
            key_width, 128, packed, capped, causal, elem
        ]);
        Entry::of(kind, name, form)
    };
    let packed = FLOATS.map(|kind| attend("vertical_slash_attention.packed", kind, 192, (true, false, true)));
    let padded = attend("vertical_slash_attention.padded", FloatKind::F16, 128, (false, true, false));
    let clear = FLOATS.map(|kind| {
        let elem = ElemType::Float(kind);
        Entry::of(kind, "vertical_slash_attention.clear", form!(clear_rows, dim, [bits, _, _, 1, 1, elem]))
    });
    packed.into_iter().chain([padded]).chain(clear).collect()
}
