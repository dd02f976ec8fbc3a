//! FP8 rows of a cache on the CPU: quantised and dequantised, a number at a time. They say what the kernels must compute.
//!
//! Source: OCP 8-bit floating point specification 1.0, table 1; for the scales FlashMLA's `tests/quant.py`, of index keys `act_quant` of
//! DeepSeek-V3.2's inference code.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData, bf16};

use super::host;
use crate::cache::{Fp8Rows, Fp8Scales};

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;
/// The least exponent of a scale, and that of index keys: of 1e-4 / 448, rounded up.
const LEAST: i32 = -13;
const LEAST_OF_KEYS: i32 = -22;

/// The rows in these slots, `[N, D]` of the dtype that they are read as: words i32 of a pool.
pub(crate) fn read(words: Tensor<3, Int>, slots: Tensor<1, Int>, rows: Fp8Rows) -> Tensor<2> {
    let ([count], device) = (slots.dims(), words.device());
    let words = words.flatten::<1>(0, 2);
    // The words of each row, and behind them those of its scales.
    let places = host(slots).into_iter().flat_map(|slot| {
        let (row, scales) = rows.words_of(slot as usize);
        let scales = scales.map_or(0..0, |at| at..at + rows.scale_words());
        (row..row + rows.row_words()).chain(scales).map(|word| word as i32)
    });
    let places: Vec<i32> = places.collect();
    let places = Tensor::<1, Int>::from_data(TensorData::from(&places[..]), (&device, DType::I32));
    let words = host(words.select(0, places));
    let len = rows.row_words() + rows.scale_words();
    let values: Vec<f32> = words.chunks_exact(len).flat_map(|row| dequantise(row, rows)).collect();
    let rows_f32 = Tensor::<2>::from_data(TensorData::new(values, [count, rows.width()]), (&device, DType::F32));
    rows_f32.cast(FloatDType::from(rows.dtype))
}

/// The words of rows `[N, D]`, i32 `[N, words]`, and of their scales, `[N, words]`, where those lie elsewhere.
pub(crate) fn quantise_rows(latents: Tensor<2>, rows: Fp8Rows) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let ([count, width], device) = (latents.dims(), latents.device());
    let values: Vec<f32> = latents.try_into_vec_as().expect("computed on the CPU");
    let (mut words, mut scales): (Vec<i32>, Vec<i32>) = (Vec::new(), Vec::new());
    for row in values.chunks_exact(width) {
        let (own_words, own_scales) = quantise(row, rows);
        words.extend(own_words);
        scales.extend(own_scales);
    }
    let tensor = |words, len| Tensor::from_data(TensorData::new(words, [count, len]), (&device, DType::I32));
    (tensor(words, rows.row_words()), tensor(scales, rows.scale_words()))
}

/// The numbers of a row: of its words, and behind them those of its scales, where those lie elsewhere.
fn dequantise(words: &[i32], rows: Fp8Rows) -> Vec<f32> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (row, behind) = bytes.split_at(4 * rows.row_words());
    let (codes, rest) = row.split_at(rows.codes);
    let (in_row, rope) = rest.split_at(rest.len() - 2 * rows.rope);
    let scales: Vec<f32> = match rows.scales {
        Fp8Scales::F32InRow => in_row.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Fp8Scales::E8m0BehindPage { .. } => behind.iter().map(|&code| decode_scale(code)).collect(),
        Fp8Scales::F32BehindPage { .. } => vec![f32::from_le_bytes([behind[0], behind[1], behind[2], behind[3]])],
    };
    let latent = codes.iter().enumerate().map(|(i, &code)| decode(code) * scales[i / rows.scaled()]);
    let rope = rope.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
    latent.chain(rope).collect()
}

