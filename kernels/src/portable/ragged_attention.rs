//! Prefill attention over packed sequences: flash attention in plain loops, for every runtime.
//!
//! One cube of 16 x 16 units owns `TILE` query rows of one sequence and one head and walks over the keys that they see,
//! `TILE` at a time: scores `q k^T` into registers (4 x 4 for a unit), an online softmax over them in shared memory, and
//! `p v` added to the output rows, which stay in registers (4 rows x a sixteenth of the columns for a unit).
//!
//! Shared memory holds a slice of `DEPTH` channels of q and k at a time, never whole rows, so its size does not depend on
//! dqk and dv: `SHARED_BYTES`, 25.75 KiB, within the 32 KiB that wgpu's devices have.
//!
//! The grid is made of what the host knows: a cube finds its sequence by a search over `cu_seqlens`, and a cube too many
//! does nothing.

use cubecl::features::TypeUsage;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use thiserror::Error;

/// Units along a side of the cube.
pub(super) const SIDE: usize = 16;
/// Units of a cube: what every wgpu device has.
pub(super) const UNITS: usize = SIDE * SIDE;
/// Scores of a unit along a side of the tile. They are a cube's side apart, so that neighbours read neighbouring banks.
pub(super) const PER_UNIT: usize = 4;
/// Query rows of a cube, and keys that it looks at together.
pub(super) const TILE: usize = SIDE * PER_UNIT;
/// Channels of q and k, and rows of v, that are in shared memory together.
pub(super) const DEPTH: usize = 32;
/// Units that share the softmax of a row.
pub(super) const PARTS: usize = UNITS / TILE;
/// Row strides in shared memory are odd: units that read a column read different banks.
pub(super) const SCORE_STRIDE: usize = TILE + 1;
/// q and k channels; the scores take their place once they are computed.
pub(super) const STAGE: usize = 2 * TILE * (DEPTH + 1);
/// The shared memory of a cube, in bytes: q and k or the scores, v, one number for each unit and one for each row.
const SHARED_BYTES: usize = (STAGE + DEPTH * TILE + UNITS + TILE) * size_of::<f32>();

const _: () = assert!(TILE * SCORE_STRIDE <= STAGE, "the scores fit where q and k were");
const _: () = assert!(SHARED_BYTES <= 32 * 1024, "wgpu's devices have 32 KiB");

/// A hidden score, and the maximum before the first score. Finite: WGSL may assume that no infinity occurs.
pub(super) const HIDDEN: f32 = -1.0e30;
/// The bits of -inf, for the same reason not written as a number.
pub(super) const NEG_INFINITY_BITS: u32 = 0xff80_0000;

/// Arguments of [`launch`]. N tokens, H heads, B sequences; E is `elem`.
pub struct RaggedAttentionArgs {
    /// E `[N, H, dqk]`.
    pub q: BufferArg,
    /// E `[N, H, dqk]`.
    pub k: BufferArg,
    /// E `[N, H, dv]`.
    pub v: BufferArg,
    /// i32 `[B + 1]`, ascending from 0: sequence `b` is the tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`. Tokens past the
    /// last entry belong to no sequence and may hold anything. Values are taken as within 0 ..= N; where they do not
    /// ascend, rows of `out` and `lse` may be left unwritten.
    pub cu_seqlens: BufferArg,
    /// E `[N, H, dv]`, written: 0 for a token of no sequence.
    pub out: BufferArg,
    /// f32 `[N, H]`, written: the natural logarithm of the sum, -inf for a token of no sequence.
    pub lse: BufferArg,
    /// N.
    pub tokens: usize,
    /// H.
    pub heads: usize,
    /// dqk, at least 1.
    pub key_width: usize,
    /// dv, at least 1.
    pub value_width: usize,
    /// B.
    pub sequences: usize,
    /// The factor of the scores before the softmax.
    pub softmax_scale: f32,
    /// A token sees itself and the tokens of its sequence before it; otherwise its whole sequence.
    pub causal: bool,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// The sizes of [`RaggedAttentionArgs`], under the same names: what decides whether a device can compute it.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct RaggedAttentionSizes {
    pub tokens: usize,
    pub heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub sequences: usize,
    pub elem: ElemType,
}

