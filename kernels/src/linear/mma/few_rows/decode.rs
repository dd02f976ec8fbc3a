//! What codes become: pairs of f16, but for a factor that the sums take.

use cubecl::prelude::*;

use super::super::VECTOR;
use crate::linear::packed::{E2M1_FACTOR, E4M3_FACTOR, e2m1_halves, e4m3_halves};
use crate::linear::weight::WeightFormat;
use crate::ptx::math;

/// Whether the GPU has an instruction that makes f16 of E4M3: from sm_89 on.
#[cube]
pub(super) fn has_conversion() -> comptime_type!(bool) {
    let device = comptime::device_properties();
    let arch = comptime!(device.identity.fingerprint.strip_prefix("ptx_sm").and_then(|arch| arch.parse::<u32>().ok()));
    comptime!(arch.is_some_and(|arch| arch >= 89))
}

/// What decoded numbers are multiplied by.
pub(super) fn factor(format: WeightFormat, has_conversion: bool) -> f32 {
    match format {
        // E2M1 as E4M3, whose bias is larger by 6.
        WeightFormat::Fp4 if has_conversion => 64.0,
        WeightFormat::Fp4 => E2M1_FACTOR as f32,
        WeightFormat::Fp8 if has_conversion => 1.0,
        WeightFormat::Fp8 | WeightFormat::Dense => E4M3_FACTOR as f32,
    }
}

/// The numbers of a word of codes in f16, but for [`factor`], two in a word, in the order of [`order`].
#[cube]
pub(super) fn decoded(word: u32, #[comptime] format: WeightFormat) -> Sequence<u32> {
    let has_conversion = has_conversion();
    let mut pairs = Sequence::<u32>::new();
    if comptime!(format == WeightFormat::Fp4 && has_conversion) {
        // As E4M3: sign, and exponent and fraction at the lower end of the exponent.
        let even = ((word << 4) & 0x8080_8080) | ((word << 2) & 0x1c1c_1c1c);
        let odd = (word & 0x8080_8080) | ((word >> 2) & 0x1c1c_1c1c);
        pairs.push(math::e4m3_pair(even, false));
        pairs.push(math::e4m3_pair(even, true));
        pairs.push(math::e4m3_pair(odd, false));
        pairs.push(math::e4m3_pair(odd, true));
    } else if comptime!(format == WeightFormat::Fp4) {
        #[unroll]
        for i in 0..4u32 {
            pairs.push(e2m1_halves(word >> comptime!(4 * i)));
        }
    } else if comptime!(has_conversion) {
        pairs.push(math::e4m3_pair(word, false));
        pairs.push(math::e4m3_pair(word, true));
    } else {
        // Two codes, each in the upper byte of a half.
        pairs.push(e4m3_halves(math::permute(word, 0x1404u32)));
        pairs.push(e4m3_halves(math::permute(word, 0x3424u32)));
    }
    pairs
}

/// Where the numbers of a vector are in the row, in the order in which codes are decoded.
pub(super) fn order(format: WeightFormat, has_conversion: bool) -> [usize; VECTOR] {
    match format {
        WeightFormat::Fp4 if has_conversion => [0, 2, 4, 6, 1, 3, 5, 7],
        WeightFormat::Fp4 => [0, 4, 1, 5, 2, 6, 3, 7],
        WeightFormat::Fp8 | WeightFormat::Dense => [0, 1, 2, 3, 4, 5, 6, 7],
    }
}
