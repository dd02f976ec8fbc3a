//! What the softmax of a tile ends with.

use cubecl::prelude::*;

use super::form::{Form, Writes};
use super::merge::share_beside;
use super::work::Work;
use crate::tiles::form::ROWS;
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SoftmaxState, inverse, log_sum, quad_sum};

/// What the two rows of a unit end with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ends {
    /// The first of them, counted among the heads of its token.
    pub row: u32,
    /// What their output is multiplied with, which normalises it if that is wanted.
    pub factor_a: f32,
    pub factor_b: f32,
    lse_a: f32,
    lse_b: f32,
    sum_a: f32,
    sum_b: f32,
    highest_a: f32,
    highest_b: f32,
    empty_lse: u32,
}

#[cube]
impl Ends {
    /// `own_row` is the first of the two, counted among those of the tile.
    pub fn of(
        state: &SoftmaxState,
        work: &Work,
        own_row: u32,
        heads: u32,
        sink: &[f32],
        empty_lse: u32,
        #[comptime] form: Form,
    ) -> Ends {
        let (sum_a, sum_b) = (quad_sum(state.sum_a), quad_sum(state.sum_b));
        let lse_a = log_sum(sum_a, state.highest_a, empty_lse);
        let lse_b = log_sum(sum_b, state.highest_b, empty_lse);
        let row = work.head_tile * comptime!(ROWS as u32) + own_row;
        let (mut factor_a, mut factor_b) = (inverse(sum_a), inverse(sum_b));
        if comptime!(form.writes == Writes::Parts) {
            factor_a = 1.0f32;
            factor_b = 1.0f32;
        }
        // Who merges splits looks at the sink for them.
        if comptime!(form.sink && matches!(form.writes, Writes::Whole | Writes::Planned)) && work.whole {
            let last = heads - 1;
            factor_a *= share_beside(sink[min(row, last) as usize], lse_a, sum_a);
            factor_b *= share_beside(sink[min(row + 8, last) as usize], lse_b, sum_b);
        }
        let (highest_a, highest_b) = (state.highest_a, state.highest_b);
        Ends { row, factor_a, factor_b, lse_a, lse_b, sum_a, sum_b, highest_a, highest_b, empty_lse }
    }

    /// Writes the lse, or the largest score and the sum of the weights. One unit of those that share the rows.
    pub fn write<E: Float, P: Size>(&self, work: &Work, results: &mut Results<E, P>, #[comptime] form: Form) {
        let target = work.target();
        if comptime!(form.writes == Writes::Parts) {
            // The lse of a single weight of 1 is the largest score.
            let (one_a, one_b) = (min(self.sum_a, 1.0f32), min(self.sum_b, 1.0f32));
            let max_a = log_sum(one_a, self.highest_a, self.empty_lse);
            let max_b = log_sum(one_b, self.highest_b, self.empty_lse);
            results.write_lses(&target, self.row, max_a, max_b);
            results.write_lses(&Target::new(true.runtime(), work.token, 0u32), self.row, self.sum_a, self.sum_b);
        } else {
            results.write_lses(&target, self.row, self.lse_a, self.lse_b);
        }
    }
}
