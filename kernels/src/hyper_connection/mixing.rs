//! How the streams of a token are mixed: by a few numbers.

use cubecl::prelude::*;

use super::sinkhorn;

/// The numbers of a token before their functions: its products, for whose norm there is a factor, scaled and shifted.
#[derive(CubeType)]
pub(super) struct Logits {
    pub token: usize,
    factor: f32,
    /// Streams.
    #[cube(comptime)]
    pub n: usize,
}

#[cube]
impl Logits {
    pub(super) fn new(token: usize, factor: f32, #[comptime] n: usize) -> Logits {
        Logits { token, factor, n }
    }

    /// Number `at`, in part `part`, of the token's products.
    pub(super) fn of(&self, products: &[f32], scale: &[f32], base: &[f32], at: usize, part: usize) -> f32 {
        products[at] * self.factor * scale[part] + base[at]
    }

    /// Writes the matrix. By all units of one or several planes, of a multiple of n² units each; the first plane of the cube writes.
    pub(super) fn mix_by_plane(
        &self,
        products: &[f32],
        scale: &[f32],
        base: &[f32],
        comb: &mut [f32],
        eps: f32,
        iterations: usize,
    ) {
        let n = self.n.comptime();
        let at = UNIT_POS as usize % comptime!(n * n);
        let logit = self.of(products, scale, base, comptime!(2 * n) + at, 2usize);
        sinkhorn::by_plane(logit, self.token, comb, (UNIT_POS as usize) < comptime!(n * n), eps, iterations, n);
    }
}

/// `1 / (1 + exp(-x))`.
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
