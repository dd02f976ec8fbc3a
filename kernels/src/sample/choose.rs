//! The token of a row, by a cube that has all of it.

use cubecl::prelude::*;

use super::histogram::{Sums, add, best_of_row};
use super::mass::Mass;
use super::philox::philox;
use super::row::{
    LEAST_TEMPERATURE, MIN_P, NOTHING, PARAMS, POSITION, Row, SEED, TEMPERATURE, TOP_K, TOP_P, Weights, float_param,
    numbers,
};
use super::select::{FIRST_BINS, FIRST_BITS, Form};

/// What is searched for, one after the other.
const TOTAL: u32 = 0;
const LAST_OF_TOP_K: u32 = 1;
const LAST_OF_TOP_P: u32 = 2;
const DRAWN: u32 = 3;
/// Logarithms of `min_p` are above it; below, it is off.
const NO_MIN_P: f32 = -200.0;

/// Writes the token of each row, and notes it in the row's tokens seen: a cube has a row, of `batch` ones from `first_row` on.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(super) fn choose_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    rows: &[u32],
    seen: &mut [u32],
    maxima: &[u32],
    histograms: &[u32],
    tokens: &mut [i32],
    first_row: usize,
    batch: usize,
    vectors: usize,
    chunks: usize,
    masks: usize,
    words: usize,
    one: f32,
    id_bits: u32,
    #[comptime] form: Form,
    #[define(E)] _elem: ElemType,
) {
    let own_row = CUBE_POS;
    let row_number = first_row + own_row;
    if own_row < batch {
        let mut sums = Sums::new(form);
        best_of_row(&mut sums.units, maxima, own_row, chunks, form.units);
        let largest = sums.units[0];
        let row = Row::new(rows, row_number, vectors, masks, words);
        let mut token = sums.units[form.units];
        let temperature = float_param(rows, row_number, TEMPERATURE);
        if largest != NOTHING && temperature >= LEAST_TEMPERATURE {
            let weights = Weights::new(largest, temperature, one);
            // Then all units have read what this one writes.
            token = draw(
                logits, rows, &*seen, histograms, &mut sums, row_number, own_row, &row, &weights, token, id_bits, form,
            );
        }
        if UNIT_POS == 0 {
            tokens[row_number] = i32::cast_from(token);
            if largest == NOTHING {
                tokens[row_number] = -1i32;
            } else if row.has_seen {
                let word = row.seen + (token / 32) as usize;
                seen[word] |= 1u32 << (token % 32);
            }
        }
    }
}

/// The token drawn of those that the filters leave; `otherwise` if there is none. Called by all units of a cube.
///
/// All that is searched for is the same: the key at which a number of tokens, or a weight, is reached from the largest one on. The
/// digits of the key are found one after the other, by histograms of the tokens that have those before. A token drawn is one more
/// digit: where several have the key, those of its id, the lowest id first.
#[cube]
#[allow(clippy::too_many_arguments)]
fn draw<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    rows: &[u32],
    seen: &[u32],
    histograms: &[u32],
    sums: &mut Sums,
    row_number: usize,
    own_row: usize,
    row: &Row,
    weights: &Weights,
    otherwise: u32,
    id_bits: u32,
    #[comptime] form: Form,
) -> u32 {
    let param = row_number * PARAMS;
    let mut chosen = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS == 0 {
        chosen[0] = otherwise;
    }
    // Tokens with these keys and above are left, of this weight.
    let mut border = 1u32.runtime();
    let mut kept_low = 0u32;
    let mut kept_high = 0u32;
    let mut finite = 0u32;

    let mut search = TOTAL.runtime();
    while search <= DRAWN {
        let mut is_on = true.runtime();
        let mut count = 0u32;
        let mut needed_low = 0u32;
        let mut needed_high = 0u32;
        let kept = Mass { low: kept_low, high: kept_high };
        if search == LAST_OF_TOP_K {
            count = rows[param + TOP_K];
            is_on = count > 0 && count < finite;
        } else if search == LAST_OF_TOP_P {
            let part = rows[param + TOP_P];
            is_on = part != 0;
            let needed = kept.part_up(part);
            needed_low = needed.low;
            needed_high = needed.high;
        } else if search == DRAWN {
            let logarithm = float_param(rows, row_number, MIN_P);
            let mut left_low = kept_low;
            let mut left_high = kept_high;
            if logarithm > NO_MIN_P {
                let key = weights.key_at(logarithm);
                if key > border {
                    let left = mass_from(logits, seen, row, weights, key, sums, form);
                    left_low = left.low;
                    left_high = left.high;
                }
            }
            let random = philox(rows[param + POSITION], rows[param + SEED], rows[param + comptime!(SEED + 1)]);
            let target = Mass { low: left_low, high: left_high }.draw(&random);
            let needed = target.plus(&Mass { low: 1u32.runtime(), high: 0u32.runtime() });
            needed_low = needed.low;
            needed_high = needed.high;
        }

        // Tokens with the key's digits so far; of ids, when the key is known.
        let mut of_ids = false.runtime();
        let mut key = 0u32;
        let mut digits = 0u32;
        let mut shift = 32u32.runtime();
        let mut above_low = 0u32;
        let mut above_high = 0u32;
        while is_on {
            let mut next = comptime!(32 - FIRST_BITS).runtime();
            let is_first = shift == 32;
            if !is_first {
                next = shift - min(shift, form.bits);
            }
            let used = 1u32 << (shift - next);
            sums.clear(form);
            if is_first {
                let mut bin = UNIT_POS as usize;
                while bin < FIRST_BINS {
                    let at = own_row * 3 * FIRST_BINS + bin;
                    sums.bins[bin].store(histograms[at]);
                    sums.bins[form.bins() + bin].store(histograms[at + FIRST_BINS]);
                    sums.bins[2 * form.bins() + bin].store(histograms[at + 2 * FIRST_BINS]);
                    bin += form.units;
                }
            } else {
                let pass = Pass { of_ids, key, digits, shift, next, last_id: (1u32 << id_bits) - 1 };
                pass.count(logits, seen, row, weights, sums, form);
            }
            let needed = Mass { low: needed_low, high: needed_high };
            let found = sums.find(used, search >= LAST_OF_TOP_P, count, &needed, form);
            if search == TOTAL {
                let total = sums.total(form);
                finite = total.inside;
                kept_low = total.inside_low;
                kept_high = total.inside_high;
                is_on = false;
            } else {
                count -= found.above;
                let left = needed.minus(&found.above_mass());
                needed_low = left.low;
                needed_high = left.high;
                let above = Mass { low: above_low, high: above_high }.plus(&found.above_mass());
                above_low = above.low;
                above_high = above.high;
                digits = (digits << (shift - next)) | found.bin;
                shift = next;
                if shift == 0 {
                    if of_ids {
                        if UNIT_POS == 0 && found.inside > 0 {
                            chosen[0] = (1u32 << id_bits) - 1 - digits;
                        }
                        is_on = false;
                    } else if search == DRAWN {
                        of_ids = true;
                        key = digits;
                        digits = 0u32;
                        shift = id_bits;
                        if id_bits == 0 {
                            is_on = false;
                        }
                    } else {
                        border = digits;
                        let through = above.plus(&found.inside_mass());
                        kept_low = through.low;
                        kept_high = through.high;
                        is_on = false;
                    }
                }
            }
        }
        search += 1;
    }
    sync_cube();
    chosen[0]
}

