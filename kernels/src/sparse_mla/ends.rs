//! What the softmax of a tile ends with.

use cubecl::prelude::*;

use super::form::{Form, Writes};
use super::merge::share_beside;
use super::work::Work;
use crate::tiles::form::ROWS;
use crate::tiles::output::{Results, Target};
use crate::tiles::softmax::{SoftmaxState, inverse, log_sum, quad_sum};

/// What a row ends with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowEnd {
    /// What its output is multiplied with, which normalises it if that is wanted.
    pub factor: f32,
    lse: f32,
    sum: f32,
    highest: f32,
    empty_lse: u32,
}

#[cube]
impl RowEnd {
    /// `row` is counted among the heads of its token; `highest` is what the weights with this sum are relative to.
    #[allow(clippy::too_many_arguments)]
    pub fn of(
        sum: f32,
        highest: f32,
        work: &Work,
        row: u32,
        heads: u32,
        sink: &[f32],
        empty_lse: u32,
        #[comptime] form: Form,
    ) -> RowEnd {
        let lse = log_sum(sum, highest, empty_lse);
        let mut factor = inverse(sum);
        if comptime!(form.writes == Writes::Parts) {
            factor = 1.0f32;
        }
        // Who merges splits looks at the sink for them.
        if comptime!(form.sink && matches!(form.writes, Writes::Whole | Writes::Planned)) && work.whole {
            factor *= share_beside(sink[min(row, heads - 1) as usize], lse, sum);
        }
        RowEnd { factor, lse, sum, highest, empty_lse }
    }

    /// The lse, or of parts the largest score.
    fn lse(&self, #[comptime] form: Form) -> f32 {
        let mut lse = self.lse;
        if comptime!(form.writes == Writes::Parts) {
            // The lse of a single weight of 1 is the largest score.
            lse = log_sum(min(self.sum, 1.0f32), self.highest, self.empty_lse);
        }
        lse
    }

    /// Writes the lse, or the largest score and the sum of the weights. One unit of those that share the row.
    pub fn write<E: Float, P: Size>(&self, work: &Work, row: u32, results: &mut Results<E, P>, #[comptime] form: Form) {
        results.write_lse(&work.target(), row, self.lse(form));
        if comptime!(form.writes == Writes::Parts) {
            results.write_lse(&sums_target(work), row, self.sum);
        }
    }
}

/// Where the sums of the weights go.
#[cube]
fn sums_target(work: &Work) -> Target {
    Target::new(true.runtime(), work.token, 0u32)
}

/// What the two rows of a unit end with.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ends {
    /// The first of them, counted among the heads of its token.
    pub row: u32,
    pub a: RowEnd,
    pub b: RowEnd,
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
        let row = work.head_tile * comptime!(ROWS as u32) + own_row;
        let a = RowEnd::of(sum_a, state.highest_a, work, row, heads, sink, empty_lse, form);
        let b = RowEnd::of(sum_b, state.highest_b, work, row + 8, heads, sink, empty_lse, form);
        Ends { row, a, b }
    }

    /// Writes the lse, or the largest score and the sum of the weights. One unit of those that share the rows.
    pub fn write<E: Float, P: Size>(&self, work: &Work, results: &mut Results<E, P>, #[comptime] form: Form) {
        results.write_lses(&work.target(), self.row, self.a.lse(form), self.b.lse(form));
        if comptime!(form.writes == Writes::Parts) {
            results.write_lses(&sums_target(work), self.row, self.a.sum, self.b.sum);
        }
    }
}
