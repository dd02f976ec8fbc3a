//! How the streams of a token are mixed: by a few numbers, of which one unit computes the matrix in its registers.

use cubecl::prelude::*;

/// The numbers of a token before their functions: its products, for whose norm there is a factor, scaled and shifted.
#[derive(CubeType)]
pub(super) struct Logits {
    token: usize,
    factor: f32,
    /// Streams.
    #[cube(comptime)]
    n: usize,
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

/// Sinkhorn-Knopp: rows and columns of `comb`, `[n, n]` for each token, are normalised alternately. The softmax is the first of the
/// rows, columns come last. Called by one unit.
#[cube]
pub(super) fn doubly_stochastic(
    logits: &Logits,
    products: &[f32],
    scale: &[f32],
    base: &[f32],
    comb: &mut [f32],
    eps: f32,
    iterations: usize,
) {
    let n = logits.n.comptime();
    let mut matrix = Array::<f32>::new(comptime!(n * n));
    #[unroll]
    for row in 0..n {
        let mut largest = f32::new(f32::MIN);
        #[unroll]
        for column in 0..n {
            let at = comptime!(row * n + column);
            matrix[at] = logits.of(products, scale, base, comptime!(2 * n) + at, 2usize);
            largest = largest.max(matrix[at]);
        }
        let mut sum = 0.0f32;
        #[unroll]
        for column in 0..n {
            let at = comptime!(row * n + column);
            matrix[at] = (matrix[at] - largest).exp();
            sum += matrix[at];
        }
        let share = 1.0 / sum;
        #[unroll]
        for column in 0..n {
            let at = comptime!(row * n + column);
            matrix[at] = matrix[at] * share + eps;
        }
    }
    normalise(&mut matrix, eps, n, 1usize, n);
    let mut iteration = 1usize.runtime();
    while iteration < iterations {
        normalise(&mut matrix, eps, n, n, 1usize);
        normalise(&mut matrix, eps, n, 1usize, n);
        iteration += 1;
    }
    #[unroll]
    for i in 0..comptime!(n * n) {
        comb[logits.token * comptime!(n * n) + i] = matrix[i];
    }
}

/// Divides each line by its sum: lines are `step` apart, and their numbers `stride`.
#[cube]
fn normalise(
    matrix: &mut Array<f32>,
    eps: f32,
    #[comptime] n: usize,
    #[comptime] step: usize,
    #[comptime] stride: usize,
) {
    #[unroll]
    for line in 0..n {
        let mut sum = eps;
        #[unroll]
        for i in 0..n {
            sum += matrix[comptime!(line * step + i * stride)];
        }
        let share = 1.0 / sum;
        #[unroll]
        for i in 0..n {
            matrix[comptime!(line * step + i * stride)] *= share;
        }
    }
}