/// The weight of the tokens with this key and above. Called by all units of a cube.
#[cube]
fn mass_from<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    seen: &[u32],
    row: &Row,
    weights: &Weights,
    border: u32,
    sums: &mut Sums,
    #[comptime] form: Form,
) -> Mass {
    sums.clear(form);
    let all = numbers::<N>().comptime();
    let lanes = N::value().comptime();
    let mut keys = Array::<u32>::new(all);
    let mut low = 0u32;
    let mut high = 0u32;
    let mut column = UNIT_POS as usize;
    while column < row.vectors {
        row.load(logits, seen, column, &mut keys, form.units);
        #[unroll]
        for i in 0..all {
            if keys[i] >= border {
                let through = Mass { low, high }.plus(&weights.of(keys[i]));
                low = through.low;
                high = through.high;
            }
        }
        column += comptime!(all / lanes * form.units);
    }
    add(&sums.bins, 0usize, 0u32, &Mass { low, high }, form.bins());
    sync_cube();
    Mass { low: sums.bins[form.bins()].load(), high: sums.bins[2 * form.bins()].load() }
}

/// What is counted in a pass over a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Pass {
    /// Digits of the ids of tokens with `key`, counted from the last one so that the lowest is the best; otherwise of keys.
    of_ids: bool,
    key: u32,
    /// Those known, which are those from bit `shift` on.
    digits: u32,
    shift: u32,
    /// The digits from this bit on are counted.
    next: u32,
    last_id: u32,
}

#[cube]
impl Pass {
    /// Called by all units of a cube.
    fn count<E: Float, N: Size>(
        &self,
        logits: &[Vector<E, N>],
        seen: &[u32],
        row: &Row,
        weights: &Weights,
        sums: &mut Sums,
        #[comptime] form: Form,
    ) {
        let all = numbers::<N>().comptime();
        let lanes = N::value().comptime();
        let mut keys = Array::<u32>::new(all);
        let mask = (1u32 << (self.shift - self.next)) - 1;
        let mut column = UNIT_POS as usize;
        let mut end = row.vectors;
        if self.of_ids {
            // The digits known leave these ids.
            let highest = self.last_id - (self.digits << self.shift);
            column += ((highest >> self.shift) << self.shift) as usize / lanes;
            end = min(end, highest as usize / lanes + 1);
        }
        while column < end {
            row.load(logits, seen, column, &mut keys, form.units);
            #[unroll]
            for i in 0..all {
                let key = keys[i];
                let token =
                    ((column + comptime!(i / lanes * form.units)) * lanes) as u32 + comptime!((i % lanes) as u32);
                let number = select(self.of_ids, self.last_id - token, key);
                let is_counted = number >> self.shift == self.digits && (!self.of_ids || key == self.key);
                if is_counted && key != NOTHING {
                    let bin = (number >> self.next) & mask;
                    add(&sums.bins, bin as usize, 1u32, &weights.of(key), form.bins());
                }
            }
            column += comptime!(all / lanes * form.units);
        }
    }
}
