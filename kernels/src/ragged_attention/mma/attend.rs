//! The order in which a tile is attended to the blocks of keys that its rows see.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::tile::{Blocks, BlocksExpand};
use crate::ragged_attention::seen::{Mask, Seen};
use crate::tiles::prefill::mma::attend::{Attended, Attention};
use crate::tiles::prefill::mma::form::{KEYS, LANES, SCORES};
use crate::tiles::prefill::mma::load::{Consecutive, Source};
use crate::tiles::prefill::softmax::All;

#[cube]
impl Blocks {
    /// From the last block that a row of the tile sees to the first one. All warps of the cube.
    pub fn attend<E: Float, V: Size, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        attention: &Attention,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        attended: &mut Attended<NC>,
    ) {
        let windowed = comptime!(attention.form.windowed);
        let mut block = self.blocks;
        if block > 0 {
            attention.start::<E, V, Consecutive>(source, memory, &keys_of_block(block - 1));
        }
        // Blocks that some row of the tile does not see as a whole come first, and with a window last.
        let (whole, hidden) = (self.whole_blocks(), self.hidden_blocks);
        while block > whole {
            block -= 1;
            let products = self.products::<E, V, NC>(def, attention, source, memory, block);
            let seen = self.seen(attention.row, block, comptime!(Mask::last(windowed)));
            attention.add_values::<E, NC, Seen>(def, products, attended, &seen);
        }
        let mut first_whole = 0u32.runtime();
        if comptime!(windowed) {
            first_whole = self.first_whole();
        }
        while block > first_whole {
            block -= 1;
            let products = self.products::<E, V, NC>(def, attention, source, memory, block);
            attention.add_values::<E, NC, All>(def, products, attended, &All {});
        }
        if comptime!(windowed) {
            while block > hidden {
                block -= 1;
                let products = self.products::<E, V, NC>(def, attention, source, memory, block);
                let seen = self.seen(attention.row, block, Mask::Start);
                attention.add_values::<E, NC, Seen>(def, products, attended, &seen);
            }
        }
    }

    /// Those of a block. The one before it is on its way then.
    fn products<E: Float, V: Size, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        attention: &Attention,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        block: u32,
    ) -> Vector<f32, Const<SCORES>> {
        let products = attention.products::<E, V, NC, Consecutive>(def, source, memory, &keys_of_block(block));
        if block > self.hidden_blocks {
            attention.start_next::<E, V, Consecutive>(source, memory, &keys_of_block(block - 1));
        }
        products
    }

    /// Which columns of a block the unit's rows see.
    fn seen(&self, row: u32, block: u32, #[comptime] mask: Mask) -> Seen {
        let lane = UNIT_POS % LANES as u32;
        let first = (block * comptime!(KEYS as u32) + lane % 4 * 2) as i32;
        let (sees, keys) = (self.first_sees + (row + lane / 4) as i32, self.keys as i32);
        Seen { a: min(sees, keys) - first, b: min(sees + 8, keys) - first, most_seen: self.most_seen, mask }
    }
}

#[cube]
fn keys_of_block(block: u32) -> Consecutive {
    Consecutive { first: block * comptime!(KEYS as u32) }
}
