//! A tile of queries and the keys of its block row's list, a block of places at a time.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::super::rows::KeyList;
use super::super::seen::{Listed, Seen, Sight};
use crate::ptx::warp;
use crate::tiles::prefill::mma::attend::{Attended, Attention};
use crate::tiles::prefill::mma::form::KEYS;
use crate::tiles::prefill::mma::load::Source;
use crate::tiles::prefill::softmax::All;

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

/// The keys of a tile.
#[derive(CubeType)]
pub(super) struct Keys<'a> {
    list: KeyList<'a>,
    sight: Sight,
}

#[cube]
impl<'a> Keys<'a> {
    pub fn new(list: KeyList<'a>, sight: Sight) -> Keys<'a> {
        Keys::<'a> { list, sight }
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
                let hides = warp::any(self.sight.hides_some(&own, attention.row));
                let mut bits = u32::MAX.runtime();
                if hides {
                    bits = self.sight.bits(&own, attention.row);
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
}
