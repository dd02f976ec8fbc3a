//! How the streams of a token are mixed: by a few numbers.

use cubecl::prelude::*;

/// The numbers of a token before their functions: its products, for whose norm there is a factor, scaled and shifted.
#[derive(CubeType)]
pub(super) struct Logits {
    pub token: usize,
    factor: f32,
    /// Streams.
    #[cube(comptime)]
    pub n: usize,
    /// Whether there are more than those of the sum.
    #[cube(comptime)]
    before_block: bool,
}

#[cube]
impl Logits {
    pub(super) fn new(token: usize, factor: f32, #[comptime] n: usize, #[comptime] before_block: bool) -> Logits {
        Logits { token, factor, n, before_block }
    }

    /// Number `at`, in part `part`.
    pub(super) fn of(&self, products: &[f32], scale: &[f32], base: &[f32], at: usize, part: usize) -> f32 {
        let (n, before_block) = (self.n.comptime(), self.before_block.comptime());
        products[self.token * comptime!(if before_block { (2 + n) * n } else { n }) + at] * self.factor * scale[part]
            + base[at]
    }
}

/// `1 / (1 + exp(-x))`.
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
