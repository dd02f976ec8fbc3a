//! The attention over several sets of keys from the attentions over each.
//!
//! A state is `out`, the softmax-weighted mean of the values, and `lse`, the natural logarithm of the sum of
//! `exp(score)`. Merged, each part weighs `exp(lse - lse_merged)` (FlashAttention-2 §3.1). Sums are in f32.
//!
//! An empty part has the lse -inf or +inf, and whatever in `out`, which is let into no sum, not even with the weight 0.
//! Kernels take any lse from ±[`EMPTY_LSE`] on for one: no score comes near, and comparisons with infinities are not to
//! be relied on in WGSL, nor with fast math. Where all parts are empty the result is `out = 0`, `lse = -inf`.

use cubecl::prelude::*;

use crate::common::launch::{RowGrid, address_type, grid_row};

/// Log-sum-exps from here on, of either sign, are those of empty parts.
pub const EMPTY_LSE: f32 = 1.0e38;

/// Arguments of [`launch_merge_state`].
pub struct MergeStateArgs {
    /// `[rows, width]`.
    pub out_a: BufferArg,
    /// f32 `[rows]`.
    pub lse_a: BufferArg,
    /// `[rows, width]`.
    pub out_b: BufferArg,
    /// f32 `[rows]`.
    pub lse_b: BufferArg,
    /// `[rows, width]`, written.
    pub out: BufferArg,
    /// f32 `[rows]`, written.
    pub lse: BufferArg,
    /// Tokens times heads.
    pub rows: usize,
    /// Channels of a value.
    pub width: usize,
    /// Of all outs.
    pub elem: ElemType,
}

/// Arguments of [`launch_merge_states`].
pub struct MergeStatesArgs {
    /// `[tokens, parts, heads, width]`.
    pub outs: BufferArg,
    /// f32 `[tokens, parts, heads]`.
    pub lses: BufferArg,
    /// `[tokens, heads, width]`, written.
    pub out: BufferArg,
    /// f32 `[tokens, heads]`, written.
    pub lse: BufferArg,
    /// Query tokens.
    pub tokens: usize,
    /// States to merge for each token and head; 0 gives empty states.
    pub parts: usize,
    /// Query heads.
    pub heads: usize,
    /// Channels of a value.
    pub width: usize,
    /// Of `outs` and `out`.
    pub elem: ElemType,
}

/// Arguments of [`launch_merge_state_into`].
pub struct MergeStateIntoArgs {
    /// f32 `[rows, width]`, merged into in place.
    pub acc_out: BufferArg,
    /// f32 `[rows]`, merged into in place.
    pub acc_lse: BufferArg,
    /// `[rows, width]`.
    pub out: BufferArg,
    /// f32 `[rows]`.
    pub lse: BufferArg,
    /// Tokens times heads.
    pub rows: usize,
    /// Channels of a value.
    pub width: usize,
    /// Of `out`.
    pub elem: ElemType,
}

/// Merges two states. With no rows nothing is launched.
pub fn launch_merge_state(client: &Client, args: MergeStateArgs) {
    if args.rows == 0 {
        return;
    }
    let grid = RowGrid::new(client, args.rows, &[args.width], args.elem.size());
    merge_state_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.out, &args.lse]),
        grid.vector_size,
        args.out_a,
        args.lse_a,
        args.out_b,
        args.lse_b,
        args.out,
        args.lse,
        args.rows,
        args.width / grid.vector_size,
        f32::NEG_INFINITY,
        args.elem,
    );
}

/// Merges any number of states for each token and head. With no tokens or heads nothing is launched.
pub fn launch_merge_states(client: &Client, args: MergeStatesArgs) {
    let rows = args.tokens * args.heads;
    if rows == 0 {
        return;
    }
    let grid = RowGrid::new(client, rows, &[args.width], args.elem.size());
    merge_states_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.outs, &args.lses, &args.out]),
        grid.vector_size,
        args.outs,
        args.lses,
        args.out,
        args.lse,
        args.tokens,
        args.parts,
        args.heads,
        args.width / grid.vector_size,
        f32::NEG_INFINITY,
        args.elem,
    );
}

