//! Logarithms of the probabilities of a row of logits: of one token, and of the most probable ones.
//!
//! A cube has a row. It goes over the row once for each of the most probable tokens: the best of those that come after the one before.

use cubecl::prelude::*;

use crate::common::launch::address_type;
use crate::sample::histogram::{add, best_of};
use crate::sample::mass::Mass;
use crate::sample::one;
use crate::sample::row::{NOTHING, Row, Weights, logit_of, numbers};
use crate::sample::select::{Form, vector_size};

/// Arguments of [`launch`]; E is `elem`.
pub struct LogProbsArgs {
    /// E `[batch, width]`.
    pub logits: BufferArg,
    /// i32 `[batch]`: the token of each row; none where it is no token.
    pub tokens: BufferArg,
    /// f32 `[batch]`, written: of `tokens`; minus infinity where there is none, or its logit is not finite.
    pub chosen: BufferArg,
    /// i32 `[batch, top]`, written: the most probable tokens, the best first, of equal ones the lowest id; -1 where there are fewer.
    pub ids: BufferArg,
    /// f32 `[batch, top]`, written: of `ids`.
    pub values: BufferArg,
    /// Rows.
    pub batch: usize,
    /// Logits of a row, below 2^31.
    pub width: usize,
    /// How many of the most probable tokens, at least 1.
    pub top: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes all three. Without logits nothing is launched.
pub fn launch(client: &Client, args: LogProbsArgs) {
    let LogProbsArgs { batch, width, top, elem, .. } = args;
    if batch * width == 0 {
        return;
    }
    let vector = vector_size(client.properties(), width, elem);
    let units = Form::choose(client.properties(), width).units;
    log_probs_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, batch, CubeDim::new_single()),
        CubeDim::new_1d(units as u32),
        address_type(client, &[&args.logits, &args.values]),
        vector,
        args.logits,
        args.tokens,
        args.chosen,
        args.ids,
        args.values,
        batch,
        width / vector,
        top,
        one(width),
        f32::NEG_INFINITY,
        units,
        elem,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn log_probs_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    tokens: &[i32],
    chosen: &mut [f32],
    ids: &mut [i32],
    values: &mut [f32],
    batch: usize,
    vectors: usize,
    top: usize,
    one: f32,
    neg_inf: f32,
    #[comptime] units: usize,
    #[define(E)] _elem: ElemType,
) {
    let row_number = CUBE_POS;
    if row_number < batch {
        let row = Row::plain(row_number, vectors);
        let token = tokens[row_number];
        let mut best = Shared::<[u32]>::new_slice(comptime!(2 * units));
        let mut own = Shared::<[u32]>::new_slice(1usize);
        let sum = Shared::<[Atomic<u32>]>::new_slice(3usize);
        if UNIT_POS < 3 {
            sum[UNIT_POS as usize].store(0u32);
        }
        if UNIT_POS == 0 {
            own[0] = NOTHING;
        }
        sync_cube();
        // The one before, behind which the next one comes.
        let mut last_key = u32::MAX.runtime();
        let mut last_token = 0u32;
        // The logarithm of the sum of all exponentials.
        let mut lse = 0.0f32;
        for place in 0..top {
            let found = best_behind(logits, &row, last_key, last_token, token, &mut own, place == 0, units);
            best_of(&mut best, found.key, found.token, units);
            last_key = best[0];
            last_token = best[units];
            if place == 0 && last_key != NOTHING {
                let weights = Weights::new(last_key, 1.0f32, one);
                let all = sum_up(logits, &row, &weights, &sum, units);
                let part = f32::cast_from(all.low) * 2.328_306_4e-10f32 + f32::cast_from(all.high);
                lse = logit_of(last_key) + (part / one).ln();
            }
            if UNIT_POS == 0 {
                let at = row_number * top + place;
                ids[at] = select(last_key == NOTHING, -1i32, i32::cast_from(last_token));
                values[at] = select(last_key == NOTHING, neg_inf, logit_of(last_key) - lse);
                if place == 0 {
                    chosen[row_number] = select(own[0] == NOTHING, neg_inf, logit_of(own[0]) - lse);
                }
            }
            // All have read the best one before the next is written.
            sync_cube();
        }
    }
}

/// A token and its key.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Candidate {
    key: u32,
    token: u32,
}

/// The best of a unit's tokens that come after this one; `token`'s key goes to `own` if `notes_own`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn best_behind<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    row: &Row,
    last_key: u32,
    last_token: u32,
    token: i32,
    own: &mut Shared<[u32]>,
    notes_own: bool,
    #[comptime] units: usize,
) -> Candidate {
    let all = numbers::<N>().comptime();
    let lanes = N::value().comptime();
    let mut keys = Array::<u32>::new(all);
    let mut best = NOTHING.runtime();
    let mut best_token = u32::MAX.runtime();
    let mut column = UNIT_POS as usize;
    while column < row.vectors {
        row.load_plain(logits, column, &mut keys, units);
        #[unroll]
        for i in 0..all {
            let key = keys[i];
            let id = ((column + comptime!(i / lanes * units)) * lanes) as u32 + comptime!((i % lanes) as u32);
            let is_behind = key < last_key || (key == last_key && id > last_token);
            if is_behind && key > best {
                best = key;
                best_token = id;
            }
            if notes_own && key != NOTHING && id == token as u32 {
                own[0] = key;
            }
        }
        column += comptime!(all / lanes * units);
    }
    Candidate { key: best, token: best_token }
}

/// The weight of all tokens. Called by all units of a cube.
#[cube]
fn sum_up<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    row: &Row,
    weights: &Weights,
    sum: &Shared<[Atomic<u32>]>,
    #[comptime] units: usize,
) -> Mass {
    let all = numbers::<N>().comptime();
    let lanes = N::value().comptime();
    let mut keys = Array::<u32>::new(all);
    let mut low = 0u32;
    let mut high = 0u32;
    let mut column = UNIT_POS as usize;
    while column < row.vectors {
        row.load_plain(logits, column, &mut keys, units);
        #[unroll]
        for i in 0..all {
            if keys[i] != NOTHING {
                let through = Mass { low, high }.plus(&weights.of(keys[i]));
                low = through.low;
                high = through.high;
            }
        }
        column += comptime!(all / lanes * units);
    }
    add(sum, 0usize, 0u32, &Mass { low, high }, 1usize);
    sync_cube();
    Mass { low: sum[1].load(), high: sum[2].load() }
}

/// The vocabulary of DeepSeek-V3.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let forms = FLOATS.into_iter().map(|kind| {
        let elem = ElemType::Float(kind);
        let vector = vector_size(&device, 129_280, elem);
        let units = Form::choose(&device, 129_280).units;
        let dim = CubeDim::new_1d(units as u32);
        let bits = AddressType::U32;
        let form =
            form!(log_probs_kernel, dim, [bits, vector, _, _, _, _, _, 1, 1, 1, 1.0, f32::NEG_INFINITY, units, elem]);
        Entry::of(kind, "log_probs", form)
    });
    forms.collect()
}
