//! Numbers as they lie in a file, to those of another type.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::FloatDType;
use half::{bf16, f16};
use safetensors::Dtype;

/// An element type of `N` bytes that weights are converted to.
trait Number<const N: usize> {
    fn of_f32(value: f32) -> [u8; N];
    fn of_f16(value: f16) -> [u8; N];
    fn of_bf16(value: bf16) -> [u8; N];
}

impl Number<4> for f32 {
    fn of_f32(value: f32) -> [u8; 4] {
        value.to_ne_bytes()
    }
    fn of_f16(value: f16) -> [u8; 4] {
        value.to_f32().to_ne_bytes()
    }
    fn of_bf16(value: bf16) -> [u8; 4] {
        value.to_f32().to_ne_bytes()
    }
}

impl Number<2> for f16 {
    fn of_f32(value: f32) -> [u8; 2] {
        f16::from_f32(value).to_ne_bytes()
    }
    fn of_f16(value: f16) -> [u8; 2] {
        value.to_ne_bytes()
    }
    fn of_bf16(value: bf16) -> [u8; 2] {
        f16::from_f32(value.to_f32()).to_ne_bytes()
    }
}

impl Number<2> for bf16 {
    fn of_f32(value: f32) -> [u8; 2] {
        bf16::from_f32(value).to_ne_bytes()
    }
    fn of_f16(value: f16) -> [u8; 2] {
        bf16::from_f32(value.to_f32()).to_ne_bytes()
    }
    fn of_bf16(value: bf16) -> [u8; 2] {
        value.to_ne_bytes()
    }
}

/// Writes the elements in `bytes`, little-endian and of any alignment as safetensors has them, as elements of `to`.
pub(super) fn convert(bytes: &[u8], from: Dtype, out: &mut [u8], to: FloatDType) {
    match to {
        FloatDType::F16 => convert_to::<f16, 2>(bytes, from, out),
        FloatDType::BF16 => convert_to::<bf16, 2>(bytes, from, out),
        _ => convert_to::<f32, 4>(bytes, from, out),
    }
}

fn convert_to<T: Number<N>, const N: usize>(bytes: &[u8], from: Dtype, out: &mut [u8]) {
    let ((pairs, _), (quads, _)) = (bytes.as_chunks::<2>(), bytes.as_chunks::<4>());
    let out = out.as_chunks_mut::<N>().0.iter_mut();
    match from {
        Dtype::F16 => out.zip(pairs).for_each(|(out, &pair)| *out = T::of_f16(f16::from_le_bytes(pair))),
        Dtype::BF16 => out.zip(pairs).for_each(|(out, &pair)| *out = T::of_bf16(bf16::from_le_bytes(pair))),
        _ => out.zip(quads).for_each(|(out, &quad)| *out = T::of_f32(f32::from_le_bytes(quad))),
    }
}

/// Whether numbers stay as they are.
pub(super) fn is_same(from: Dtype, to: FloatDType) -> bool {
    let same = [(Dtype::F16, FloatDType::F16), (Dtype::BF16, FloatDType::BF16), (Dtype::F32, FloatDType::F32)];
    same.contains(&(from, to))
}

/// These rows and columns of a matrix of bytes; copied only where columns are left out.
pub(super) fn window(bytes: Cow<'_, [u8]>, width: usize, rows: Range<usize>, columns: Range<usize>) -> Cow<'_, [u8]> {
    if columns == (0..width) {
        let at = rows.start * width..rows.end * width;
        return match bytes {
            Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[at]),
            Cow::Owned(bytes) => Cow::Owned(bytes[at].to_vec()),
        };
    }
    let row = |row: usize| &bytes[row * width + columns.start..row * width + columns.end];
    Cow::Owned(rows.flat_map(|at| row(at).iter().copied()).collect())
}
