//! Numbers as they lie in a file, to those of another type.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::Element;
use half::{bf16, f16};
use safetensors::Dtype;

/// An element type that weights are converted to; a conversion to the same type keeps every bit.
pub(super) trait Weight: Element {
    fn from_f32(value: f32) -> Self;
    fn from_f16(value: f16) -> Self;
    fn from_bf16(value: bf16) -> Self;
}

impl Weight for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }
    fn from_f16(value: f16) -> Self {
        value.to_f32()
    }
    fn from_bf16(value: bf16) -> Self {
        value.to_f32()
    }
}

impl Weight for f16 {
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn from_f16(value: f16) -> Self {
        value
    }
    fn from_bf16(value: bf16) -> Self {
        f16::from_f32(value.to_f32())
    }
}

impl Weight for bf16 {
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn from_f16(value: f16) -> Self {
        bf16::from_f32(value.to_f32())
    }
    fn from_bf16(value: bf16) -> Self {
        value
    }
}

/// Appends the elements in `bytes`, little-endian and of any alignment as safetensors has them.
pub(super) fn append<T: Weight>(values: &mut Vec<T>, bytes: &[u8], dtype: Dtype) {
    let (pairs, _) = bytes.as_chunks::<2>();
    match dtype {
        Dtype::F16 => values.extend(pairs.iter().map(|&pair| T::from_f16(f16::from_le_bytes(pair)))),
        Dtype::BF16 => values.extend(pairs.iter().map(|&pair| T::from_bf16(bf16::from_le_bytes(pair)))),
        _ => {
            let (quads, _) = bytes.as_chunks::<4>();
            values.extend(quads.iter().map(|&quad| T::from_f32(f32::from_le_bytes(quad))));
        }
    }
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