/// Merges a state into an accumulator in f32, in place. With no rows nothing is launched.
pub fn launch_merge_state_into(client: &Client, args: MergeStateIntoArgs) {
    if args.rows == 0 {
        return;
    }
    let grid = RowGrid::new(client, args.rows, &[args.width], size_of::<f32>());
    merge_state_into_kernel::launch(
        client,
        grid.cube_count,
        grid.cube_dim,
        address_type(client, &[&args.acc_out, &args.acc_lse]),
        grid.vector_size,
        args.acc_out,
        args.acc_lse,
        args.out,
        args.lse,
        args.rows,
        args.width / grid.vector_size,
        f32::NEG_INFINITY,
        args.elem,
    );
}

/// One row of units per row of `out`. Widths are in vectors, here and below.
///
/// `neg_inf` is an argument since WGSL has no literal for it, and compilers refuse constants that come out infinite.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn merge_state_kernel<E: Float, N: Size>(
    out_a: &[Vector<E, N>],
    lse_a: &[f32],
    out_b: &[Vector<E, N>],
    lse_b: &[f32],
    out: &mut [Vector<E, N>],
    lse: &mut [f32],
    rows: usize,
    width: usize,
    neg_inf: f32,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    if row < rows {
        let weights = pair_weights(lse_a[row], lse_b[row], neg_inf);
        let mut column = UNIT_POS_X as usize;
        while column < width {
            let at = row * width + column;
            let mut merged = Vector::<f32, N>::new(0.0f32);
            if weights.a > 0.0 {
                merged += Vector::cast_from(out_a[at]) * Vector::new(weights.a);
            }
            if weights.b > 0.0 {
                merged += Vector::cast_from(out_b[at]) * Vector::new(weights.b);
            }
            out[at] = Vector::cast_from(merged);
            column += CUBE_DIM_X as usize;
        }
        if UNIT_POS_X == 0 {
            lse[row] = weights.lse;
        }
    }
}

/// As [`merge_state_kernel`], with the accumulator for the first state and for the result.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn merge_state_into_kernel<E: Float, N: Size>(
    acc_out: &mut [Vector<f32, N>],
    acc_lse: &mut [f32],
    out: &[Vector<E, N>],
    lse: &[f32],
    rows: usize,
    width: usize,
    neg_inf: f32,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    let mut lse_a = neg_inf;
    let mut lse_b = neg_inf;
    if row < rows {
        lse_a = acc_lse[row];
        lse_b = lse[row];
    }
    // All units of the row, which are in one cube, have read its lse before one of them overwrites it.
    sync_cube();
    if row < rows {
        let weights = pair_weights(lse_a, lse_b, neg_inf);
        let mut column = UNIT_POS_X as usize;
        while column < width {
            let at = row * width + column;
            let mut merged = Vector::<f32, N>::new(0.0f32);
            if weights.a > 0.0 {
                merged += acc_out[at] * Vector::new(weights.a);
            }
            if weights.b > 0.0 {
                merged += Vector::cast_from(out[at]) * Vector::new(weights.b);
            }
            acc_out[at] = merged;
            column += CUBE_DIM_X as usize;
        }
        if UNIT_POS_X == 0 {
            acc_lse[row] = weights.lse;
        }
    }
}

/// One row of units per token and head.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn merge_states_kernel<E: Float, N: Size>(
    outs: &[Vector<E, N>],
    lses: &[f32],
    out: &mut [Vector<E, N>],
    lse: &mut [f32],
    tokens: usize,
    parts: usize,
    heads: usize,
    width: usize,
    neg_inf: f32,
    #[define(E)] _elem: ElemType,
) {
    let row = grid_row();
    if row < tokens * heads {
        let first = row / heads * parts * heads + row % heads;
        let states = States { first, step: heads, count: parts };
        merge_row::<E, N>(outs, lses, out, lse, &states, row, width, neg_inf);
    }
}

/// What two states weigh, 0 where empty, and the lse of both.
#[derive(CubeType, Clone, Copy)]
struct PairWeights {
    a: f32,
    b: f32,
    lse: f32,
}

