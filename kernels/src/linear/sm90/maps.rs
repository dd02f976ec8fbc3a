//! Tensors as tile loads and stores see them.

use cubecl::ir::UIntKind;
use cubecl::prelude::*;

use super::epilogue::VECTOR;
use super::form::{CHANNELS, Form, INTERLEAVED, WEIGHT_ROWS};
use crate::common::launch::share;
use crate::linear::WeightFormat;
use crate::ptx::tma;

/// Tokens in tiles, of which each cube of a cluster loads its part for both.
pub(super) fn token_map(
    x: BufferArg,
    [heads, rows, inputs]: [usize; 3],
    width: usize,
    elem: ElemType,
    form: Form,
) -> TensorMapArg<Tiled> {
    let (shape, strides) = ([heads, rows, inputs], [width, heads * width, 1]);
    let tile = [1, form.loaded_tokens(), CHANNELS];
    // SAFETY: x has as many rows of as many heads, whose channels are `width` apart.
    unsafe { tma::tiled_map(handle(x), &shape, &strides, &tile, elem, TensorMapSwizzle::B128) }
}

/// Weights in tiles of 128 rows: numbers, or bytes of codes. Of a gated output a tile has 8 rows of the gate, the same 8 of up, and so
/// on.
pub(super) fn weight_map(
    weight: BufferArg,
    [matrices, outputs, inputs]: [usize; 3],
    matrix_stride: usize,
    elem: ElemType,
    form: Form,
) -> TensorMapArg<Tiled> {
    let handle = handle(weight);
    // As wide as a row.
    let swizzle = match form.weight_row_bytes() {
        32 => TensorMapSwizzle::B32,
        64 => TensorMapSwizzle::B64,
        _ => TensorMapSwizzle::B128,
    };
    let (elem, codes, swizzle) = match form.format {
        WeightFormat::Dense => (elem, 1, TensorMapSwizzle::B128),
        WeightFormat::Fp8 => (ElemType::UInt(UIntKind::U8), 1, swizzle),
        WeightFormat::Fp4 => (ElemType::UInt(UIntKind::U8), 2, swizzle),
    };
    let ([inputs, matrix_stride], columns) =
        ([inputs, matrix_stride].map(|len| len / codes), form.weight_columns() * form.stage_blocks());
    // SAFETY: there are as many matrices of as many rows and channels.
    unsafe {
        if form.linear.gated {
            let shape = [matrices, outputs / INTERLEAVED, 2, INTERLEAVED, inputs];
            let strides = [matrix_stride, INTERLEAVED * inputs, outputs * inputs, inputs, 1];
            let tile = [1, WEIGHT_ROWS / (2 * INTERLEAVED), 2, INTERLEAVED, columns as usize];
            tma::tiled_map(handle, &shape, &strides, &tile, elem, swizzle)
        } else {
            let (shape, strides) = ([matrices, outputs, inputs], [matrix_stride, inputs, 1]);
            tma::tiled_map(handle, &shape, &strides, &[1, form.loaded_weight_rows(), columns as usize], elem, swizzle)
        }
    }
}

/// The output in tiles that a warpgroup copies.
pub(super) fn out_map(out: &BufferArg, [rows, outputs]: [usize; 2], elem: ElemType, form: Form) -> TensorMapArg<Tiled> {
    // Where none are copied, it is only a map.
    let (shape, chunk) = if form.stores_tiles() { ([rows, outputs], form.chunk()) } else { ([1, VECTOR], 1) };
    let tile = [chunk, CHANNELS];
    // SAFETY: the output has as many rows of as many channels, or one vector.
    unsafe { tma::tiled_map(handle(share(out)), &shape, &[shape[1], 1], &tile, elem, TensorMapSwizzle::B128) }
}

/// The binding of a buffer that no kernel was given as an alias.
fn handle(buffer: BufferArg) -> cubecl::server::BufferBinding {
    match buffer {
        BufferArg::Handle { handle } => handle.handle,
        BufferArg::Alias { .. } => unreachable!("launchers pass buffers, not aliases"),
    }
}
