//! The keys of a block row, a tile at a time: whole tiles of its key blocks, and then any keys.
//!
//! A warp looks up entries before they are needed: 32 tiles at a time, and the keys of the next tile of any keys.

use cubecl::prelude::*;

use super::form::{KEYS, WARP_KEYS};
use crate::ptx::warp;
use crate::vertical_slash_attention::rows::KeyList;

/// Where there is no key, or no tile.
pub(super) const NONE: i64 = -1;
/// Behind the last tile.
pub(super) const PAST: i32 = i32::MAX;
/// Tiles that a warp looks up at once.
const LOOKED_UP: u32 = 32;

/// Tiles of key blocks, whose keys lie side by side, in the order of the list. A warp's.
#[derive(CubeType)]
pub(super) struct Blocks<'a> {
    list: KeyList<'a>,
    /// Positions that some query may see: up to this one.
    sees: u32,
    count: u32,
    next: u32,
    /// The first keys of the tiles about the next one, less than 0 where nobody sees it.
    chunk: i32,
    /// The entries of those behind them.
    ahead: i32,
}

#[cube]
impl<'a> Blocks<'a> {
    /// Of so many key blocks as are a multiple of a tile. [`begin`](Blocks::begin) comes next.
    pub fn new(list: KeyList<'a>, sees: u32, #[comptime] aligned: bool) -> Blocks<'a> {
        let mut count = 0u32;
        if comptime!(aligned) {
            count = list.in_blocks / comptime!(KEYS as u32);
        }
        let none = i32::new(NONE);
        let mut blocks = Blocks::<'a> { list, sees, count, next: 0u32, chunk: none, ahead: none };
        blocks.chunk = blocks.look_up(UNIT_POS % 32);
        blocks.ahead = blocks.look_up(LOOKED_UP + UNIT_POS % 32);
        blocks
    }

    /// Waits for what has been looked up.
    pub fn begin(&mut self) {
        self.chunk = self.first_of(UNIT_POS % 32, self.chunk);
    }

    /// The entry of a tile.
    fn look_up(&self, tile: u32) -> i32 {
        let mut entry = i32::new(NONE);
        if tile < self.count {
            entry = self.list.entry(tile * comptime!(KEYS as u32));
        }
        entry
    }

    /// The first key of a tile with this entry, less than 0 where nobody sees it.
    fn first_of(&self, tile: u32, entry: i32) -> i32 {
        let first = self.list.position_of(tile * comptime!(KEYS as u32), entry);
        select(first as u32 >= self.sees, i32::new(NONE), first)
    }

    /// The first key of the next tile, less than 0 where nobody sees it; [`PAST`] behind the last one.
    pub fn first(&self) -> i32 {
        let first = warp::shuffle::<i32>(self.chunk, self.next % LOOKED_UP);
        select(self.next < self.count, first, i32::new(comptime!(PAST as i64)))
    }

    /// Goes on to the next one. All lanes, or none.
    pub fn advance_if(&mut self, condition: bool) {
        if condition {
            self.next += 1;
            let place = self.next % LOOKED_UP;
            if place == 0 {
                let lane = UNIT_POS % 32;
                self.chunk = self.first_of(self.next + lane, self.ahead);
                self.ahead = self.look_up(self.next + LOOKED_UP + lane);
            }
        }
    }
}

/// The other keys of the list, wherever they are. A warp's, of which the first lanes have those that it copies.
#[derive(CubeType)]
pub(super) struct Others<'a> {
    list: KeyList<'a>,
    next: u32,
    end: u32,
    warp: u32,
    /// The entry of the lane's key of the next tile.
    ahead: i32,
}

#[cube]
impl<'a> Others<'a> {
    /// Those behind the key blocks where these are [`Blocks`], otherwise all.
    pub fn new(list: KeyList<'a>, warp: u32, #[comptime] aligned: bool) -> Others<'a> {
        let next = if comptime!(aligned) { list.in_blocks } else { 0u32.runtime() };
        let end = list.places();
        let mut others = Others::<'a> { list, next, end, warp, ahead: i32::new(NONE) };
        others.ahead = others.list.entry(others.place());
        others
    }

    pub fn has_more(&self) -> bool {
        self.next < self.end
    }

    /// The position of the lane's key of the next tile, and on to the one behind it.
    pub fn take(&mut self) -> u32 {
        let position = self.list.position_of(self.place(), self.ahead) as u32;
        self.next += comptime!(KEYS as u32);
        self.ahead = self.list.entry(self.place());
        position
    }

    /// The place of the lane's key of the next tile.
    fn place(&self) -> u32 {
        self.next + self.warp * WARP_KEYS + UNIT_POS % WARP_KEYS
    }
}
