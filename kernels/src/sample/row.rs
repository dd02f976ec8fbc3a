//! A row of logits: how its numbers are ordered and weighed, and how a cube reads them.

use cubecl::prelude::*;

use super::mass::Mass;
use super::select::NUMBERS;

/// The numbers of a row's parameters, which [`SampleArgs::rows`](super::SampleArgs::rows) describes.
pub(crate) const PARAMS: usize = 9;
pub(crate) const TEMPERATURE: usize = 0;
pub(crate) const TOP_K: usize = 1;
pub(crate) const TOP_P: usize = 2;
pub(crate) const MIN_P: usize = 3;
pub(crate) const PENALTY: usize = 4;
pub(crate) const SEED: usize = 5;
pub(crate) const POSITION: usize = 7;
pub(crate) const SEEN_ROW: usize = 8;

/// Temperatures below are as 0, those above the largest as that one: quotients stay in the range of f32.
pub(crate) const LEAST_TEMPERATURE: f32 = 1e-37;
const LARGEST_TEMPERATURE: f32 = 1e37;
/// A little more than the logarithm of 2^64: what is farther below the largest logit has a weight of 0.
const FARTHEST: f32 = 44.5;

/// The key of what cannot be chosen: not a number, and minus infinity.
pub(crate) const NOTHING: u32 = 0;
/// The key of 0, and of -0.
const ZERO: u32 = 1 << 31;
const LARGEST: u32 = 0x7f7f_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// A number in the order of the logits. Plus infinity is as the largest finite number. By bits: compilers may take for granted
/// that there are no infinities.
#[cube]
pub(crate) fn key_of(logit: f32) -> u32 {
    let bits = u32::reinterpret(logit);
    let magnitude = bits & 0x7fff_ffffu32;
    let finite = min(magnitude, LARGEST);
    let is_negative = bits >> 31 == 1u32;
    let key = select(is_negative, ZERO - finite, finite + ZERO);
    let is_nothing = magnitude > INFINITY || (is_negative && magnitude == INFINITY);
    select(is_nothing, NOTHING, key)
}

/// The logit of a key.
#[cube]
pub(crate) fn logit_of(key: u32) -> f32 {
    f32::reinterpret(select(key >= ZERO, key - ZERO, (ZERO - key) | ZERO))
}

/// The parameter of a row, as f32.
#[cube]
pub(crate) fn float_param(rows: &[u32], row: usize, #[comptime] param: usize) -> f32 {
    f32::reinterpret(rows[row * PARAMS + param])
}

/// What the logits of a row weigh.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Weights {
    half_largest: f32,
    half_temperature: f32,
    /// The upper word of the weight of the largest logit.
    one: f32,
}

#[cube]
impl Weights {
    /// Of a row whose largest logit has this key, at a temperature that is not 0.
    pub fn new(largest: u32, temperature: f32, one: f32) -> Weights {
        let half_temperature = min(temperature, LARGEST_TEMPERATURE) * 0.5f32;
        Weights { half_largest: logit_of(largest) * 0.5f32, half_temperature, one }
    }

    /// `e^((logit - largest) / temperature)`, in units of which the largest has `one * 2^32`.
    pub fn of(&self, key: u32) -> Mass {
        // Halves: the difference of two finite numbers may not be finite.
        let below = logit_of(key) * 0.5f32 - self.half_largest;
        let farthest = self.half_temperature * -FARTHEST;
        let weight = (max(below, farthest) / self.half_temperature).exp();
        let scaled = select(below < farthest, 0.0f32, weight) * self.one;
        let high = u32::cast_from(scaled);
        Mass { low: u32::cast_from((scaled - f32::cast_from(high)) * 4_294_967_296.0f32), high }
    }

    /// The key of the largest logit plus a logarithm, which is not above 0, at this temperature.
    pub fn key_at(&self, logarithm: f32) -> u32 {
        let half = max(self.half_largest + logarithm * self.half_temperature, f32::MIN * 0.5f32);
        key_of(half * 2.0f32)
    }
}

