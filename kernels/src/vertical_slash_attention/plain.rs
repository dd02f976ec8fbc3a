//! For every runtime: one cube attends one tile (`tiles/attention.rs`) of the queries of a block row to the row's keys, `TILE` at a
//! time.
//!
//! A key's place in the row's list gives its position, whatever the block size is, so that a tile may hold the end of one block,
//! another block and some columns. Positions of a tile are looked up once, into shared memory; rows of k and v are gathered with
//! them, in vectors. A row's channels lie side by side, so that gathering costs no more than reading neighbours.

use cubecl::prelude::*;

use super::problem::{AttentionArgs, Grid, Layout, ROWS, VerticalSlashError, VerticalSlashSizes};
use super::rows::{KeyList, Queries, Sizes};
use crate::common::device::{UNITS, check_device};
use crate::tiles::attention;
use crate::tiles::attention::{DEPTH, TILE, TileAttention, TileKeys, TileKeysExpand, soft_capped};

/// The shared memory of a cube, in bytes: that of its attention, and the positions of a tile's keys.
const SHARED_BYTES: usize = attention::SHARED_BYTES + TILE * size_of::<i32>();
/// Bytes that a unit loads at once.
const LOAD_BYTES: usize = 16;

const _: () = assert!(SHARED_BYTES <= 32 * 1024, "wgpu's devices have 32 KiB");
const _: () = assert!(TILE == ROWS, "a cube has one tile");

/// Whether a device runs it.
pub(super) fn check(client: &Client, sizes: &VerticalSlashSizes) -> Result<(), VerticalSlashError> {
    check_device(client, sizes.elem, SHARED_BYTES)?;
    sizes.grid(client).map(drop)
}

/// Launches the kernel for at least one block row and key.
pub(super) fn launch(client: &Client, args: AttentionArgs, grid: Grid) {
    let AttentionArgs { sizes, options, .. } = args;
    attend_rows::launch(
        client,
        grid.cubes,
        CubeDim::new_1d(UNITS as u32),
        grid.address,
        vector_size(client, &sizes),
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
        sizes.of_kernel(),
        sizes.kv_heads as u32,
        options.softmax_scale,
        options.softcap,
        sizes.key_width,
        sizes.value_width,
        sizes.layout == Layout::Packed,
        options.softcap != 0.0,
        options.causal,
        sizes.elem,
    );
}

/// Elements that a unit loads at once: as many as divide all rows and the slices of them in shared memory.
fn vector_size(client: &Client, sizes: &VerticalSlashSizes) -> usize {
    let divides = |size: &usize| {
        let widths = [sizes.key_width, sizes.value_width, DEPTH, TILE];
        widths.into_iter().all(|width| width.is_multiple_of(*size)) && size * sizes.elem.size() <= LOAD_BYTES
    };
    client.io_optimized_vector_sizes(sizes.elem.size()).find(divides).unwrap_or(1)
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
    sizes: Sizes,
    kv_heads: u32,
    softmax_scale: f32,
    softcap: f32,
    #[comptime] key_width: usize,
    #[comptime] value_width: usize,
    #[comptime] packed: bool,
    #[comptime] capped: bool,
    #[comptime] causal: bool,
    #[define(E)] _elem: ElemType,
) {
    let queries = Queries::of_cube(q_bounds, kv_bounds, &sizes, packed, false);
    // A branch, not a return: the barriers below must be met by all units of a cube, and this says that they are.
    if queries.first < queries.end {
        let list = KeyList::of_cube(&queries, block_count, block_offset, column_count, column_index, &sizes);
        let mut attention = TileAttention::new(
            queries.all.first + queries.first,
            queries.all.first + queries.end,
            key_width,
            value_width,
        );
        let mut keys = Keys {
            positions: Shared::<[i32]>::new_slice(TILE),
            place: 0u32.runtime(),
            places: list.places(),
            first: queries.kv.first,
            head: CUBE_POS_Y / (CUBE_COUNT_Y / kv_heads),
            heads: kv_heads,
            query: queries.position(),
            softmax_scale,
            softcap,
            capped,
            causal,
        };
        while keys.place < keys.places {
            keys.find(&list);
            attention.add_keys::<E, W, Keys>(q, k, v, &keys);
            keys.place += comptime!(TILE as u32);
        }
        attention.write::<E>(out, lse);
    }
}

/// A tile of keys, and how the queries see them.
#[derive(CubeType)]
struct Keys {
    /// Positions in the sequence, -1 where there is no key.
    positions: Shared<[i32]>,
    /// The place in the row's list that is the tile's first.
    place: u32,
    /// Places of the list.
    places: u32,
    /// The token that is the sequence's key 0.
    first: u32,
    /// The head of k and v.
    head: u32,
    /// Heads of k and v.
    heads: u32,
    /// The key position of the first query.
    query: i32,
    softmax_scale: f32,
    softcap: f32,
    #[cube(comptime)]
    capped: bool,
    #[cube(comptime)]
    causal: bool,
}

#[cube]
impl Keys {
    /// Looks up the positions of the tile's keys.
    fn find(&mut self, list: &KeyList<'_>) {
        if UNIT_POS < comptime!(TILE as u32) {
            self.positions[UNIT_POS as usize] = list.position(self.place + UNIT_POS);
        }
        sync_cube();
    }
}

#[cube]
impl TileKeys for Keys {
    fn visible_end(&self) -> u32 {
        self.places - self.place
    }

    fn is_key(&self, place: usize) -> bool {
        self.positions[place] >= 0
    }

    fn row(&self, place: usize) -> usize {
        let token = self.first + u32::cast_from(self.positions[place]);
        token as usize * self.heads as usize + self.head as usize
    }

    fn is_visible(&self, query: usize, place: usize) -> bool {
        let position = self.positions[place];
        let mut visible = position >= 0;
        if self.causal {
            visible = visible && position <= self.query + i32::cast_from(query);
        }
        visible
    }

    fn score(&self, product: f32) -> f32 {
        let mut score = product * self.softmax_scale;
        if self.capped {
            score = soft_capped(score, self.softcap);
        }
        score
    }
}

/// Packed and causal with V3's channels; padded, capped and not causal with 128.
#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use super::rows::offline_sizes;
    use crate::offline::{Entry, FLOATS, FloatKind, form};
    let (bits, dim) = (AddressType::U32, CubeDim::new_1d(UNITS as u32));
    let attend = |name, kind, key_width, (packed, capped, causal): (bool, bool, bool)| {
        let elem = ElemType::Float(kind);
        // Divides all widths.
        let n = LOAD_BYTES / elem.size();
        #[rustfmt::skip]
        let form = form!(attend_rows, dim, [
            bits, n, _, _, _, _, _, _, _, _, _, _, _, offline_sizes(), 1, 1.0, 1.0, key_width, 128, packed, capped, causal, elem
        ]);
        Entry::of(kind, name, form)
    };
    let packed = FLOATS.map(|kind| attend("vertical_slash_attention.packed", kind, 192, (true, false, true)));
    let padded = attend("vertical_slash_attention.padded", FloatKind::F16, 128, (false, true, false));
    packed.into_iter().chain([padded]).collect()
}
