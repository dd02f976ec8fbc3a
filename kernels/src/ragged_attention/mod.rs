//! Prefill attention over packed sequences, for every runtime: each cube attends one tile (`tiles/attention.rs`) of
//! queries to the keys of its sequence that they see.
//!
//! The grid is made of what the host knows: a cube finds its sequence by a search over `cu_seqlens`, and a cube too many
//! does nothing.

use cubecl::prelude::*;
use thiserror::Error;

use crate::common::device::{DeviceError, UNITS, check_device};
use crate::tiles::attention::{NEG_INFINITY_BITS, SHARED_BYTES, TILE, TileAttention, TileKeys, TileKeysExpand, row_of};

/// Elements that a unit loads at once: one, so that any width will do.
type Load = Const<1>;

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
    /// The device does not have the element type or the room for a cube.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Keys or values without a channel.
    #[error("a key has {key_width} channels and a value {value_width}: both need at least 1")]
    Width {
        /// dqk.
        key_width: usize,
        /// dv.
        value_width: usize,
    },
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
    check_device(client, sizes.elem, SHARED_BYTES)?;
    Ok((address_type(client, sizes)?, cube_count(client, sizes)?))
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
    q: &[Vector<E, Load>],
    k: &[Vector<E, Load>],
    v: &[Vector<E, Load>],
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

/// A tile of keys, from the token `first` on, and how the queries see them.
#[derive(CubeType)]
struct Keys {
    first: u32,
    /// The token after the last one that a query sees.
    seen_end: u32,
    /// The token after the last one of the sequence.
    end: u32,
    /// The first query token.
    query: u32,
    softmax_scale: f32,
    #[cube(comptime)]
    causal: bool,
}

#[cube]
impl TileKeys for Keys {
    fn visible_end(&self) -> u32 {
        self.seen_end - self.first
    }

    fn is_key(&self, place: usize) -> bool {
        self.first + (place as u32) < self.end
    }

    fn row(&self, place: usize) -> usize {
        row_of(self.first + place as u32)
    }

    fn is_visible(&self, query: usize, place: usize) -> bool {
        let key = self.first + place as u32;
        let mut visible = key < self.end;
        if self.causal {
            visible = visible && key <= self.query + query as u32;
        }
        visible
    }

    fn score(&self, product: f32) -> f32 {
        product * self.softmax_scale
    }
}

#[cube]
fn attend_tile<E: Float>(
    q: &[Vector<E, Load>],
    k: &[Vector<E, Load>],
    v: &[Vector<E, Load>],
    out: &mut [E],
    lse: &mut [f32],
    tile: &QueryTile,
    softmax_scale: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] causal: bool,
) {
    let mut attention = TileAttention::new(tile.query, tile.end, key_width, value_width);
    let mut seen_end = tile.end;
    if causal {
        seen_end = min(tile.query + comptime!(TILE as u32), tile.end);
    }
    let mut keys = Keys { first: tile.first, seen_end, end: tile.end, query: tile.query, softmax_scale, causal };
    while keys.first < keys.seen_end {
        attention.add_keys::<E, Load, Keys>(q, k, v, &keys);
        keys.first += comptime!(TILE as u32);
    }
    attention.write::<E>(out, lse);
}

/// With V3's channels: keys of 192, values of 128.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
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
