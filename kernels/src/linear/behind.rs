//! What the last cube of a product goes on with: of a router's logits of a single token, the choice of its experts, which would be another
//! launch.

use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use crate::common::last_cube::counters;
use crate::common::last_cube::is_last;
#[cfg(feature = "cuda")]
use crate::common::launch::or_dummy;
#[cfg(feature = "cuda")]
use crate::route_experts::{Choice, RouteArgs};
use crate::route_experts::{RouteForm, route_token};

/// What is done behind a product. Launches make `BehindArgs`.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels alone have values of it")]
pub(crate) enum Behind {
    /// Nothing.
    Nothing,
    /// Experts are chosen.
    Route(RouteOfToken),
}

/// What becomes of the logits of a single token: see [`RouteArgs`](crate::route_experts::RouteArgs).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RouteOfToken {
    counters: &'static mut [u32],
    bias: &'static [f32],
    given: &'static [i32],
    rows: &'static [i32],
    slots: &'static [i32],
    indices: &'static mut [i32],
    weights: &'static mut [f32],
    table_rows: usize,
    scale: f32,
    #[cube(comptime)]
    form: RouteForm,
}

#[cfg(feature = "cuda")]
impl BehindArgs {
    /// This choice, whose logits are the product.
    pub(crate) fn route(client: &Client, route: RouteArgs) -> Self {
        let RouteArgs { bias, given, rows, slots, indices, weights, table_rows, scale, form, .. } = route;
        let bias = or_dummy(client, bias, if form.choice == Choice::BiasedScores { form.experts } else { 0 });
        let given = or_dummy(client, given, if form.choice.is_given() { form.top_k } else { 0 });
        let rows = or_dummy(client, rows, if form.choice == Choice::Table { 1 } else { 0 });
        let slots = or_dummy(client, slots, usize::from(form.padded));
        #[rustfmt::skip]
        let args = RouteOfTokenLaunch::new(
            counters(client), bias, given, rows, slots, indices, weights, table_rows, scale, form,
        );
        Self::Route(args)
    }
}

#[cube]
impl Behind {
    /// Called by all `units` of a cube, of which `cubes` have written parts of a product.
    pub(crate) fn run<E: Float>(&mut self, product: &[E], cubes: usize, #[comptime] units: usize) {
        #[comptime]
        match self {
            Behind::Nothing => {}
            Behind::Route(route) => route.run::<E>(product, cubes, units),
        }
    }
}

#[cube]
impl RouteOfToken {
    fn run<E: Float>(&mut self, product: &[E], cubes: usize, #[comptime] units: usize) {
        if CUBE_POS < cubes && is_last(self.counters, 0usize, cubes) {
            route_token(
                product.downcast::<f32>(),
                self.bias,
                self.given,
                self.rows,
                self.slots,
                self.indices,
                self.weights,
                0usize,
                self.table_rows,
                self.scale,
                self.form,
                units,
            );
        }
    }
}

/// A choice, with nothing to launch.
#[cfg(feature = "offline")]
pub(crate) fn offline(form: RouteForm) -> BehindArgs {
    use crate::offline::buffer as any;
    BehindArgs::Route(RouteOfTokenLaunch::new(any(), any(), any(), any(), any(), any(), any(), 1, 1.0, form))
}
