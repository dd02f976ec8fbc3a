//! The chunks of a cube of a pair where there are FP8 rows: four warps bring 16 rows of each.

use cubecl::prelude::*;

use super::super::range::Range;
use super::super::rows::{OWN_ROWS, PIECE_TILES, PIECES, Piece, Rows};
use super::Entries;
use super::phases::{Block, Phases};
use crate::ptx::{fence, mbarrier, warp};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::work::Lists;
use crate::tiles::form::TILE_BYTES;
use crate::tiles::pair::{CHUNK_BYTES, Cube, RING, Ring};

/// Loads 16 rows of the chunks of all work. While the four pieces of a phase are written, those of the next one are on their way. A whole warp.
#[cube]
pub(super) fn load_codes(cube: &Cube, range: &Range, lists: &Lists, rows: &Rows, rank: u32, entries: &Entries) {
    let mut phases = Phases::new(range);
    phases.advance(lists, range, rows.warp, cube.lane, entries);
    let mut loader = Loader::new(Ring::of(cube), rank, range.form);
    let (mut piece_0, mut piece_1, mut piece_2, mut piece_3) =
        (Piece::nothing(), Piece::nothing(), Piece::nothing(), Piece::nothing());
    loader.fetch(&mut piece_0, rows, &phases, 0u32);
    loader.fetch(&mut piece_1, rows, &phases, 1u32);
    loader.fetch(&mut piece_2, rows, &phases, 2u32);
    loader.fetch(&mut piece_3, rows, &phases, 3u32);
    while phases.block.halves > 0 {
        loader.begin(&phases);
        phases.advance(lists, range, rows.warp, cube.lane, entries);
        loader.load(&piece_0, rows, 0u32);
        loader.fetch(&mut piece_0, rows, &phases, 0u32);
        loader.load(&piece_1, rows, 1u32);
        loader.give(cube.lane);
        loader.fetch(&mut piece_1, rows, &phases, 1u32);
        loader.load(&piece_2, rows, 2u32);
        loader.fetch(&mut piece_2, rows, &phases, 2u32);
        loader.load(&piece_3, rows, 3u32);
        if comptime!(range.form.tile.tiles as u32 > PIECES * PIECE_TILES) && !loader.are_values {
            loader.load_ninth_tile(rows);
        }
        loader.give(cube.lane);
        loader.fetch(&mut piece_3, rows, &phases, 3u32);
    }
}

/// How far a warp is.
#[derive(CubeType)]
struct Loader {
    ring: Ring,
    /// Of the cube in the pair.
    rank: u32,
    /// Chunks so far, and those that the products know of.
    turn: u32,
    given: u32,
    /// The phase whose chunks are written.
    are_values: bool,
    block: Block,
    #[cube(comptime)]
    form: Form,
}

/// Which part of a block a chunk is.
#[derive(CubeType, Clone, Copy)]
struct Part {
    /// Its 64 rows, and which of their pieces.
    half: u32,
    piece: u32,
}

#[cube]
impl Loader {
    fn new(ring: Ring, rank: u32, #[comptime] form: Form) -> Loader {
        Loader { ring, rank, turn: 0u32, given: 0u32, are_values: false.runtime(), block: Block::none(), form }
    }

    fn begin(&mut self, phases: &Phases) {
        self.are_values = phases.are_values;
        self.block.set(&phases.block);
    }

    /// Chunk `index` of a phase: of the cube's half of the keys all channels, of all values its part of the channels.
    fn part(&self, are_values: bool, #[comptime] index: u32) -> Part {
        let piece = select(are_values, comptime!(index / 2 * 2) + self.rank, comptime!(index).runtime());
        Part { half: select(are_values, comptime!(index % 2).runtime(), self.rank), piece }
    }

    /// Starts to read the codes of a chunk of a phase.
    fn fetch(&self, piece: &mut Piece, rows: &Rows, phases: &Phases, #[comptime] index: u32) {
        let part = self.part(phases.are_values, index);
        piece.fetch(rows, phases.block.list(part.half), phases.block.slot, part.half * OWN_ROWS, part.piece);
    }

    /// Brings the warp's rows of a chunk, of which the codes have been read. Of values that are half a block there is no second half.
    fn load(&mut self, piece: &Piece, rows: &Rows, #[comptime] index: u32) {
        let part = self.part(self.are_values, index);
        if !self.are_values || part.half < self.block.halves {
            let list = self.block.list(part.half);
            let to = self.wait();
            let full = self.full();
            let (first_lane, first_tile) = (part.half * OWN_ROWS, part.piece * PIECE_TILES);
            if rows.are_codes(list) {
                if comptime!(self.form.code_tiles() < PIECES * PIECE_TILES) && part.piece == comptime!(PIECES - 1) {
                    let rope = to + TILE_BYTES;
                    rows.gather(list, self.block.slot, first_lane, first_tile + 1, rope, full, 1u32);
                }
                piece.store(rows, to, part.piece);
            } else {
                rows.gather(list, self.block.slot, first_lane, first_tile, to, full, PIECE_TILES);
            }
            self.turn = warp::next(self.turn);
        }
    }

    /// Brings the warp's rows of the keys' ninth tile, which nobody converts.
    fn load_ninth_tile(&mut self, rows: &Rows) {
        let to = self.wait();
        let full = self.full();
        let first_tile = comptime!(PIECES * PIECE_TILES).runtime();
        let (list, first_lane) = (self.block.list(self.rank), self.rank * OWN_ROWS);
        rows.gather(list, self.block.slot, first_lane, first_tile, to, full, 1u32);
        self.turn = warp::next(self.turn);
    }

    /// Says that the warp's part of the chunks since the last time is there, beside what TMA brings: two or three at once, for a fence waits until
    /// stores are done. A whole warp.
    fn give(&mut self, lane: u32) {
        fence::async_shared();
        sync_plane();
        let chunk = self.given + lane;
        mbarrier::arrive_if(self.ring.full + chunk % RING * 8, chunk < self.turn);
        self.given = self.turn;
    }

    /// Waits until the place of the next chunk is free, and says where it is.
    fn wait(&self) -> u32 {
        let stage = self.turn % RING;
        mbarrier::wait_cluster(self.ring.empty + stage * 8, (self.turn / RING % 2) ^ 1);
        sync_plane();
        self.ring.chunks_at + stage * CHUNK_BYTES
    }

    /// The barrier of that place.
    fn full(&self) -> u32 {
        self.ring.full + self.turn % RING * 8
    }
}