#[cube]
fn pair_weights(lse_a: f32, lse_b: f32, neg_inf: f32) -> PairWeights {
    let highest = higher(higher(-EMPTY_LSE, lse_a), lse_b);
    let a = weight(lse_a, highest);
    let b = weight(lse_b, highest);
    let sum = a + b;
    let scale = inverse(sum);
    PairWeights { a: a * scale, b: b * scale, lse: merged_lse(highest, sum, neg_inf) }
}

/// The rows of `outs` and `lses` that make up one row of the result.
#[derive(CubeType, Clone, Copy)]
struct States {
    first: usize,
    step: usize,
    count: usize,
}

/// Merges the states of a row of the result.
#[cube]
fn merge_row<E: Float, N: Size>(
    outs: &[Vector<E, N>],
    lses: &[f32],
    out: &mut [Vector<E, N>],
    lse: &mut [f32],
    states: &States,
    row: usize,
    width: usize,
    neg_inf: f32,
) {
    let mut highest = f32::new(-EMPTY_LSE);
    for part in 0..states.count {
        highest = higher(highest, lses[states.first + part * states.step]);
    }
    let mut sum = f32::new(0.0);
    for part in 0..states.count {
        sum += weight(lses[states.first + part * states.step], highest);
    }
    let scale = inverse(sum);

    let mut column = UNIT_POS_X as usize;
    while column < width {
        let mut merged = Vector::<f32, N>::new(0.0f32);
        for part in 0..states.count {
            let state = states.first + part * states.step;
            let weight = weight(lses[state], highest) * scale;
            // A select, not a branch around the load: so that compilers load several parts at once.
            let value = Vector::<f32, N>::cast_from(outs[state * width + column]);
            merged += select(weight > 0.0, value, Vector::new(0.0f32)) * Vector::new(weight);
        }
        out[row * width + column] = Vector::cast_from(merged);
        column += CUBE_DIM_X as usize;
    }
    if UNIT_POS_X == 0 {
        lse[row] = merged_lse(highest, sum, neg_inf);
    }
}

#[cube]
fn is_empty(lse: f32) -> bool {
    !(lse > -EMPTY_LSE && lse < EMPTY_LSE)
}

/// The higher of two log-sum-exps, of which `lse` may be that of an empty part.
#[cube]
pub(super) fn higher(highest: f32, lse: f32) -> f32 {
    let mut result = highest;
    if !is_empty(lse) && lse > highest {
        result = lse;
    }
    result
}

/// What a part weighs relative to one with the lse `highest`.
#[cube]
pub(super) fn weight(lse: f32, highest: f32) -> f32 {
    let mut weight = f32::new(0.0);
    if !is_empty(lse) {
        weight = (lse - highest).exp();
    }
    weight
}

/// `1 / sum`, 0 where all parts are empty. Any other sum is at least 1, the weight of the highest.
#[cube]
pub(super) fn inverse(sum: f32) -> f32 {
    let mut inverse = f32::new(0.0);
    if sum > 0.0 {
        inverse = 1.0 / sum;
    }
    inverse
}

#[cube]
pub(super) fn merged_lse(highest: f32, sum: f32, neg_inf: f32) -> f32 {
    let mut lse = neg_inf;
    if sum > 0.0 {
        lse = highest + sum.ln();
    }
    lse
}

/// Values of 512 channels.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let (bits, elem) = (AddressType::U32, ElemType::Float(kind));
        let (dim, n) = RowGrid::cube(&device, &[512], elem.size());
        let pair = form!(merge_state_kernel, dim, [bits, n, _, _, _, _, _, _, 1, 1, 0.0, elem]);
        let states = form!(merge_states_kernel, dim, [bits, n, _, _, _, _, 1, 1, 1, 1, 0.0, elem]);
        let (dim, n) = RowGrid::cube(&device, &[512], size_of::<f32>());
        let into = form!(merge_state_into_kernel, dim, [bits, n, _, _, _, _, 1, 1, 0.0, elem]);
        [
            Entry::of(kind, "merge_state", pair),
            Entry::of(kind, "merge_states", states),
            Entry::of(kind, "merge_state_into", into),
        ]
    });
    forms.collect()
}