/// Why [`launch`] did not launch anything.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RaggedAttentionError {
    /// Not f32, f16 or bf16, or the device has no buffers of it or no conversion to f32.
    #[error("the kernel cannot compute with elements of type {0} on this device")]
    Elem(ElemType),
    /// Keys or values without a channel.
    #[error("a key has {key_width} channels and a value {value_width}: both need at least 1")]
    Width {
        /// dqk.
        key_width: usize,
        /// dv.
        value_width: usize,
    },
    /// Too little shared memory.
    #[error("a cube needs {SHARED_BYTES} bytes of shared memory, the device has {0}")]
    SharedMemory(usize),
    /// Too few units.
    #[error("a cube needs {UNITS} units, the device has {0}")]
    Units(u32),
    /// More cubes than the device launches at once.
    #[error(
        "{tokens} tokens in {sequences} sequences of {heads} heads need more cubes than the device launches at once"
    )]
    Cubes {
        /// N.
        tokens: usize,
        /// B.
        sequences: usize,
        /// H.
        heads: usize,
    },
    /// More than 2^32 elements in a tensor, on a device with 32-bit offsets.
    #[error("a tensor of {0} elements needs 64-bit offsets, which the device does not have")]
    Offsets(usize),
}

/// Computes `out` and `lse`: attention of every token over its own sequence, sums in f32.
///
/// # Errors
/// What the device lacks; nothing was launched.
pub fn launch(client: &Client, args: RaggedAttentionArgs) -> Result<(), RaggedAttentionError> {
    if args.tokens == 0 || args.heads == 0 {
        return Ok(());
    }
    let &RaggedAttentionArgs { tokens, heads, key_width, value_width, sequences, elem, .. } = &args;
    let sizes = RaggedAttentionSizes { tokens, heads, key_width, value_width, sequences, elem };
    let (address, count) = prepare(client, &sizes)?;
    attend_tiles::launch(
        client,
        count,
        CubeDim::new_1d(UNITS as u32),
        address,
        args.q,
        args.k,
        args.v,
        args.cu_seqlens,
        args.out,
        args.lse,
        args.tokens as u32,
        args.sequences as u32,
        args.softmax_scale,
        args.key_width,
        args.value_width,
        args.causal,
        args.elem,
    );
    Ok(())
}

/// Whether [`launch`] would run this on a device. Reads nothing and launches nothing.
///
/// # Errors
/// What [`launch`] would give.
pub fn check(client: &Client, sizes: &RaggedAttentionSizes) -> Result<(), RaggedAttentionError> {
    if sizes.tokens == 0 || sizes.heads == 0 { Ok(()) } else { prepare(client, sizes).map(|_| ()) }
}

/// The width of offsets, and the cubes.
fn prepare(client: &Client, sizes: &RaggedAttentionSizes) -> Result<(AddressType, CubeCount), RaggedAttentionError> {
    if sizes.key_width == 0 || sizes.value_width == 0 {
        return Err(RaggedAttentionError::Width { key_width: sizes.key_width, value_width: sizes.value_width });
    }
    check_device(client, sizes.elem)?;
    Ok((address_type(client, sizes)?, cube_count(client, sizes)?))
}

fn check_device(client: &Client, elem: ElemType) -> Result<(), RaggedAttentionError> {
    let hardware = &client.properties().hardware;
    let known = matches!(elem, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16));
    let usage = client.features().type_usage(elem);
    if !known || !usage.contains(TypeUsage::Buffer) || !usage.contains(TypeUsage::Conversion) {
        return Err(RaggedAttentionError::Elem(elem));
    }
    if hardware.max_shared_memory_size < SHARED_BYTES {
        return Err(RaggedAttentionError::SharedMemory(hardware.max_shared_memory_size));
    }
    if (hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize) < UNITS {
        return Err(RaggedAttentionError::Units(hardware.max_units_per_cube));
    }
    Ok(())
}

/// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
fn address_type(client: &Client, args: &RaggedAttentionSizes) -> Result<AddressType, RaggedAttentionError> {
    let elements = args.tokens * args.heads * args.key_width.max(args.value_width);
    let address = AddressType::from_len(elements);
    if !client.features().supports_address(address) {
        return Err(RaggedAttentionError::Offsets(elements));
    }
    Ok(address)
}

