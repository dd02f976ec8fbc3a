//! Sinkhorn-Knopp: rows and columns of `comb`, `[n, n]` for each token, are normalised alternately. The softmax is the first of the
//! rows, columns come last. A plane has a number in each unit, where the matrix fits; otherwise one unit has it in its registers.

use cubecl::prelude::*;

use super::mixing::Logits;
use crate::common::plane;
#[cfg(feature = "cuda")]
use crate::ptx::math::reciprocal;

/// Writes the matrix. By all units of one or several planes, of a multiple of n² units each; the first plane of the cube writes.
#[cube]
pub(super) fn mix_by_plane(
    logits: &Logits,
    products: &[f32],
    scale: &[f32],
    base: &[f32],
    comb: &mut [f32],
    eps: f32,
    iterations: usize,
) {
    let n = logits.n.comptime();
    let at = UNIT_POS as usize % comptime!(n * n);
    let logit = logits.of(products, scale, base, comptime!(2 * n) + at, 2usize);
    by_plane(logit, logits.token, comb, (UNIT_POS as usize) < comptime!(n * n), eps, iterations, n);
}

/// By all units of one or several planes, of a multiple of n² units each: a logit in each, of which the first plane has those that count.
///
/// What depends on one another is few instructions: every unit gets all n² numbers, which stay as they are. Each line has a factor, one
/// over what its sum was divided by so far; in that an epsilon is a multiple of the one before.
#[cube]
pub(super) fn by_plane(
    logit: f32,
    token: usize,
    comb: &mut [f32],
    writes: bool,
    eps: f32,
    iterations: usize,
    #[comptime] n: usize,
) {
    let mut largest = logit;
    #[unroll]
    for i in 0..comptime!(n.ilog2()) {
        largest = largest.max(plane::shuffle_xor::<f32>(largest, comptime!(1u32 << i)));
    }
    let weight = (logit - largest).exp();
    let own = weight * (1.0 / sum_of_line(weight, n, 1usize)) + eps;
    let mut numbers = Sequence::<f32>::new();
    #[unroll]
    for i in 0..comptime!(n * n) {
        numbers.push(plane::shuffle::<f32>(own, comptime!(i as u32).runtime()));
    }
    let (mut rows, mut columns) = (Lines::new(n), Lines::new(n));
    columns.divide(&numbers, &rows, eps, 1usize, n);
    let mut iteration = 1usize.runtime();
    while iteration < iterations {
        rows.divide(&numbers, &columns, eps, n, 1usize);
        columns.divide(&numbers, &rows, eps, 1usize, n);
        iteration += 1;
    }
    if writes {
        // Every n² units have the whole matrix.
        let at = UNIT_POS as usize % comptime!(n * n);
        comb[token * comptime!(n * n) + at] = own * rows.factor(at / n) * columns.factor(at % n);
    }
}

/// The rows or the columns.
#[derive(CubeType)]
struct Lines {
    /// What each line was divided by, in all.
    divisors: Array<f32>,
    factors: Array<f32>,
    #[cube(comptime)]
    n: usize,
}

#[cube]
impl Lines {
    fn new(#[comptime] n: usize) -> Lines {
        let mut divisors = Array::<f32>::new(n);
        let mut factors = Array::<f32>::new(n);
        #[unroll]
        for line in 0..n {
            divisors[line] = 1.0f32;
            factors[line] = 1.0f32;
        }
        Lines { divisors, factors, n }
    }

    /// Divides each line by its sum: lines are `step` apart, and their numbers `stride`.
    fn divide(
        &mut self,
        numbers: &Sequence<f32>,
        others: &Lines,
        eps: f32,
        #[comptime] step: usize,
        #[comptime] stride: usize,
    ) {
        let n = self.n.comptime();
        #[unroll]
        for line in 0..n {
            let mut sum = eps * self.divisors[line];
            #[unroll]
            for i in 0..n {
                sum += numbers[comptime!(line * step + i * stride)] * others.factors[i];
            }
            self.divisors[line] = sum;
            self.factors[line] = one_over(sum);
        }
    }

    fn factor(&self, line: usize) -> f32 {
        let mut factor = self.factors[0];
        #[unroll]
        for i in 1..self.n.comptime() {
            factor = select(line == i, self.factors[i], factor);
        }
        factor
    }
}

/// On NVIDIA's GPUs within 1 ulp, by one instruction instead of ten and a branch.
#[cube]
fn one_over(x: f32) -> f32 {
    let ptx = plane::is_ptx().comptime();
    if comptime!(ptx) { reciprocal(x) } else { 1.0 / x }
}

/// In place of the instruction, which no device of this build has.
#[cfg(not(feature = "cuda"))]
#[cube]
fn reciprocal(x: f32) -> f32 {
    1.0 / x
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
