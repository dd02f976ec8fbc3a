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
}

/// `1 / (1 + exp(-x))`.
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
