//! What is found out of a row by several cubes: its largest logit, then the histogram of the first digit of its keys.

use cubecl::prelude::*;

use super::histogram::{add, best_of, best_of_row};
use super::mass::carry;
use super::row::{LEAST_TEMPERATURE, NOTHING, Row, TEMPERATURE, Weights, float_param, numbers};
use super::select::{CHUNK_UNITS, FIRST_BINS, FIRST_BITS};

/// Writes the best key of each part of a row and its token, and empties the row's histogram: cube `r * chunks + c` has part `c`
/// of row `first_row + r`, of `batch` rows.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(super) fn maxima_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    rows: &[u32],
    seen: &[u32],
    maxima: &mut [u32],
    histograms: &mut [u32],
    first_row: usize,
    batch: usize,
    vectors: usize,
    chunks: usize,
    masks: usize,
    words: usize,
    #[comptime] chunk_vectors: usize,
    #[define(E)] _elem: ElemType,
) {
    let lanes = N::value().comptime();
    let own_row = CUBE_POS / chunks;
    let row_number = first_row + own_row;
    let chunk = CUBE_POS % chunks;
    if own_row < batch {
        let row = Row::new(rows, row_number, vectors, masks, words);
        let all = numbers::<N>().comptime();
        let mut keys = Array::<u32>::new(all);
        let column = chunk * chunk_vectors + UNIT_POS as usize;
        row.load(logits, seen, column, &mut keys, CHUNK_UNITS);
        let mut key = NOTHING.runtime();
        let mut token = u32::MAX.runtime();
        #[unroll]
        for i in 0..all {
            if keys[i] > key {
                key = keys[i];
                token = ((column + comptime!(i / lanes * CHUNK_UNITS)) * lanes) as u32 + comptime!((i % lanes) as u32);
            }
        }
        let mut best = Shared::<[u32]>::new_slice(comptime!(2 * CHUNK_UNITS));
        best_of(&mut best, key, token, CHUNK_UNITS);
        if UNIT_POS == 0 {
            let at = CUBE_POS * 2;
            maxima[at] = best[0];
            maxima[at + 1] = best[CHUNK_UNITS];
        }
        let mut bin = chunk * CHUNK_UNITS + UNIT_POS as usize;
        while bin < 3 * FIRST_BINS {
            histograms[own_row * 3 * FIRST_BINS + bin] = 0u32;
            bin += chunks * CHUNK_UNITS;
        }
    }
}

/// Adds a part of a row to the row's histogram, in the same order of cubes. Not of greedy rows.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(super) fn histogram_kernel<E: Float, N: Size>(
    logits: &[Vector<E, N>],
    rows: &[u32],
    seen: &[u32],
    maxima: &[u32],
    histograms: &[Atomic<u32>],
    first_row: usize,
    batch: usize,
    vectors: usize,
    chunks: usize,
    masks: usize,
    words: usize,
    one: f32,
    #[comptime] chunk_vectors: usize,
    #[define(E)] _elem: ElemType,
) {
    let own_row = CUBE_POS / chunks;
    let row_number = first_row + own_row;
    if own_row < batch {
        let temperature = float_param(rows, row_number, TEMPERATURE);
        if temperature >= LEAST_TEMPERATURE {
            let mut best = Shared::<[u32]>::new_slice(comptime!(2 * CHUNK_UNITS));
            best_of_row(&mut best, maxima, own_row, chunks, CHUNK_UNITS);
            let weights = Weights::new(best[0], temperature, one);

            let bins = Shared::<[Atomic<u32>]>::new_slice(comptime!(3 * FIRST_BINS));
            let mut bin = UNIT_POS as usize;
            while bin < 3 * FIRST_BINS {
                bins[bin].store(0u32);
                bin += CHUNK_UNITS;
            }
            sync_cube();
            let row = Row::new(rows, row_number, vectors, masks, words);
            let all = numbers::<N>().comptime();
            let mut keys = Array::<u32>::new(all);
            let column = CUBE_POS % chunks * chunk_vectors + UNIT_POS as usize;
            row.load(logits, seen, column, &mut keys, CHUNK_UNITS);
            #[unroll]
            for i in 0..all {
                let key = keys[i];
                if key != NOTHING {
                    add(&bins, (key >> comptime!(32 - FIRST_BITS)) as usize, 1u32, &weights.of(key), FIRST_BINS);
                }
            }
            sync_cube();
            let first = own_row * 3 * FIRST_BINS;
            let mut bin = UNIT_POS as usize;
            while bin < FIRST_BINS {
                let count = bins[bin].load();
                if count > 0 {
                    let low = bins[FIRST_BINS + bin].load();
                    let high = bins[2 * FIRST_BINS + bin].load();
                    histograms[first + bin].fetch_add(count);
                    let before = histograms[first + FIRST_BINS + bin].fetch_add(low);
                    histograms[first + 2 * FIRST_BINS + bin].fetch_add(high + carry(before, low));
                }
                bin += CHUNK_UNITS;
            }
        }
    }
}