/// A cube for each slot (see `find_tile`) and head. Slots go over x, and over z where x is too short.
fn cube_count(client: &Client, args: &RaggedAttentionSizes) -> Result<CubeCount, RaggedAttentionError> {
    let max = client.properties().hardware.max_cube_count;
    let slots = args.tokens / TILE + args.sequences + 1;
    let x = slots.min(max.0 as usize);
    let z = slots.div_ceil(x);
    if args.tokens > i32::MAX as usize || args.heads > max.1 as usize || z > max.2 as usize {
        let (tokens, sequences, heads) = (args.tokens, args.sequences, args.heads);
        return Err(RaggedAttentionError::Cubes { tokens, sequences, heads });
    }
    Ok(CubeCount::Static(x as u32, args.heads as u32, z as u32))
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn attend_tiles<E: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    cu_seqlens: &[i32],
    out: &mut [E],
    lse: &mut [f32],
    tokens: u32,
    sequences: u32,
    softmax_scale: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] causal: bool,
    #[define(E)] _elem: ElemType,
) {
    let slot = CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X;
    let tile = find_tile(cu_seqlens, slot, tokens, sequences);
    // A branch, not a return: the barriers below must be met by all units of a cube, and this says that they are.
    if tile.query < tile.end {
        if tile.in_sequence {
            attend_tile::<E>(q, k, v, out, lse, &tile, softmax_scale, key_width, value_width, causal);
        } else {
            clear_tile::<E>(out, lse, &tile, value_width);
        }
    }
}

/// Query rows of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct QueryTile {
    /// The first token of the sequence.
    first: u32,
    /// The token after the last one of the sequence.
    end: u32,
    /// The first query token of the tile; `end` or more where there is none.
    query: u32,
    /// Whether the tokens belong to a sequence.
    in_sequence: bool,
}

/// The token where segment `i` begins. Segments are the sequences and, last, the tokens that belong to none.
#[cube]
fn boundary(cu_seqlens: &[i32], i: u32, tokens: u32, sequences: u32) -> u32 {
    let mut token = 0u32;
    if i > sequences {
        token = tokens;
    } else if i > 0 {
        let entry = cu_seqlens[i as usize];
        if entry > 0 {
            token = min(u32::cast_from(entry), tokens);
        }
    }
    token
}

