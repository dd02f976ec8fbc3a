//! The products of a pair of cubes, and what they load: chunks of rows that are gathered, the queries, and word to the first cube that both
//! have come.

use cubecl::prelude::*;

use super::super::range::{GATHERED, Maps, ROW_BYTES, Range};
use super::{ENTRY_BLOCKS, Entries};
use crate::ptx::{math, mbarrier, tma, warp};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::{Found, Lists, Work};
use crate::tiles::form::{ROWS, TILE_BYTES, TILE_WIDTH};
use crate::tiles::pair::{self, CHUNK_BYTES, Cube, Products, RING, Ring, pass};

/// Lanes that have the entries of half a block, each as many as an instruction loads.
const HALF_LANES: u32 = ROWS as u32 / GATHERED;
/// Instructions of a warp for a tile of a chunk: two warps share its rows.
const GROUPS: u32 = HALF_LANES / 2;

/// Issues the products of all work. One thread.
#[cube]
pub(super) fn multiply(cube: &Cube, range: &Range, lists: &Lists) {
    let mut products = Products::new(comptime!(range.form.tile));
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        products.multiply(cube, work.blocks());
        index = range.next(index);
    }
}

/// Loads the queries of all work that has blocks. Past the heads of a token are those of the next, which nobody looks at. A whole warp.
#[cube]
pub(super) fn load_queries<E: Float>(cube: &Cube, range: &Range, lists: &Lists, q_map: &TensorMap<E, Tiled>) {
    let mut queries = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        if work.blocks() > 0 {
            let first_row = work.head_tile * comptime!(ROWS as u32);
            pair::load_query::<E>(cube, q_map, queries, work.token, range.heads, first_row, comptime!(range.form.tile));
            queries += 1;
        }
        index = range.next(index);
    }
}

/// Passes the chunks of all work on to the first cube, as they come. A whole warp.
#[cube]
pub(super) fn pass_chunks(cube: &Cube, range: &Range, lists: &Lists) {
    let mut chunk = 0u32;
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        let halves = work.blocks();
        let end = chunk + halves.div_ceil(2u32) * comptime!(range.form.tile.tiles.div_ceil(2) as u32) + 2 * halves;
        while chunk < end {
            let stage = chunk % RING;
            mbarrier::wait(cube.barriers.full + stage * 8, chunk / RING % 2);
            pass(cube.barriers.come, stage, cube.lane);
            chunk = warp::next(chunk);
        }
        index = range.next(index);
    }
}

/// Loads half of the rows of the chunks of all work, the first or the second. A whole warp; both read all entries, each for itself.
#[cube]
pub(super) fn load_chunks(
    cube: &Cube,
    range: &Range,
    lists: &Lists,
    maps: Maps,
    rank: u32,
    entries: &mut Entries,
    #[comptime] half: u32,
) {
    let mut loader = Loader::new(Ring::of(cube), maps, rank, half, range.form);
    let mut index = range.first;
    while index < range.end {
        let mut work = Work::none();
        work.read(lists, index);
        loader.load_tile(lists, &work, entries, cube.lane);
        index = range.next(index);
    }
}

/// The entries of a block that a lane has, one behind the other in one half.
#[derive(CubeType, Clone, Copy)]
struct Four {
    a: Found,
    b: Found,
    c: Found,
    d: Found,
}

#[cube]
impl Four {
    /// Starts to read those of a block of 128 entries of the work; behind its last half there are none.
    fn read(&mut self, lists: &Lists, work: &Work, block: u32, lane: u32) {
        let half = work.first + block * 2 + lane / HALF_LANES;
        let place = lane % HALF_LANES * GATHERED;
        self.a.there = false;
        self.b.there = false;
        self.c.there = false;
        self.d.there = false;
        if half < work.end {
            self.a.read(lists, work, half, place);
            self.b.read(lists, work, half, place + 1);
            self.c.read(lists, work, half, place + 2);
            self.d.read(lists, work, half, place + 3);
        }
    }
}

/// The slots of the entries that a lane has of a block.
#[derive(CubeType, Clone, Copy)]
struct Slots {
    a: i32,
    b: i32,
    c: i32,
    d: i32,
}

#[cube]
impl Slots {
    fn none() -> Slots {
        Slots { a: i32::new(-1), b: i32::new(-1), c: i32::new(-1), d: i32::new(-1) }
    }

    /// Those of one lane, for all. A whole warp.
    fn add_of(&self, lane: u32, rows: &mut Sequence<i32>) {
        rows.push(warp::shuffle::<i32>(self.a, lane));
        rows.push(warp::shuffle::<i32>(self.b, lane));
        rows.push(warp::shuffle::<i32>(self.c, lane));
        rows.push(warp::shuffle::<i32>(self.d, lane));
    }
}