/// The words of a row, and of its scales, where those lie elsewhere.
fn quantise(values: &[f32], rows: Fp8Rows) -> (Vec<i32>, Vec<i32>) {
    let (latent, rope) = values.split_at(rows.codes);
    let (mut codes, mut in_row, mut behind): (Vec<u8>, Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new(), Vec::new());
    let least = if matches!(rows.scales, Fp8Scales::F32BehindPage { .. }) { LEAST_OF_KEYS } else { LEAST };
    for block in latent.chunks(rows.scaled()) {
        let scale = scale_of(block, least);
        codes.extend(block.iter().map(|value| encode(value / scale)));
        match rows.scales {
            Fp8Scales::F32InRow => in_row.extend(scale.to_le_bytes()),
            Fp8Scales::E8m0BehindPage { .. } => behind.push(encode_scale(scale)),
            Fp8Scales::F32BehindPage { .. } => behind.extend(scale.to_le_bytes()),
        }
    }
    behind.resize(4 * rows.scale_words(), 0);
    let rope = rope.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes());
    let row: Vec<u8> = codes.into_iter().chain(in_row).chain(rope).collect();
    let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
    (words(&row), words(&behind))
}

/// The E8M0 code of a power of two, or of no number.
fn encode_scale(scale: f32) -> u8 {
    // Its bits but for sign and fraction, of which a NaN's exponent is that of no number.
    (scale.to_bits() >> 23) as u8
}

/// The number of an E8M0 code.
fn decode_scale(code: u8) -> f32 {
    if code == 0xff { f32::NAN } else { 2f32.powi(i32::from(code) - 127) }
}

/// The smallest power of two from that with the exponent `least` on by which no number of a block overflows; NaN where one is.
fn scale_of(block: &[f32], least: i32) -> f32 {
    if block.iter().any(|value| value.is_nan()) {
        return f32::NAN;
    }
    let largest = block.iter().fold(0f32, |most, value| most.max(value.abs()));
    let fits = |exponent: &i32| f64::from(largest) <= f64::from(LARGEST) * 2f64.powi(*exponent);
    let exponent = (least..126).find(fits).unwrap_or(126);
    2f32.powi(exponent)
}

/// The nearest code, of two the even one.
fn encode(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    // Of a NaN any code does, its scale is one.
    if magnitude.is_nan() || magnitude >= LARGEST {
        return sign | 0x7e;
    }
    // Codes of a power of two are evenly spaced; below the smallest normal number as if they were of that.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let step = 2f32.powi(exponent.max(-6) - 3);
    let steps = (magnitude / step).round_ties_even() as i32;
    // A step more than there are is the first of the next power.
    sign | (8 * (exponent.max(-6) + 6) + steps) as u8
}

