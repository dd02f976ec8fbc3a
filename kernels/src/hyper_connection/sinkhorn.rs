//! Sinkhorn-Knopp: rows and columns of `comb`, `[n, n]` for each token, are normalised alternately. The softmax is the first of the
//! rows, columns come last. A plane has a number in each unit, where the matrix fits; otherwise one unit has it in its registers.

use cubecl::prelude::*;

use super::mixing::Logits;
use crate::common::plane;

/// By all units of one or several planes, of a multiple of n² units each. The first plane of the cube writes.
#[cube]
pub(super) fn by_plane(
    logits: &Logits,
    products: &[f32],
    scale: &[f32],
    base: &[f32],
    comb: &mut [f32],
    eps: f32,
    iterations: usize,
) {
    let n = logits.n.comptime();
    // Every n² units have the whole matrix: none is left out of a shuffle.
    let at = UNIT_POS as usize % comptime!(n * n);
    let logit = logits.of(products, scale, base, comptime!(2 * n) + at, 2usize);
    let mut largest = logit;
    #[unroll]
    for i in 0..comptime!(n.ilog2()) {
        largest = largest.max(plane::shuffle_xor::<f32>(largest, comptime!(1u32 << i)));
    }
    let weight = (logit - largest).exp();
    let softmax = weight * (1.0 / sum_of_line(weight, n, 1usize)) + eps;
    let mut value = softmax * (1.0 / (sum_of_line(softmax, n, n) + eps));
    let mut iteration = 1usize.runtime();
    while iteration < iterations {
        value *= 1.0 / (sum_of_line(value, n, 1usize) + eps);
        value *= 1.0 / (sum_of_line(value, n, n) + eps);
        iteration += 1;
    }
    if (UNIT_POS as usize) < comptime!(n * n) {
        comb[logits.token * comptime!(n * n) + at] = value;
    }
}

/// The sum of a unit's line of `n` numbers, which are `stride` units apart.
#[cube]
fn sum_of_line(own: f32, #[comptime] n: usize, #[comptime] stride: usize) -> f32 {
    let mut sum = own;
    #[unroll]
    for i in 0..comptime!(n.ilog2()) {
        sum += plane::shuffle_xor::<f32>(sum, comptime!((stride as u32) << i));
    }
    sum
}

/// By one unit.
#[cube]
pub(super) fn by_unit(
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
