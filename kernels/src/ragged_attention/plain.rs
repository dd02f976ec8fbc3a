//! For every runtime: each cube attends one tile (`tiles/attention.rs`) of queries to the keys of its sequence that they see.

use cubecl::prelude::*;

use super::problem::{RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionSizes};
use super::tiles::{QueryTile, cube_count, find_tile, keys_of};
use crate::common::device::{UNITS, check_device};
use crate::common::launch::or_dummy;
use crate::common::select::Path;
use crate::tiles::attention::{
    NEG_INFINITY_BITS, SHARED_BYTES, TILE, TileAttention, TileKeys, TileKeysExpand, row_of, soft_capped,
};

/// Elements that a unit loads at once: one, so that any width will do.
type Load = Const<1>;

/// The width of offsets, and the cubes.
pub(super) struct Grid {
    address: AddressType,
    cubes: CubeCount,
}

/// Launches the kernel for at least one token.
pub(super) fn launch(client: &Client, args: RaggedAttentionArgs, grid: Grid) -> Result<(), RaggedAttentionError> {
    let RaggedAttentionArgs { q, k, k_pe, v, cu_seqlens, cu_seqlens_k, out, lse, sizes, options } = args;
    let RaggedAttentionSizes { tokens, keys, heads, kv_heads, key_width, value_width, sequences, elem, .. } = sizes;
    let contiguous = q.is_contiguous(heads, key_width)
        && k.is_contiguous(kv_heads, key_width)
        && v.is_contiguous(kv_heads, value_width);
    if k_pe.is_some() || !contiguous {
        return Err(RaggedAttentionError::Strides(Path::Plain));
    }
    attend_tiles::launch(
        client,
        grid.cubes,
        CubeDim::new_1d(UNITS as u32),
        grid.address,
        q.buffer,
        or_dummy(client, k.buffer, keys),
        or_dummy(client, v.buffer, keys),
        cu_seqlens,
        cu_seqlens_k,
        out,
        lse,
        tokens as u32,
        keys as u32,
        sequences as u32,
        kv_heads as u32,
        options.most_seen(),
        options.softmax_scale,
        options.softcap.unwrap_or(1.0),
        key_width,
        value_width,
        options.causal,
        options.softcap.is_some(),
        elem,
    );
    Ok(())
}

/// Whether and how a device runs it.
pub(super) fn prepare(client: &Client, sizes: &RaggedAttentionSizes) -> Result<Grid, RaggedAttentionError> {
    check_device(client, sizes.elem, SHARED_BYTES)?;
    Ok(Grid { address: address_type(client, sizes)?, cubes: cube_count(client, sizes, TILE)? })
}

/// 32-bit offsets where they reach: 64-bit ones are slow, and wgpu has none.
fn address_type(client: &Client, sizes: &RaggedAttentionSizes) -> Result<AddressType, RaggedAttentionError> {
    let elements = sizes.elements();
    let address = AddressType::from_len(elements);
    if !client.features().supports_address(address) {
        return Err(RaggedAttentionError::Offsets(elements));
    }
    Ok(address)
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn attend_tiles<E: Float>(
    q: &[Vector<E, Load>],
    k: &[Vector<E, Load>],
    v: &[Vector<E, Load>],
    cu_seqlens: &[i32],
    cu_seqlens_k: &[i32],
    out: &mut [E],
    lse: &mut [f32],
    tokens: u32,
    keys: u32,
    sequences: u32,
    kv_heads: u32,
    most_seen: i32,
    softmax_scale: f32,
    softcap: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] causal: bool,
    #[comptime] capped: bool,
    #[define(E)] _elem: ElemType,
) {
    let slot = CUBE_POS_Z * CUBE_COUNT_X + CUBE_POS_X;
    let tile = find_tile(cu_seqlens, slot, tokens, sequences, comptime!(TILE as u32));
    let (first, end) = keys_of(cu_seqlens_k, &tile, keys, sequences);
    let kv_head = CUBE_POS_Y / (CUBE_COUNT_Y / kv_heads);
    // How many keys the first query of the tile sees; 0 and less for none.
    let mut first_sees = (end - first) as i32;
    if causal {
        first_sees += (tile.query + 1) as i32 - tile.end as i32;
    }
    let score = Score { scale: softmax_scale, softcap, capped };
    let keys = Keys { first, seen_end: end, end, first_sees, most_seen, key: first, kv_heads, kv_head, score };
    // A branch, not a return: the barriers below must be met by all units of a cube, and this says that they are.
    if tile.query < tile.end {
        if end == first || first_sees <= 0 {
            clear_tile::<E>(out, lse, &tile, value_width);
            // Before other units write to the same rows.
            sync_cube();
        }
        attend_tile::<E>(q, k, v, out, lse, &tile, keys, key_width, value_width);
    }
}

