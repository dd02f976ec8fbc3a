//! Where a projection finds the experts of a single token: in memory, or in the router's logits, from which each cube of a pair
//! then chooses for itself. That saves a launch, which takes longer than ranking a few hundred scores several times. Of experts that are
//! given, or in a table, a cube reads its own, and only the one that writes the weights looks at the logits.

use cubecl::prelude::*;

use crate::common::launch::or_dummy;
use crate::linear::WeightFormat;
use crate::linear::grid::{Part, Tile};
use crate::route_experts::{Choice, RouteArgs, RouteForm, choose, given_expert, local_number, score, take, write};

/// Where the expert of each pair is. Launches make `PairExpertsArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum PairExperts {
    /// In a list.
    Listed,
    /// In the logits.
    Routed(RoutedPairs),
}

/// The logits of one token and what becomes of them: see [`RouteArgs`].
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RoutedPairs {
    logits: &'static [f32],
    bias: &'static [f32],
    given: &'static [i32],
    rows: &'static [i32],
    indices: &'static mut [i32],
    weights: &'static mut [f32],
    table_rows: usize,
    scale: f32,
    #[cube(comptime)]
    form: RouteForm,
}

impl PairExpertsArgs {
    /// This choice, if there is one to make.
    pub(crate) fn new(client: &Client, route: Option<RouteArgs>) -> Self {
        let Some(route) = route else { return Self::Listed };
        let RouteArgs { logits, bias, given, rows, indices, weights, table_rows, scale, form, .. } = route;
        let bias = or_dummy(client, bias, if form.choice == Choice::BiasedScores { form.experts } else { 0 });
        let given = or_dummy(client, given, if form.choice.is_given() { form.top_k } else { 0 });
        let rows = or_dummy(client, rows, if form.choice == Choice::Table { 1 } else { 0 });
        Self::Routed(RoutedPairsLaunch::new(logits, bias, given, rows, indices, weights, table_rows, scale, form))
    }
}

/// Experts up to which each cube may rank them for itself. That takes time with the square of their number: with 64 of them the launch
/// of V2-Lite's gate and up takes 1 us longer, with 256 V3's takes 80 us longer and V4-Flash's 46; a launch of its own takes 2.
const MOST_RANKED: usize = 64;

/// Whether cubes should make this choice: that of one token, which is no padding. Cubes that read codes have half of the time, and rank
/// none.
pub(crate) fn chooses(route: &RouteArgs, weights: WeightFormat) -> bool {
    let is_fast = match route.form.choice {
        Choice::Given | Choice::Table => true,
        Choice::Scores | Choice::BiasedScores => weights.is_dense() && route.form.experts <= MOST_RANKED,
    };
    route.tokens == 1 && !route.form.padded && is_fast
}

#[cube]
impl PairExperts {
    /// Gives a tile without rows the expert of pair number `number` of `pairs`, if it is to be chosen and one of so many. The
    /// first cube of the pairs writes the choice. Called by all `units` of a cube.
    pub(crate) fn assign(
        &mut self,
        tile: &mut Tile,
        part: &Part,
        number: usize,
        pairs: usize,
        experts: usize,
        #[comptime] units: usize,
    ) {
        #[comptime]
        match self {
            PairExperts::Listed => {}
            PairExperts::Routed(routed) => {
                if !part.is_second && number < pairs {
                    tile.take(routed.choose(number, part.cube == 0, units), experts);
                }
                // All lanes execute the products together, also of the warp that has written the choice.
                sync_plane();
            }
        }
    }
}

#[cube]
impl RoutedPairs {
    /// The local number of the expert of pair number `number`. The bits are those of [`route`](crate::route_experts).
    fn choose(&mut self, number: usize, writes: bool, #[comptime] units: usize) -> i32 {
        let form = comptime!(self.form);
        let mut scores = Shared::<[f32]>::new_slice(form.experts);
        let mut chosen = Shared::<[i32]>::new_slice(form.top_k);
        if comptime!(form.choice.is_given()) {
            if writes {
                score(self.logits, &mut scores, 0usize, form, units);
                take(self.given, self.rows, &mut chosen, 0usize, self.table_rows, form, units);
                write(&scores, &chosen, self.indices, self.weights, 0usize, false, self.scale, form, units);
            }
            local_number(given_expert(self.given, self.rows, 0usize, number, self.table_rows, form), form)
        } else {
            score(self.logits, &mut scores, 0usize, form, units);
            choose(self.bias, &scores, &mut chosen, form, units);
            if writes {
                write(&scores, &chosen, self.indices, self.weights, 0usize, false, self.scale, form, units);
            }
            local_number(chosen[number], form)
        }
    }
}

/// A choice, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline(form: RouteForm) -> PairExpertsArgs {
    use crate::offline::buffer;
    let any = buffer;
    PairExpertsArgs::Routed(RoutedPairsLaunch::new(any(), any(), any(), any(), any(), any(), 1, 1.0, form))
}