/// How far a warp is that loads chunks.
#[derive(CubeType, Clone, Copy)]
struct Loader {
    ring: Ring,
    maps: Maps,
    /// Of the cube in the pair.
    rank: u32,
    /// Chunks and blocks of all tiles so far.
    turn: u32,
    blocks: u32,
    /// Of the next block of the tile.
    ahead: Four,
    /// Of the block whose keys are loaded, and of the one before it.
    keys: Slots,
    values: Slots,
    /// Of the rows of a chunk.
    #[cube(comptime)]
    half: u32,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Loader {
    fn new(ring: Ring, maps: Maps, rank: u32, #[comptime] half: u32, #[comptime] form: Form) -> Loader {
        let ahead = Four { a: Found::nothing(), b: Found::nothing(), c: Found::nothing(), d: Found::nothing() };
        Loader {
            ring,
            maps,
            rank,
            turn: 0u32,
            blocks: 0u32,
            ahead,
            keys: Slots::none(),
            values: Slots::none(),
            half,
            form,
        }
    }

    /// Loads all blocks of a tile, in the order of the products: the keys of a block before the values of the one before it. The entries of
    /// the block behind them are on their way then.
    fn load_tile(&mut self, lists: &Lists, work: &Work, entries: &mut Entries, lane: u32) {
        let halves = warp::uniform(work.blocks());
        let blocks = halves.div_ceil(2u32);
        self.ahead.read(lists, work, 0u32, lane);
        let mut block = 0u32;
        while block < blocks + comptime!(1u32).runtime() {
            if block < blocks {
                self.take(lists, self.blocks + block, entries, lane);
                self.ahead.read(lists, work, block + 1, lane);
                self.load_keys(work, block);
            }
            if block > 0 {
                self.load_values(work, block - 1, min(halves - (block - 1) * 2, comptime!(2u32).runtime()));
            }
            self.values.a = self.keys.a;
            self.values.b = self.keys.b;
            self.values.c = self.keys.c;
            self.values.d = self.keys.d;
            block = warp::next(block);
        }
        self.blocks += blocks;
    }

    /// Takes the slots that have been read of a block, and tells the softmax which of them are rows.
    fn take(&mut self, lists: &Lists, turn: u32, entries: &mut Entries, lane: u32) {
        self.keys.a = lists.slot_of(&self.ahead.a);
        self.keys.b = lists.slot_of(&self.ahead.b);
        self.keys.c = lists.slot_of(&self.ahead.c);
        self.keys.d = lists.slot_of(&self.ahead.d);
        sync_plane();
        if comptime!(self.half == 0) {
            let mut seen = Sequence::<u32>::new();
            seen.push(warp::ballot(self.keys.a >= 0));
            seen.push(warp::ballot(self.keys.b >= 0));
            seen.push(warp::ballot(self.keys.c >= 0));
            seen.push(warp::ballot(self.keys.d >= 0));
            if lane == 0 {
                entries.seen[(turn % ENTRY_BLOCKS) as usize] = math::vector::<u32, Const<4>>(&seen);
                mbarrier::arrive(entries.published + turn % ENTRY_BLOCKS * 8);
            }
            sync_plane();
        }
    }

    /// The cube's half of the keys of a block, all channels.
    fn load_keys(&mut self, work: &Work, block: u32) {
        let map = self.maps.of(work.list_of(work.first + block * 2 + self.rank), self.form);
        let from = self.rank * HALF_LANES;
        let tiles = comptime!(self.form.tile.tiles as u32);
        let mut first_tile = 0u32;
        while first_tile < comptime!(tiles / 2 * 2).runtime() {
            self.load(map, from, first_tile, false, 2u32);
            first_tile = warp::next(warp::next(first_tile));
        }
        if comptime!(tiles % 2 == 1) {
            self.load(map, from, first_tile, false, 1u32);
        }
    }

    /// The cube's half of the channels of all values of a block, which has one half or two.
    fn load_values(&mut self, work: &Work, block: u32, halves: u32) {
        let mut side = 0u32;
        while side < comptime!(2u32).runtime() {
            let mut half = 0u32;
            while half < halves {
                let map = self.maps.of(work.list_of(work.first + block * 2 + half), self.form);
                self.load(map, half * HALF_LANES, side * 4 + self.rank * 2, true, 2u32);
                half = warp::next(half);
            }
            side = warp::next(side);
        }
    }

    /// Starts to load this warp's half of `tiles` tiles of 64 rows, keys or values, which the entries of the lanes from this one on name. Zeros
    /// come for those that are none, which are outside of the tensor.
    fn load(
        &mut self,
        map: u64,
        first_lane: u32,
        first_tile: u32,
        #[comptime] are_values: bool,
        #[comptime] tiles: u32,
    ) {
        // Before the place is free. Not by way of shared memory: that is busy with products.
        let mut rows = Sequence::<i32>::new();
        #[unroll]
        for group in 0..GROUPS {
            let lane = first_lane + comptime!(self.half * GROUPS + group);
            if comptime!(are_values) {
                self.values.add_of(lane, &mut rows);
            } else {
                self.keys.add_of(lane, &mut rows);
            }
        }
        let stage = self.turn % RING;
        let full = self.ring.full + stage * 8;
        mbarrier::wait_cluster(self.ring.empty + stage * 8, (self.turn / RING % 2) ^ 1);
        // One lane goes on for all.
        sync_plane();
        if warp::elect() {
            mbarrier::arrive_expect(full, comptime!(tiles * TILE_BYTES / 2).runtime());
            let to = self.ring.chunks_at + stage * CHUNK_BYTES + comptime!(self.half * GROUPS * GATHERED * ROW_BYTES);
            #[unroll]
            for group in 0..GROUPS {
                #[unroll]
                for tile in 0..tiles {
                    let tile_to = to + comptime!(tile * TILE_BYTES + group * GATHERED * ROW_BYTES);
                    let channel = ((first_tile + tile) * comptime!(TILE_WIDTH as u32)) as i32;
                    let (row_0, row_1) = (rows[comptime!(4 * group) as usize], rows[comptime!(4 * group + 1) as usize]);
                    let (row_2, row_3) =
                        (rows[comptime!(4 * group + 2) as usize], rows[comptime!(4 * group + 3) as usize]);
                    tma::load_rows(tile_to, map, full, channel, row_0, row_1, row_2, row_3);
                }
            }
        }
        sync_plane();
        self.turn = warp::next(self.turn);
    }
}