/// Rows for tokens that see no key.
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

/// A tile of keys, from the token `key` on, and how the queries see them.
#[derive(CubeType)]
struct Keys {
    /// The first key of the sequence.
    first: u32,
    /// The key after the last one that a query of the tile sees.
    seen_end: u32,
    /// The key after the last one of the sequence.
    end: u32,
    /// How many keys the first query sees, if the sequence has as many; each query sees one more than the one before.
    first_sees: i32,
    /// How many it sees at most, the last ones of these.
    most_seen: i32,
    key: u32,
    kv_heads: u32,
    kv_head: u32,
    score: Score,
}

/// What becomes of a product.
#[derive(CubeType, Clone, Copy)]
struct Score {
    scale: f32,
    softcap: f32,
    #[cube(comptime)]
    capped: bool,
}

#[cube]
impl TileKeys for Keys {
    fn visible_end(&self) -> u32 {
        self.seen_end - self.key
    }

    fn is_key(&self, place: usize) -> bool {
        self.key + (place as u32) < self.end
    }

    fn row(&self, place: usize) -> usize {
        (self.key + place as u32) as usize * self.kv_heads as usize + self.kv_head as usize
    }

    fn is_visible(&self, query: usize, place: usize) -> bool {
        let key = self.key + place as u32;
        let (position, sees) = ((key - self.first) as i32, self.first_sees + query as i32);
        key < self.end && position < sees && position >= sees - self.most_seen
    }

    fn score(&self, product: f32) -> f32 {
        let mut score = product * self.score.scale;
        if self.score.capped {
            score = soft_capped(score, self.score.softcap);
        }
        score
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
    keys: Keys,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
) {
    let mut attention = TileAttention::new(tile.query, tile.end, key_width, value_width);
    let mut keys = keys;
    // What the last query of a whole tile sees.
    let seen = max(keys.first_sees + comptime!(TILE as i32 - 1), 0i32) as u32;
    keys.seen_end = min(keys.first + seen, keys.end);
    // Whole tiles that no query sees.
    let hidden = max(max(keys.first_sees, 0i32) - keys.most_seen, 0i32) as u32;
    keys.key += hidden / comptime!(TILE as u32) * comptime!(TILE as u32);
    while keys.key < keys.seen_end {
        attention.add_keys::<E, Load, Keys>(q, k, v, &keys);
        keys.key += comptime!(TILE as u32);
    }
    attention.write::<E>(out, lse);
}

/// With V3's channels: keys of 192, values of 128.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, FloatKind, form};
    let dim = CubeDim::new_1d(UNITS as u32);
    let entry = |name, kind, bits, causal, capped| {
        let elem = ElemType::Float(kind);
        let form = form!(
            attend_tiles,
            dim,
            [bits, _, _, _, _, _, _, _, 1, 1, 1, 1, 1, 1.0, 1.0, 192, 128, causal, capped, elem]
        );
        Entry::of(kind, name, form)
    };
    let causal = FLOATS.map(|kind| entry("ragged_attention.causal", kind, AddressType::U32, true, false));
    let full = entry("ragged_attention.full", FloatKind::F16, AddressType::U32, false, false);
    let large = entry("ragged_attention.64_bits", FloatKind::BF16, AddressType::U64, true, false);
    let capped = entry("ragged_attention.softcap", FloatKind::F32, AddressType::U32, true, true);
    causal.into_iter().chain([full, capped, large.on(|arch| arch == Arch::Sm90a)]).collect()
}