/// The query tile of a slot. Segment `i` has the slots from `boundary(i) / TILE + i` on: ascending in `i`, so that a
/// binary search finds the segment, and enough, since `ceil(n / TILE) <= floor((b + n) / TILE) - floor(b / TILE) + 1`.
#[cube]
fn find_tile(cu_seqlens: &[i32], slot: u32, tokens: u32, sequences: u32) -> QueryTile {
    let tile = comptime!(TILE as u32);
    let mut low = 0u32;
    let mut high = sequences;
    while low < high {
        let middle = high - (high - low) / 2;
        if boundary(cu_seqlens, middle, tokens, sequences) / tile + middle <= slot {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let first = boundary(cu_seqlens, low, tokens, sequences);
    let end = boundary(cu_seqlens, low + 1, tokens, sequences);
    let index = slot - first / tile - low;
    let mut query = end;
    // Compared before it is multiplied: the slots past the last segment may be many.
    if end > first && index <= (end - first - 1) / tile {
        query = first + index * tile;
    }
    QueryTile { first, end, query, in_sequence: low < sequences }
}

/// Rows of tokens that belong to no sequence.
#[cube]
fn clear_tile<E: Float>(out: &mut [E], lse: &mut [f32], tile: &QueryTile, #[comptime] value_width: usize) {
    let unit = UNIT_POS as usize;
    for row in 0..comptime!(TILE as u32) {
        let token = tile.query + row;
        if token < tile.end {
            let at = row_of(token);
            let mut column = unit;
            while column < value_width {
                out[at * value_width + column] = E::from_int(0);
                column += comptime!(UNITS);
            }
            if unit == 0 {
                lse[at] = f32::from_bits(NEG_INFINITY_BITS);
            }
        }
    }
}

/// The row of a token and this cube's head in `[N, H, ..]`.
#[cube]
fn row_of(token: u32) -> usize {
    token as usize * CUBE_COUNT_Y as usize + CUBE_POS_Y as usize
}

/// The running softmax of one row, in each of the [`PARTS`] units that share it.
#[derive(CubeType)]
pub(super) struct RowState {
    /// The maximum over all keys so far.
    pub max: f32,
    /// The sum of `exp(score - max)` over this unit's keys so far.
    pub sum: f32,
}

#[cube]
fn attend_tile<E: Float>(
    q: &[E],
    k: &[E],
    v: &[E],
    out: &mut [E],
    lse: &mut [f32],
    tile: &QueryTile,
    softmax_scale: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] causal: bool,
) {
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut values = Shared::<[f32]>::new_slice(comptime!(DEPTH * TILE));
    let mut partial = Shared::<[f32]>::new_slice(UNITS);
    let mut correction = Shared::<[f32]>::new_slice(TILE);
    let mut acc = zeros(comptime!(PER_UNIT * value_width.div_ceil(SIDE)));
    let mut state = RowState { max: f32::new(HIDDEN), sum: f32::new(0.0) };

    let mut seen_end = tile.end;
    if causal {
        seen_end = min(tile.query + comptime!(TILE as u32), tile.end);
    }
    let mut key = tile.first;
    while key < seen_end {
        let scores = tile_scores::<E>(q, k, &mut stage, tile, key, key_width);
        store_scores(&scores, &mut stage, tile, key, softmax_scale, causal);
        softmax_tile(&mut stage, &mut partial, &mut correction, &mut state);
        add_values::<E>(v, &stage, &mut values, &correction, &mut acc, tile, key, seen_end, value_width);
        key += comptime!(TILE as u32);
    }
    write_rows::<E>(out, lse, &acc, &mut partial, &state, tile, value_width);
}

#[cube]
pub(super) fn zeros(#[comptime] len: usize) -> Array<f32> {
    let mut array = Array::<f32>::new(len);
    #[unroll]
    for i in 0..len {
        array[i] = 0.0f32;
    }
    array
}

/// `q k^T` of the tile's queries and the keys from `key` on: rows `y + 16 i`, keys `x + 16 j` for the unit (x, y), at
/// `4 i + j`. Leaves the shared memory free.
#[cube]
fn tile_scores<E: Float>(
    q: &[E],
    k: &[E],
    stage: &mut Shared<[f32]>,
    tile: &QueryTile,
    key: u32,
    #[comptime] key_width: usize,
) -> Array<f32> {
    let depth = comptime!(DEPTH.min(key_width));
    let stride = comptime!(depth + 1);
    let keys_at = comptime!(TILE * stride);
    let mut scores = zeros(comptime!(PER_UNIT * PER_UNIT));
    for chunk in 0..comptime!(key_width.div_ceil(depth)) {
        let channel = chunk * depth;
        // Everybody has read what stands there: the chunk before, or the scores of the keys before.
        sync_cube();
        stage_rows::<E>(q, stage, 0usize, tile.query, tile.end, channel, key_width, depth);
        stage_rows::<E>(k, stage, keys_at, key, tile.end, channel, key_width, depth);
        sync_cube();
        add_scores(&*stage, &mut scores, depth);
    }
    sync_cube();
    scores
}

/// Adds the products of the `depth` channels of q and k in shared memory: q from 0 on, k behind it, `depth + 1` apart.
#[cube]
pub(super) fn add_scores(stage: &Shared<[f32]>, scores: &mut Array<f32>, #[comptime] depth: usize) {
    let stride = comptime!(depth + 1);
    let keys_at = comptime!(TILE * stride);
    let x = UNIT_POS as usize % SIDE;
    let y = UNIT_POS as usize / SIDE;
    for c in 0..depth {
        let mut k_part = Array::<f32>::new(PER_UNIT);
        #[unroll]
        for j in 0..PER_UNIT {
            k_part[j] = stage[keys_at + (x + comptime!(j * SIDE)) * stride + c];
        }
        #[unroll]
        for i in 0..PER_UNIT {
            let q_part = stage[(y + comptime!(i * SIDE)) * stride + c];
            #[unroll]
            for j in 0..PER_UNIT {
                scores[comptime!(i * PER_UNIT + j)] += q_part * k_part[j];
            }
        }
    }
}

/// Copies `depth` channels, from `channel` on, of the `TILE` tokens from `token` on to shared memory, as f32. What is
/// past the sequence or past the row is 0, and not read: it may be NaN.
#[cube]
fn stage_rows<E: Float>(
    source: &[E],
    stage: &mut Shared<[f32]>,
    at: usize,
    token: u32,
    end: u32,
    channel: usize,
    #[comptime] width: usize,
    #[comptime] depth: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(TILE * depth) {
        let row = i / depth;
        let column = channel + i % depth;
        let from = token + row as u32;
        let mut value = f32::new(0.0);
        if from < end && column < width {
            value = f32::cast_from(source[row_of(from) * width + column]);
        }
        stage[at + row * comptime!(depth + 1) + i % depth] = value;
        i += comptime!(UNITS);
    }
}

