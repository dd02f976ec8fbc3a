//! A cluster that has the splits of one tile: which split each cube has, and the merge.

use cubecl::prelude::*;

use super::cube::Cube;
use crate::merge_splits::{Splits, Weights};
use crate::merge_state::merged_lse;
use crate::ptx::{barrier, warp};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::merge::{VECTORS, share_beside};
use crate::sparse_mla::work::Lists;
use crate::tiles::form::{GROUP, ROWS};
use crate::tiles::output::Results;

/// Warps of the output, which merge a row each: what the columns of a row have in common, most of the instructions, is computed once for
/// the four vectors of a lane.
const WARPS: usize = 2 * GROUP as usize / 32;

/// The number of the cube's split, or one behind all. The cubes of a cluster may be more than splits; they merge, too.
#[cube]
pub(super) fn split(lists: &Lists, items: u32, #[comptime] form: Form) -> u32 {
    let (tile, split) = (CUBE_POS as u32 / comptime!(form.merging), CUBE_POS as u32 % comptime!(form.merging));
    let (token, head_tile) = (tile / lists.head_tiles, tile % lists.head_tiles);
    select(split < lists.splits, (token * lists.splits + split) * lists.head_tiles + head_tile, items)
}

/// Waits until the splits of all cubes are written. Each warpgroup by itself, at its end.
#[cube]
pub(super) fn sync(#[comptime] form: Form) {
    if comptime!(form.merges()) {
        barrier::sync_cluster_global();
    }
}

/// Merges the cube's share of the rows of the tile: every so-many-th. For the units of the output, which have the most registers.
#[cube]
pub(super) fn merge<E: Float, P: Size>(
    cube: &Cube,
    lists: &Lists,
    sink: &[f32],
    empty_lse: u32,
    results: &mut Results<E, P>,
) {
    let form = comptime!(cube.form);
    let cubes = comptime!(form.merging as usize);
    // Computed anew: nothing of it takes registers before.
    let position = warp::uniform(CUBE_POS_X) as usize;
    let (heads, head_tiles) = (cube.heads as usize, lists.head_tiles as usize);
    let (token, head_tile) = (position / cubes / head_tiles, position / cubes % head_tiles);
    let end = min(head_tile * ROWS + ROWS, heads);
    let mut head = head_tile * ROWS + position % cubes + UNIT_POS as usize / 32 % WARPS * cubes;
    while head < end {
        let (count, column) = (lists.splits as usize, cube.lane as usize);
        let (first, width) = (token * count * heads + head, comptime!(VECTORS).runtime());
        let own = Splits { first, step: heads, count, column, width, empty_lse: f32::reinterpret(empty_lse) };
        merge_row::<E, P>(&own, token * heads + head, head, sink, results, form);
        head += comptime!(WARPS * cubes);
    }
}

/// Merges a row of the result, with the bits of a merge by a launch of its own.
#[cube]
fn merge_row<E: Float, P: Size>(
    own: &Splits,
    row: usize,
    head: usize,
    sink: &[f32],
    results: &mut Results<E, P>,
    #[comptime] form: Form,
) {
    let loads = comptime!(form.merging as usize);
    let outs = &*results.partial_out;
    // Two vectors on their way before anything waits for the weights, which registers allow in any form.
    let (first, second) = (own.parts::<P>(outs, 0usize, loads), own.parts::<P>(outs, 32usize, loads));
    let weights = Weights::of(&*results.partial_lse, own, loads);
    let lse = merged_lse(weights.highest, weights.sum, own.empty_lse);
    let mut share = 1.0f32;
    if comptime!(form.sink) {
        share = share_beside(sink[head], lse, weights.sum);
    }
    let (third, fourth) = (own.parts::<P>(outs, 64usize, loads), own.parts::<P>(outs, 96usize, loads));
    let (at, share) = (row * VECTORS + own.column, Vector::new(share));
    results.out[at] = Vector::cast_from(weights.mean::<P>(&first) * share);
    results.out[at + 32] = Vector::cast_from(weights.mean::<P>(&second) * share);
    results.out[at + 64] = Vector::cast_from(weights.mean::<P>(&third) * share);
    results.out[at + 96] = Vector::cast_from(weights.mean::<P>(&fourth) * share);
    if own.column == 0 {
        results.lse[row] = lse;
    }
}
