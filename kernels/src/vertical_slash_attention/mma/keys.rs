//! A tile of queries and the keys of its block row's list, a block of places at a time.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::super::rows::KeyList;
use crate::ptx::warp;
use crate::tiles::prefill::mma::attend::{Attended, Attention};
use crate::tiles::prefill::mma::form::{KEYS, LANES, SCORES};
use crate::tiles::prefill::mma::load::{BlockRows, BlockRowsExpand, Source};
use crate::tiles::prefill::softmax::{All, HIDDEN, Visible, VisibleExpand};

/// Blocks whose positions are in shared memory: that which is attended to, the next one and the one after it, whose place is not that of
/// the one before. A power of two.
const STAGES: u32 = 4;
/// Positions in shared memory.
pub(super) const PLACES: usize = STAGES as usize * KEYS;

/// Those of all stages, in shared memory.
#[derive(CubeType)]
pub(super) struct Positions {
    memory: Shared<[u32]>,
}

#[cube]
impl Positions {
    pub fn new() -> Positions {
        Positions { memory: Shared::<[u32]>::new_slice(PLACES) }
    }

    /// Writes the position of a unit's key of a block, for the first units.
    fn write(&mut self, block: u32, position: u32) {
        if UNIT_POS < comptime!(KEYS as u32) {
            self.memory[(block % STAGES * comptime!(KEYS as u32) + UNIT_POS) as usize] = position;
        }
    }

    fn of_block(&self, block: u32) -> Listed<'_> {
        Listed::new(&self.memory, block % STAGES * comptime!(KEYS as u32))
    }
}

/// Positions of a block's keys. Where there is no key it is the greatest number.
#[derive(CubeType, Clone, Copy)]
struct Listed<'a> {
    positions: &'a Shared<[u32]>,
    /// Where the block's begin.
    first: u32,
}

#[cube]
impl<'a> Listed<'a> {
    fn new(positions: &'a Shared<[u32]>, first: u32) -> Listed<'a> {
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
struct Seen {
    bits: u32,
}

#[cube]
impl Visible for Seen {
    fn visible(&self, score: f32, #[comptime] i: usize) -> f32 {
        select(self.bits & comptime!(1u32 << i) != 0u32, score, f32::new(HIDDEN))
    }
}

/// The keys of a tile.
#[derive(CubeType)]
pub(super) struct Keys<'a> {
    list: KeyList<'a>,
    /// The key position of the first query.
    position: i32,
    #[cube(comptime)]
    causal: bool,
}

#[cube]
impl<'a> Keys<'a> {
    pub fn new(list: KeyList<'a>, position: i32, #[comptime] causal: bool) -> Keys<'a> {
        Keys::<'a> { list, position, causal }
    }

    /// From the first block of places to the last one. All warps of the cube.
    pub fn attend<E: Float, V: Size, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        attention: &Attention,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        positions: &mut Positions,
        attended: &mut Attended<NC>,
    ) {
        let blocks = self.list.places().div_ceil(comptime!(KEYS as u32));
        if blocks > 0 {
            positions.write(0u32, self.look_up(0u32));
            positions.write(1u32, self.look_up(1u32));
            sync_cube();
            attention.start::<E, V, Listed<'_>>(source, memory, &positions.of_block(0u32));
            let mut block = 0u32;
            while block < blocks {
                // They arrive under the products.
                let ahead = self.look_up(block + 2);
                let own = positions.of_block(block);
                let hides = warp::any(self.hides_some(&own, attention.row));
                let mut bits = u32::MAX.runtime();
                if hides {
                    bits = self.bits(&own, attention.row);
                }
                let products = attention.products::<E, V, NC, Listed<'_>>(def, source, memory, &own);
                // All warps are past the block before, and two barriers are before anybody reads these.
                positions.write(block + 2, ahead);
                if block + 1 < blocks {
                    attention.start_next::<E, V, Listed<'_>>(source, memory, &positions.of_block(block + 1));
                }
                if hides {
                    attention.add_values::<E, NC, Seen>(def, products, attended, &Seen { bits });
                } else {
                    attention.add_values::<E, NC, All>(def, products, attended, &All {});
                }
                block += 1;
            }
        }
    }

    /// The position of a unit's key of a block, for the first units.
    fn look_up(&self, block: u32) -> u32 {
        let mut position = u32::MAX.runtime();
        if UNIT_POS < comptime!(KEYS as u32) {
            position = u32::cast_from(self.list.position(block * comptime!(KEYS as u32) + UNIT_POS));
        }
        position
    }

    /// How many keys a row of the tile sees, if the sequence has as many.
    fn sees(&self, row: u32) -> u32 {
        let mut sees = u32::MAX.runtime();
        if comptime!(self.causal) {
            sees = max(self.position + 1 + row as i32, 0i32) as u32;
        }
        sees
    }

    /// Whether the first row of a warp does not see one of the lane's two places. Each row after it sees more.
    fn hides_some(&self, block: &Listed<'_>, row: u32) -> bool {
        let (lane, sees) = (UNIT_POS % LANES as u32, self.sees(row));
        block.at(lane, 0u32) >= sees || block.at(lane, LANES as u32) >= sees
    }

    /// The bits of [`Seen`].
    fn bits(&self, block: &Listed<'_>, row: u32) -> u32 {
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
