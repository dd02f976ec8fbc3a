//! A block of a tile's attention: both products, and the softmax between them.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::form::{Form, LANES, M, PAIRS, PANEL_BYTES, SCORES};
use super::load::{BlockRows, Source, Tile, key_and_value_bytes};
use super::products::{Operands, outputs, scale_rows};
use crate::ptx::copy::{commit_copies, wait_for_copies};
use crate::ptx::warp;
use crate::tiles::prefill::softmax::{Scores, Visible, pack, weigh};
use crate::tiles::softmax::SoftmaxState;

/// The output of a unit before the division by the sum, and what belongs to it.
#[derive(CubeType)]
pub(crate) struct Attended<NC: Size> {
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
pub(crate) struct Attention {
    pub tile: Tile,
    pub operands: Operands,
    /// Where its rows of the queries lie in shared memory.
    pub queries_at: u32,
    /// The first of its rows in the tile.
    pub row: u32,
    pub scores: Scores,
    #[cube(comptime)]
    pub form: Form,
}

#[cube]
impl Attention {
    /// Of a tile whose queries, keys and values have room in shared memory from `memory_at` on.
    pub fn new(tile: Tile, memory_at: u32, scores: Scores, #[comptime] form: Form) -> Attention {
        let row = warp::uniform(UNIT_POS / LANES as u32) * comptime!(M as u32);
        let queries_at = memory_at + row * comptime!(form.key_panels as u32 * PANEL_BYTES);
        let (keys_at, values_at) = comptime!(key_and_value_bytes(form));
        let operands = Operands::new(queries_at, memory_at + keys_at, memory_at + values_at, form);
        Attention { tile, operands, queries_at, row, scores, form }
    }

    /// Starts to copy the queries and the first block of keys. All warps of the cube.
    pub fn start<E: Float, V: Size, R: BlockRows>(
        &self,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        block: &R,
    ) {
        source.start_queries(memory, &self.tile, self.form);
        source.start_keys::<R>(memory, &self.tile, block, self.form);
    }

    /// The products of the queries and a block of keys. Its values arrive meanwhile. All warps of the cube.
    pub fn products<E: Float, V: Size, NC: Size, R: BlockRows>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        block: &R,
    ) -> Vector<f32, Const<SCORES>> {
        // This unit's copies of the keys have arrived; after that, all units', and all warps are done with the values before.
        arrived();
        source.start_values::<R>(memory, &self.tile, block, self.form);
        // All lanes execute `ldmatrix` together, whichever rows there were for them to copy.
        sync_plane();
        let products = self.operands.score::<E, NC>(def, self.form);
        // The same of the values; all warps are done with the keys.
        arrived();
        products
    }

    /// Starts to copy the next block of keys. All warps of the cube, after the products of the one before.
    pub fn start_next<E: Float, V: Size, R: BlockRows>(
        &self,
        source: &Source<'_, E, V>,
        memory: &mut Shared<[Vector<E, V>]>,
        block: &R,
    ) {
        source.start_keys::<R>(memory, &self.tile, block, self.form);
    }

    /// Adds the values of the block whose products these are.
    pub fn add_values<E: Float, NC: Size, S: Visible>(
        &self,
        def: &MmaDefinition<E, E, f32>,
        products: Vector<f32, Const<SCORES>>,
        attended: &mut Attended<NC>,
        seen: &S,
    ) {
        let weighed = weigh::<Const<SCORES>, S>(products, &mut attended.state, self.scores, seen, self.form);
        if warp::any(weighed.factor_a != 1.0f32 || weighed.factor_b != 1.0f32) {
            scale_rows::<NC>(&mut attended.out, weighed.factor_a, weighed.factor_b, self.form);
        }
        let weights = pack::<Const<SCORES>, Const<PAIRS>>(weighed.weights, self.form);
        self.operands.accumulate::<E, NC>(def, weights, &mut attended.out, self.form);
    }
}

/// Waits until the copies of all units have arrived.
#[cube]
fn arrived() {
    commit_copies();
    wait_for_copies(0u32);
    sync_cube();
}