/// Where a row is, and which of its tokens were seen.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Row {
    /// The first vector.
    first: usize,
    /// Vectors.
    pub vectors: usize,
    /// The first word of its tokens seen.
    pub seen: usize,
    /// Whether it has such words.
    pub has_seen: bool,
    is_penalised: bool,
    penalty: f32,
}

#[cube]
impl Row {
    /// Of `vectors` vectors; there are `masks` rows of `words` words of tokens seen.
    pub fn new(rows: &[u32], row: usize, vectors: usize, masks: usize, words: usize) -> Row {
        let mask = rows[row * PARAMS + SEEN_ROW];
        let has_seen = (mask as usize) < masks;
        let penalty = float_param(rows, row, PENALTY);
        Row {
            first: row * vectors,
            vectors,
            seen: select(has_seen, mask as usize, 0usize) * words,
            has_seen,
            is_penalised: has_seen && penalty != 1.0f32,
            penalty,
        }
    }

    /// Of `vectors` vectors, without penalty.
    pub fn plain(row: usize, vectors: usize) -> Row {
        Row {
            first: row * vectors,
            vectors,
            seen: 0usize.runtime(),
            has_seen: false.runtime(),
            is_penalised: false.runtime(),
            penalty: 1.0f32.runtime(),
        }
    }

    /// The keys of some vectors from `column` on, `units` from one to the next. Past the end there is nothing.
    pub fn load<E: Float, N: Size>(
        &self,
        logits: &[Vector<E, N>],
        seen: &[u32],
        column: usize,
        keys: &mut Array<u32>,
        #[comptime] units: usize,
    ) {
        let lanes = N::value().comptime();
        let ahead = comptime!((NUMBERS / lanes).max(1));
        let loaded = self.fetch(logits, column, units);
        #[unroll]
        for i in 0..ahead {
            let at = column + comptime!(i * units);
            let is_there = at < self.vectors;
            let mut word = 0u32;
            if self.is_penalised && is_there {
                let token = at * lanes;
                word = seen[self.seen + token / 32] >> (token % 32) as u32;
            }
            #[unroll]
            for lane in 0..lanes {
                let mut logit = loaded[i].extract(lane);
                if (word >> comptime!(lane as u32)) & 1u32 == 1u32 {
                    logit = select(logit < 0.0f32, logit * self.penalty, logit / self.penalty);
                }
                keys[comptime!(i * lanes + lane)] = select(is_there, key_of(logit), NOTHING);
            }
        }
    }

    /// The same without penalty.
    pub fn load_plain<E: Float, N: Size>(
        &self,
        logits: &[Vector<E, N>],
        column: usize,
        keys: &mut Array<u32>,
        #[comptime] units: usize,
    ) {
        let lanes = N::value().comptime();
        let loaded = self.fetch(logits, column, units);
        #[unroll]
        for i in 0..comptime!((NUMBERS / lanes).max(1)) {
            let is_there = column + comptime!(i * units) < self.vectors;
            #[unroll]
            for lane in 0..lanes {
                keys[comptime!(i * lanes + lane)] = select(is_there, key_of(loaded[i].extract(lane)), NOTHING);
            }
        }
    }

    /// All are loaded before one is looked at. Past the end, the last vector again.
    fn fetch<E: Float, N: Size>(
        &self,
        logits: &[Vector<E, N>],
        column: usize,
        #[comptime] units: usize,
    ) -> Sequence<Vector<f32, N>> {
        let lanes = N::value().comptime();
        let mut loaded = Sequence::<Vector<f32, N>>::new();
        #[unroll]
        for i in 0..comptime!((NUMBERS / lanes).max(1)) {
            let at = min(column + comptime!(i * units), self.vectors - 1);
            loaded.push(Vector::cast_from(logits[self.first + at]));
        }
        loaded
    }
}

/// Numbers that [`Row::load`] gives.
#[cube]
pub(crate) fn numbers<N: Size>() -> comptime_type!(usize) {
    let lanes = N::value().comptime();
    comptime!(lanes * (NUMBERS / lanes).max(1))
}