/// The number of a code.
fn decode(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 0xf), f32::from(code & 7) / 8.0);
    let magnitude = match exponent {
        0 => fraction * 2f32.powi(-6),
        _ => (1.0 + fraction) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of the format is its own code; between two lies the nearer one, in the middle the even one.
    #[test]
    fn codes_are_the_nearest() {
        for code in 0..0x7eu8 {
            let (this, next) = (decode(code), decode(code + 1));
            let middle = this / 2.0 + next / 2.0;
            assert_eq!(encode(this), code);
            assert_eq!(encode(-this), code | 0x80);
            assert_eq!(encode(middle), code + code % 2, "{middle}");
            assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
        }
        assert_eq!((encode(1e9), encode(f32::NEG_INFINITY)), (0x7e, 0xfe));
    }

    #[test]
    fn scales_are_the_smallest_that_fit() {
        let of = |largest: f32| scale_of(&[0.0, -largest], LEAST);
        assert_eq!([of(448.0), of(449.0), of(224.0), of(225.0)], [1.0, 2.0, 0.5, 1.0]);
        // FlashMLA's quotients are no less than 1e-4.
        assert_eq!([of(0.0), of(448.0 * 1e-4), of(448.0 / 8192.0)], [2f32.powi(-13); 3]);
        assert_eq!(of(f32::INFINITY), 2f32.powi(126));
        assert!(of(f32::NAN).is_nan());
        // The publisher's largest number is 1e-4 at least.
        let of_key = |largest: f32| scale_of(&[largest], LEAST_OF_KEYS);
        assert_eq!([0.0, 1e-30, 1e-4, 1.06e-4].map(of_key), [2f32.powi(-22); 4]);
        assert_eq!([1.07e-4, 448.0, 449.0].map(of_key), [2f32.powi(-21), 1.0, 2.0]);
    }

    /// FlashMLA's row: 656 bytes.
    #[test]
    fn rows_are_where_flash_mla_has_them() {
        let rows = Fp8Rows { codes: 512, rope: 64, scales: Fp8Scales::F32InRow, dtype: DType::F32 };
        let mut values = vec![0.0; 576];
        (values[0], values[130], values[512], values[575]) = (448.0, -1.5, 3.0, -2.0);
        let (words, elsewhere) = quantise(&values, rows);
        assert_eq!((4 * words.len(), elsewhere.len()), (656, 0));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!((bytes[0], bytes[130]), (0x7e, encode(-1.5 * 256.0)));
        assert_eq!(
            [512, 516, 520].map(|at| f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())),
            [1.0, 2f32.powi(-8), 2f32.powi(-13)]
        );
        assert_eq!([528, 654].map(|at| bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()), [3.0, -2.0]);
        assert_eq!(dequantise(&words, rows), values);
    }

    /// FlashMLA's rows of DeepSeek-V4: 576 bytes, and 8 of scales behind the rows of a page, which is a multiple of 576 bytes long.
    #[test]
    fn scales_are_where_flash_mla_has_them_for_v4() {
        let scales = Fp8Scales::E8m0BehindPage { page_rows: 64, page_size: 64 };
        let rows = Fp8Rows { codes: 448, rope: 64, scales, dtype: DType::F32 };
        let mut values = vec![0.0; 512];
        (values[0], values[70], values[448], values[511]) = (448.0, -1.5, 3.0, -2.0);
        let (words, elsewhere) = quantise(&values, rows);
        assert_eq!((4 * words.len(), 4 * elsewhere.len()), (576, 8));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!((bytes[0], bytes[70]), (0x7e, encode(-1.5 * 256.0)));
        assert_eq!([448, 574].map(|at| bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()), [3.0, -2.0]);
        let scales: Vec<u8> = elsewhere.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(scales, [127, 119, 114, 114, 114, 114, 114, 0]);
        assert_eq!(dequantise(&[words, elsewhere].concat(), rows), values);
        // 64 * 584 bytes are 64.9 times 576.
        assert_eq!(rows.stored([3, 64, 512]), [3, 1, 65 * 144]);
        assert_eq!(rows.words_of(64 + 5), (65 * 144 + 5 * 144, Some(65 * 144 + 64 * 144 + 5 * 2)));
    }

    /// DeepGEMM's index keys: of a page of 64 the codes, 128 bytes each, then the scales; 132 bytes a key, and nothing between pages.
    #[test]
    fn index_keys_are_where_deep_gemm_has_them() {
        let scales = Fp8Scales::F32BehindPage { page_rows: 64, page_size: 64 };
        let rows = Fp8Rows { codes: 128, rope: 0, scales, dtype: DType::F32 };
        let mut values = vec![0.0; 128];
        (values[0], values[70]) = (3.5, -1.5);
        let (words, elsewhere) = quantise(&values, rows);
        assert_eq!((4 * words.len(), 4 * elsewhere.len()), (128, 4));
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!((bytes[0], bytes[70]), (0x7e, encode(-1.5 * 128.0)));
        assert_eq!(f32::from_bits(elsewhere[0] as u32), 2f32.powi(-7));
        assert_eq!(dequantise(&[words, elsewhere].concat(), rows), values);
        assert_eq!(rows.stored([3, 64, 128]), [3, 1, 64 * 33]);
        assert_eq!(rows.words_of(64 + 5), (64 * 33 + 5 * 32, Some(64 * 33 + 64 * 32 + 5)));
    }
}