/// Writes the scaled scores to shared memory, [`HIDDEN`] where the query does not see the key.
#[cube]
fn store_scores(
    scores: &Array<f32>,
    stage: &mut Shared<[f32]>,
    tile: &QueryTile,
    first_key: u32,
    softmax_scale: f32,
    #[comptime] causal: bool,
) {
    let x = UNIT_POS as usize % SIDE;
    let y = UNIT_POS as usize / SIDE;
    #[unroll]
    for i in 0..PER_UNIT {
        let row = y + comptime!(i * SIDE);
        #[unroll]
        for j in 0..PER_UNIT {
            let column = x + comptime!(j * SIDE);
            let key = first_key + column as u32;
            let mut visible = key < tile.end;
            if causal {
                visible = visible && key <= tile.query + row as u32;
            }
            let mut score = f32::new(HIDDEN);
            if visible {
                score = scores[comptime!(i * PER_UNIT + j)] * softmax_scale;
            }
            stage[row * SCORE_STRIDE + column] = score;
        }
    }
    sync_cube();
}

/// Turns the scores in shared memory into `exp(score - max)`, brings `state` up to date, and leaves in `correction` the
/// factor by which what was summed before shrinks, for each row.
#[cube]
pub(super) fn softmax_tile(
    stage: &mut Shared<[f32]>,
    partial: &mut Shared<[f32]>,
    correction: &mut Shared<[f32]>,
    state: &mut RowState,
) {
    let unit = UNIT_POS as usize;
    let row = unit / PARTS;
    let part = unit % PARTS;

    let mut part_max = f32::new(HIDDEN);
    for n in 0..comptime!(TILE / PARTS) {
        part_max = max(part_max, stage[row * SCORE_STRIDE + n * PARTS + part]);
    }
    partial[unit] = part_max;
    sync_cube();
    let mut new_max = state.max;
    for other in 0..PARTS {
        new_max = max(new_max, partial[row * PARTS + other]);
    }

    let shrink = (state.max - new_max).exp();
    let mut sum = state.sum * shrink;
    for n in 0..comptime!(TILE / PARTS) {
        let at = row * SCORE_STRIDE + n * PARTS + part;
        let score = stage[at];
        let mut weight = f32::new(0.0);
        if score > HIDDEN {
            weight = (score - new_max).exp();
        }
        stage[at] = weight;
        sum += weight;
    }
    state.max = new_max;
    state.sum = sum;
    if part == 0 {
        correction[row] = shrink;
    }
    sync_cube();
}

/// `acc = acc * correction + p v` over the keys from `first_key` on: rows `y + 16 i`, columns `x + 16 j` for the unit
/// (x, y), at `4 j + i`.
#[cube]
fn add_values<E: Float>(
    v: &[E],
    stage: &Shared<[f32]>,
    values: &mut Shared<[f32]>,
    correction: &Shared<[f32]>,
    acc: &mut Array<f32>,
    tile: &QueryTile,
    first_key: u32,
    seen_end: u32,
    #[comptime] value_width: usize,
) {
    shrink_rows(correction, acc, comptime!(value_width.div_ceil(SIDE)));
    #[unroll]
    for block in 0..comptime!(value_width.div_ceil(TILE)) {
        for chunk in 0..comptime!((TILE / DEPTH) as u32) {
            let key = first_key + chunk * comptime!(DEPTH as u32);
            if key < seen_end {
                stage_values::<E>(v, values, key, tile.end, comptime!(block * TILE), value_width);
                sync_cube();
                add_value_block(
                    stage,
                    &*values,
                    acc,
                    chunk as usize * DEPTH,
                    comptime!(block * PER_UNIT),
                    comptime!(value_width.div_ceil(SIDE)),
                );
                sync_cube();
            }
        }
    }
}

/// Multiplies the output rows of this unit, of `columns` columns, with the corrections.
#[cube]
pub(super) fn shrink_rows(correction: &Shared<[f32]>, acc: &mut Array<f32>, #[comptime] columns: usize) {
    let y = UNIT_POS as usize / SIDE;
    #[unroll]
    for i in 0..PER_UNIT {
        let shrink = correction[y + comptime!(i * SIDE)];
        #[unroll]
        for j in 0..columns {
            acc[comptime!(j * PER_UNIT + i)] *= shrink;
        }
    }
}

