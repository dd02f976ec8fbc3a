//! Random numbers that are a function of a counter and a key: Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as
//! 1, 2, 3, SC 2011, section 3.3).

use cubecl::prelude::*;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// The first two of the four words for the counter `(counter, 0, 0, 0)`, in this order.
#[cube]
pub(crate) fn philox(counter: u32, seed_low: u32, seed_high: u32) -> Random {
    let mut words = Array::<u32>::new(4usize);
    words[0] = counter;
    words[1] = 0u32;
    words[2] = 0u32;
    words[3] = 0u32;
    let mut key_low = seed_low;
    let mut key_high = seed_high;
    for _ in 0..ROUNDS {
        let (m0, m1) = (comptime!(MULTIPLIERS[0]).runtime(), comptime!(MULTIPLIERS[1]).runtime());
        let high0 = words[0].mul_hi(m0);
        let low0 = words[0] * m0;
        let high1 = words[2].mul_hi(m1);
        let low1 = words[2] * m1;
        words[0] = high1 ^ words[1] ^ key_low;
        words[1] = low1;
        words[2] = high0 ^ words[3] ^ key_high;
        words[3] = low0;
        key_low += comptime!(WEYL[0]);
        key_high += comptime!(WEYL[1]);
    }
    Random { first: words[0], second: words[1] }
}

/// Two words.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Random {
    pub first: u32,
    pub second: u32,
}
