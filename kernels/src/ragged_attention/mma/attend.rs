//! The attention of a tile: both products of each block, and the softmax between them.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::form::{Form, KEYS, LANES, PAIRS, SCORES};
use super::load::Source;
use super::products::{Operands, outputs, scale_rows};
use super::tile::Tile;
use crate::ptx::copy::{commit_copies, wait_for_copies};
use crate::ptx::warp;
use crate::ragged_attention::softmax::{Mask, Scores, Seen, pack, weigh};
use crate::tiles::softmax::SoftmaxState;

/// The output of a unit before the division by the sum, and what belongs to it.
#[derive(CubeType)]
pub(super) struct Attended<NC: Size> {
    pub out: Sequence<Array<Vector<f32, NC>>>,
    pub state: SoftmaxState,
}

#[cube]
impl<NC: Size> Attended<NC> {
    /// Without a key.
    pub fn nothing(#[comptime] form: Form) -> Attended<NC> {
        Attended::<NC> { out: outputs::<NC>(form), state: SoftmaxState::new() }
    }
}

/// What a warp works with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Attention {
    pub tile: Tile,
    pub operands: Operands,
    /// The first of its rows in the tile.
    pub row: u32,
    pub scores: Scores,
    #[cube(comptime)]
    pub form: Form,
}

#[cube]
impl Attention {
    /// From the last block that a row of the tile sees to the first one. All warps of the cube.
    pub fn attend<E: Float, V: Size, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        attended: &mut Attended<NC>,
    ) {
        let mut block = self.tile.blocks;
        if block > 0 {
            source.start_queries(memory, &self.tile, self.form);
            source.start_keys(memory, &self.tile, block - 1, self.form);
        }
        // Blocks that some row of the tile does not see as a whole come first, and with a window last.
        let (whole, hidden) = (self.tile.whole_blocks(), self.tile.hidden_blocks);
        while block > max(whole, hidden) {
            block -= 1;
            self.step::<E, V, NC>(def, source, memory, attended, block, Mask::Ends);
        }
        let mut first_whole = 0u32.runtime();
        if comptime!(self.form.windowed) {
            first_whole = self.tile.first_whole(self.scores.most_seen);
        }
        while block > first_whole {
            block -= 1;
            self.step::<E, V, NC>(def, source, memory, attended, block, Mask::None);
        }
        if comptime!(self.form.windowed) {
            while block > hidden {
                block -= 1;
                self.step::<E, V, NC>(def, source, memory, attended, block, Mask::Window);
            }
        }
    }

    /// A block. Its values arrive under its scores, the keys of the next one under its softmax and its values.
    fn step<E: Float, V: Size, NC: Size>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        attended: &mut Attended<NC>,
        block: u32,
        #[comptime] mask: Mask,
    ) {
        // This unit's copies of the keys have arrived; after that, all units', and all warps are done with the values before.
        arrived();
        source.start_values(memory, &self.tile, block, self.form);
        commit_copies();
        let products = self.operands.score::<E, NC>(def, self.form);
        // The same of the values; all warps are done with the keys.
        arrived();
        if block > self.tile.hidden_blocks {
            source.start_keys(memory, &self.tile, block - 1, self.form);
        }
        commit_copies();
        let seen = self.seen(block);
        let weighed = weigh::<Const<SCORES>>(products, &mut attended.state, self.scores, &seen, mask, self.form);
        if warp::any(weighed.factor_a != 1.0f32 || weighed.factor_b != 1.0f32) {
            scale_rows::<NC>(&mut attended.out, weighed.factor_a, weighed.factor_b, self.form);
        }
        let weights = pack::<Const<SCORES>, Const<PAIRS>>(weighed.weights, self.form);
        self.operands.accumulate::<E, NC>(def, weights, &mut attended.out, self.form);
    }

    /// Which columns of a block the unit's rows see.
    fn seen(&self, block: u32) -> Seen {
        let lane = UNIT_POS % LANES as u32;
        let first = (block * comptime!(KEYS as u32) + lane % 4 * 2) as i32;
        let (sees, keys) = (self.tile.first_sees + (self.row + lane / 4) as i32, self.tile.keys as i32);
        Seen { a: min(sees, keys) - first, b: min(sees + 8, keys) - first }
    }
}

/// Waits until the copies of all units have arrived.
#[cube]
fn arrived() {
    commit_copies();
    wait_for_copies(0u32);
    sync_cube();
}