/// Copies `TILE` columns, from `column` on, of the `DEPTH` values from `token` on to shared memory. What is past the
/// sequence or past the row is 0, and not read.
#[cube]
fn stage_values<E: Float>(
    v: &[E],
    values: &mut Shared<[f32]>,
    token: u32,
    end: u32,
    #[comptime] column: usize,
    #[comptime] width: usize,
) {
    for n in 0..comptime!(DEPTH * TILE / UNITS) {
        let i = n * UNITS + UNIT_POS as usize;
        let from = token + (i / TILE) as u32;
        let at = column + i % TILE;
        let mut value = f32::new(0.0);
        if from < end && at < width {
            value = f32::cast_from(v[row_of(from) * width + at]);
        }
        values[i] = value;
    }
}

/// Adds the weights from column `weights_at` on, times the values in shared memory, to the columns `x + 16 j` of this
/// unit, `first_j <= j < end_j`, as far as the values go.
#[cube]
pub(super) fn add_value_block(
    stage: &Shared<[f32]>,
    values: &Shared<[f32]>,
    acc: &mut Array<f32>,
    weights_at: usize,
    #[comptime] first_j: usize,
    #[comptime] end_j: usize,
) {
    let x = UNIT_POS as usize % SIDE;
    let y = UNIT_POS as usize / SIDE;
    let columns = comptime!(PER_UNIT.min(end_j - first_j));
    for n in 0..DEPTH {
        let mut weights = Array::<f32>::new(PER_UNIT);
        #[unroll]
        for i in 0..PER_UNIT {
            weights[i] = stage[(y + comptime!(i * SIDE)) * SCORE_STRIDE + weights_at + n];
        }
        #[unroll]
        for j in 0..columns {
            let value = values[n * TILE + x + comptime!(j * SIDE)];
            #[unroll]
            for i in 0..PER_UNIT {
                acc[comptime!((first_j + j) * PER_UNIT + i)] += weights[i] * value;
            }
        }
    }
}

/// Writes the tile's rows of `out` and `lse`.
#[cube]
fn write_rows<E: Float>(
    out: &mut [E],
    lse: &mut [f32],
    acc: &Array<f32>,
    partial: &mut Shared<[f32]>,
    state: &RowState,
    tile: &QueryTile,
    #[comptime] value_width: usize,
) {
    let unit = UNIT_POS as usize;
    let x = unit % SIDE;
    let y = unit / SIDE;
    partial[unit] = state.sum;
    sync_cube();

    #[unroll]
    for i in 0..PER_UNIT {
        let row = y + comptime!(i * SIDE);
        let token = tile.query + row as u32;
        if token < tile.end {
            // Not 0: a row sees at least one key, and the weight of its greatest score is 1.
            let inverse = 1.0 / row_sum(&*partial, row);
            #[unroll]
            for j in 0..comptime!(value_width.div_ceil(SIDE)) {
                let column = x + comptime!(j * SIDE);
                if column < value_width {
                    out[row_of(token) * value_width + column] =
                        E::cast_from(acc[comptime!(j * PER_UNIT + i)] * inverse);
                }
            }
        }
    }
    let row = unit / PARTS;
    let part = unit % PARTS;
    let token = tile.query + row as u32;
    if part == 0 && token < tile.end {
        lse[row_of(token)] = state.max + row_sum(&*partial, row).ln();
    }
}

#[cube]
pub(super) fn row_sum(partial: &Shared<[f32]>, row: usize) -> f32 {
    let mut sum = f32::new(0.0);
    for part in 0..PARTS {
        sum += partial[row * PARTS + part];
    }
    sum
}

/// With V3's channels: keys of 192, values of 128.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let dim = CubeDim::new_1d(UNITS as u32);
    let entry = |name, kind, bits, causal| {
        let elem = ElemType::Float(kind);
        let form = form!(attend_tiles, dim, [bits, _, _, _, _, _, _, 1, 1, 1.0, 192, 128, causal, elem]);
        Entry::of(kind, name, form)
    };
    let causal = FLOATS.map(|kind| entry("ragged_attention.causal", kind, AddressType::U32, true));
    let full = entry("ragged_attention.full", FloatKind::F16, AddressType::U32, false);
    let large = entry("ragged_attention.64_bits", FloatKind::BF16, AddressType::U64, true);
    causal.into_iter().chain([full, large.on(|arch| arch == Arch::Sm90a)]).collect()
}
