//! The softmax over the tokens of an entry, and their sum.
//!
//! The tokens of an entry are numbered from the first one on, that of the window before if there is one: those that were
//! there before this call come from the state, the others are new.

use cubecl::prelude::*;

use super::select::Shape;

/// A gate that weighs nothing, and the maximum before the first gate. Finite: WGSL may assume that no infinity occurs.
const HIDDEN: f32 = -1.0e30;

/// The tokens of an entry.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tokens {
    /// How many are of the window before: `window`, or none.
    before: usize,
    /// How many are in the state: the first ones. At least one is not.
    carried: usize,
    /// How many there are.
    count: usize,
    window: usize,
    /// The first row of the sequence's block of the state.
    block_row: usize,
    /// The row in the block of token 0.
    place: usize,
    /// The row in `kv_gates` of token `carried`.
    new_row: usize,
}

#[cube]
impl Tokens {
    /// Of window `number`, which the new tokens fill: `start` is the position of the first of them, `first_row` its row.
    pub fn new(
        start: usize,
        first_row: usize,
        number: usize,
        window: usize,
        block: usize,
        #[comptime] overlap: bool,
    ) -> Tokens {
        let mut before = 0usize.runtime();
        let mut rows = window;
        if overlap {
            rows = 2 * window;
            if number > 0 {
                before = window;
            }
        }
        let first = number * window - before;
        let mut carried = 0usize.runtime();
        if start > first {
            // Never more than there are: lengths that do not ascend must not make this loop for long.
            carried = min(start - first, before + window);
        }
        Tokens {
            before,
            carried,
            count: before + window,
            window,
            block_row: block * rows,
            place: first % rows,
            new_row: first_row + first + carried - start,
        }
    }
}

/// Softmax and sum of some tokens, for the channels of a vector. `sum` and `out` are relative to `highest`.
#[derive(CubeType, Clone, Copy)]
struct Pooled<N: Size> {
    highest: Vector<f32, N>,
    sum: Vector<f32, N>,
    out: Vector<f32, N>,
}

#[cube]
impl<N: Size> Pooled<N> {
    fn empty() -> Pooled<N> {
        Pooled::<N> { highest: Vector::new(HIDDEN), sum: Vector::new(0.0f32), out: Vector::new(0.0f32) }
    }

    /// Adds this group's of the tokens. Which those are, and what is added up together, does not depend on how many of them are in
    /// the state and how many are new.
    fn add<G: Float>(
        &mut self,
        state: &mut [Vector<f32, N>],
        kv_gates: &[Vector<G, N>],
        position_bias: &[Vector<f32, N>],
        tokens: &Tokens,
        column: usize,
        #[comptime] shape: Shape,
    ) {
        let mut token = UNIT_POS as usize / shape.columns;
        while token < tokens.count {
            // All loads before the first use: they take far longer than the rest.
            let mut keys = Sequence::<Vector<f32, N>>::new();
            let mut gates = Sequence::<Vector<f32, N>>::new();
            let mut highest = self.highest;
            #[unroll]
            for i in 0..shape.loads {
                let wanted = token + comptime!(i * shape.groups);
                let other = min(wanted, tokens.count - 1);
                let at = channel_of(tokens, other, column, shape);
                // Of a new token in any case, which spares a second branch.
                let new =
                    (tokens.new_row + max(other, tokens.carried) - tokens.carried) * comptime!(2 * shape.channels());
                let mut key = Vector::<f32, N>::cast_from(kv_gates[new + at]);
                let mut gate = Vector::<f32, N>::cast_from(kv_gates[new + at + comptime!(shape.channels())]);
                if other < tokens.carried {
                    let row = row_in_state(tokens, other, shape) * comptime!(2 * shape.channels());
                    key = state[row + at];
                    gate = state[row + at + comptime!(shape.channels())];
                }
                gate += position_bias[other % tokens.window * comptime!(shape.channels()) + at];
                keys.push(key);
                gates.push(select(wanted < tokens.count, gate, Vector::new(HIDDEN)));
            }
            #[unroll]
            for i in 0..shape.loads {
                highest = max(highest, gates[i]);
            }
            let factor = (self.highest - highest).exp();
            self.sum *= factor;
            self.out *= factor;
            #[unroll]
            for i in 0..shape.loads {
                let weight = (gates[i] - highest).exp();
                self.sum += weight;
                self.out += weight * keys[i];
            }
            self.highest = highest;
            token += comptime!(shape.loads * shape.groups);
        }
    }
}

/// The vector of a token's keys that goes to a column of the entry: with overlap the first half serves the next window.
#[cube]
fn channel_of(tokens: &Tokens, token: usize, column: usize, #[comptime] shape: Shape) -> usize {
    let mut channel = column;
    if comptime!(shape.overlap) {
        channel += select(token < tokens.before, 0usize.runtime(), shape.vectors.runtime());
    }
    channel
}

/// The row of a token in the state.
#[cube]
fn row_in_state(tokens: &Tokens, token: usize, #[comptime] shape: Shape) -> usize {
    let mut rows = tokens.window;
    if comptime!(shape.overlap) {
        rows = 2 * tokens.window;
    }
    tokens.block_row + (tokens.place + token) % rows
}

/// Pools the tokens into `entry`, and gives the sum of its squares. Called by all units of the cube; behind its first barrier the state
/// is not read.
#[cube]
pub(super) fn pool_into<G: Float, N: Size>(
    entry: &mut Shared<[f32]>,
    kv_gates: &[Vector<G, N>],
    state: &mut [Vector<f32, N>],
    position_bias: &[Vector<f32, N>],
    tokens: &Tokens,
    #[comptime] shape: Shape,
) -> f32 {
    let mut group_highest = Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.groups * shape.vectors));
    let mut group_sum = Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.groups * shape.vectors));
    let mut group_out = Shared::<[Vector<f32, N>]>::new_slice(comptime!(shape.groups * shape.vectors));
    let mut partial = Shared::<[f32]>::new_slice(comptime!(shape.units()));
    let mut column = UNIT_POS as usize % shape.columns;
    while column < shape.vectors {
        let mut pooled = Pooled::<N>::empty();
        pooled.add::<G>(state, kv_gates, position_bias, tokens, column, shape);
        let at = UNIT_POS as usize / shape.columns * shape.vectors + column;
        group_highest[at] = pooled.highest;
        group_sum[at] = pooled.sum;
        group_out[at] = pooled.out;
        column += shape.columns;
    }
    sync_cube();

    let unit = UNIT_POS as usize;
    let vector = N::value();
    let mut squares = f32::new(0.0);
    let mut column = unit;
    while column < shape.vectors {
        let mut highest = group_highest[column];
        for group in 1..shape.groups {
            highest = max(highest, group_highest[group * shape.vectors + column]);
        }
        let mut sum = Vector::<f32, N>::new(0.0f32);
        let mut out = Vector::<f32, N>::new(0.0f32);
        for group in 0..shape.groups {
            let at = group * shape.vectors + column;
            let weight = (group_highest[at] - highest).exp();
            sum += weight * group_sum[at];
            out += weight * group_out[at];
        }
        let pooled = out / sum;
        #[unroll]
        for n in 0..vector {
            let value = pooled.extract(n);
            entry[column * vector + n] = value;
            squares += value * value;
        }
        column += comptime!(shape.units());
    }
    partial[unit] = squares;
    let mut half = comptime!(shape.units() / 2).runtime();
    while half > 0 {
        sync_cube();
        if unit < half {
            partial[unit] += partial[unit + half];
        }
        half /= 2;
    }
    sync_cube();
    partial[0]
}
