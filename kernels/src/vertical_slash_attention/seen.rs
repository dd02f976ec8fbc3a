//! Which keys of a block of places the rows of a unit see, by the positions that lie in shared memory.

use cubecl::prelude::*;

use crate::tiles::prefill::mma::form::{KEYS, LANES, SCORES};
use crate::tiles::prefill::mma::load::{BlockRows, BlockRowsExpand};
use crate::tiles::prefill::softmax::{HIDDEN, Visible, VisibleExpand};

/// Positions of a block's keys. Where there is no key it is the greatest number.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Listed<'a> {
    positions: &'a Shared<[u32]>,
    /// Where the block's begin.
    first: u32,
}

#[cube]
impl<'a> Listed<'a> {
    pub fn new(positions: &'a Shared<[u32]>, first: u32) -> Listed<'a> {
        Listed::<'a> { positions, first }
    }

    fn at(&self, place: u32, #[comptime] offset: u32) -> u32 {
        self.positions[(self.first + place + offset) as usize]
    }
}

#[cube]
impl BlockRows for Listed<'_> {
    fn position(&self, place: usize, #[comptime] offset: usize) -> usize {
        self.at(place as u32, offset as u32) as usize
    }
}

/// A bit for each score of a unit: whether the row sees the key.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Seen {
    pub bits: u32,
}

#[cube]
impl Visible for Seen {
    fn visible(&self, score: f32, #[comptime] i: usize) -> f32 {
        select(self.bits & comptime!(1u32 << i) != 0u32, score, f32::new(HIDDEN))
    }
}

/// What the rows of a tile of queries see.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sight {
    /// The key position of the first one.
    position: i32,
    #[cube(comptime)]
    causal: bool,
}

#[cube]
impl Sight {
    pub fn new(position: i32, #[comptime] causal: bool) -> Sight {
        Sight { position, causal }
    }

    /// How many keys a row of the tile sees, if the sequence has as many.
    pub fn sees(&self, row: u32) -> u32 {
        let mut sees = u32::MAX.runtime();
        if comptime!(self.causal) {
            sees = max(self.position + 1 + row as i32, 0i32) as u32;
        }
        sees
    }

    /// Whether a row does not see one of the lane's two places. Each row after it sees more.
    pub fn hides_some(&self, block: &Listed<'_>, row: u32) -> bool {
        let (lane, sees) = (UNIT_POS % LANES as u32, self.sees(row));
        block.at(lane, 0u32) >= sees || block.at(lane, LANES as u32) >= sees
    }

    /// The bits of [`Seen`] of a warp whose first row this is.
    pub fn bits(&self, block: &Listed<'_>, row: u32) -> u32 {
        let (lane, row) = (UNIT_POS % LANES as u32, row + UNIT_POS % LANES as u32 / 4);
        let (sees_a, sees_b) = (self.sees(row), self.sees(row + 8));
        let mut bits = 0u32;
        #[unroll]
        for i in 0..comptime!(SCORES / 2) {
            let position = block.at(lane % 4 * 2, comptime!((i / 2 * 8 + i % 2) as u32));
            let (a, b) = comptime!((1u32 << (i / 2 * 4 + i % 2), 1u32 << (i / 2 * 4 + 2 + i % 2)));
            bits |= select(position < sees_a, a, 0u32) | select(position < sees_b, b, 0u32);
        }
        bits
    }
}

const _: () =
    assert!(KEYS == 2 * LANES && SCORES == 32, "a lane looks at two places of a block, and has a bit for each score");
