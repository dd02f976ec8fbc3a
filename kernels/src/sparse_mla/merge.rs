//! Merges the splits of a tile, as many of each token or as a plan says, and takes the share that the sink leaves.

use cubecl::prelude::*;

use crate::common::launch::{address_type, dummy};
use crate::merge_splits::{Merged, Splits, chains};
use crate::merge_state::merged_lse;
use crate::tiles::form::VALUE_WIDTH;
use crate::tiles::output::COLUMNS;

/// Vectors of a row.
pub(super) const VECTORS: usize = VALUE_WIDTH / COLUMNS;
/// Units of a cube: one for each of these.
const UNITS: usize = VECTORS;
/// Splits that are loaded before the first is used.
const LOADS: usize = 8;

/// Arguments of [`launch`].
pub(super) struct MergeArgs {
    /// f32 `[tokens * splits, heads, 512]`, those of a token one after the other, or `[capacity, heads, 512]`.
    pub outs: BufferArg,
    /// f32 `[tokens * splits, heads]`, or `[capacity, heads]`.
    pub lses: BufferArg,
    /// i32 `[tokens + 1]`: the splits of each token, by a plan. Results of tokens that have one are there already.
    pub split_ptr: Option<BufferArg>,
    /// f32 `[heads]`, read if `has_sink`.
    pub sink: BufferArg,
    /// Whether there is one.
    pub has_sink: bool,
    /// E `[tokens, heads, 512]`, written.
    pub out: BufferArg,
    /// f32 `[tokens, heads]`, written.
    pub lse: BufferArg,
    /// Rows of the result: tokens times heads.
    pub rows: usize,
    /// Of a token.
    pub heads: usize,
    /// Of a token, without a plan.
    pub splits: usize,
    pub elem: ElemType,
}

/// Writes `out` and `lse`.
pub(super) fn launch(client: &Client, args: MergeArgs) {
    let planned = args.split_ptr.is_some();
    merge_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, args.rows, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.outs, &args.out]),
        COLUMNS,
        args.outs,
        args.lses,
        args.split_ptr.unwrap_or_else(|| dummy(client)),
        args.sink,
        args.out,
        args.lse,
        args.rows,
        args.heads,
        args.splits,
        f32::NEG_INFINITY,
        args.has_sink,
        planned,
        args.elem,
    );
}

/// A cube for each row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn merge_kernel<E: Float, P: Size>(
    outs: &[Vector<f32, P>],
    lses: &[f32],
    split_ptr: &[i32],
    sink: &[f32],
    out: &mut [Vector<E, P>],
    lse: &mut [f32],
    rows: usize,
    heads: usize,
    splits: usize,
    neg_inf: f32,
    #[comptime] has_sink: bool,
    #[comptime] planned: bool,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    if row < rows {
        let (token, head, column) = (row / heads, row % heads, UNIT_POS as usize);
        let (mut first, mut count) = (token * splits, splits);
        if comptime!(planned) {
            first = split_ptr[token] as usize;
            count = split_ptr[token + 1] as usize - first;
        }
        if comptime!(!planned).runtime() || count > 1 {
            let (first, width) = (first * heads + head, comptime!(UNITS).runtime());
            let own = Splits { first, step: heads, count, column, width, empty_lse: neg_inf };
            let mut all = Merged::<P>::empty();
            all.add_chains(outs, lses, &own, chains(count), LOADS);
            let merged_lse = merged_lse(all.highest, all.sum, neg_inf);
            let mut share = 1.0f32;
            if comptime!(has_sink) {
                share = share_beside(sink[head], merged_lse, all.sum);
            }
            out[row * comptime!(UNITS) + column] = Vector::cast_from(all.mean() * Vector::new(share));
            if UNIT_POS == 0 {
                lse[row] = merged_lse;
            }
        }
    }
}

/// What is left beside a sink for rows whose weights sum up to `exp(lse)`; `sum` is 0 where there are none, and so is that.
#[cube]
pub(super) fn share_beside(sink: f32, lse: f32, sum: f32) -> f32 {
    let mut share = 0.0f32;
    if sum > 0.0 {
        share = 1.0 / (1.0 + (sink - lse).exp());
    }
    share
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FloatKind, form};
    let elem = ElemType::Float(FloatKind::BF16);
    let dim = CubeDim::new_1d(UNITS as u32);
    let entry = |name, planned| {
        let form =
            form!(merge_kernel, dim, [AddressType::U32, COLUMNS, _, _, _, _, _, _, 1, 1, 1, 0.0, true, planned, elem]);
        Entry::of(FloatKind::BF16, name, form).on(|arch| matches!(arch, Arch::Sm90a | Arch::Sm100a))
    };
    vec![entry("sparse_mla.merge", false), entry("sparse_mla.merge.planned", true)]
}
