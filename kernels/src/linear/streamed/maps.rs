//! Codes and scales of FP4 as copies see them: bytes of the rows of a warp.

use cubecl::ir::UIntKind;
use cubecl::prelude::*;

use super::form::{COPY_BYTES, Form, WEIGHT_ROWS};
use crate::linear::{WeightArg, WeightFormat};
use crate::ptx::tma;

/// Those of codes and of scales, and the scales themselves. FP8's, which are not copied, have a map of nothing.
pub(super) fn maps(
    weight: WeightArg,
    [experts, outputs]: [usize; 2],
    form: Form,
) -> ([TensorMapArg<Tiled>; 2], super::ScalesLaunch) {
    let (WeightArg::Fp8(packed) | WeightArg::Fp4(packed)) = weight else {
        unreachable!("the kernel takes weights in blocks of codes only")
    };
    let layout = packed.layout;
    let matrix = if form.linear.gated { 2 * outputs } else { outputs } * form.inputs / form.codes();
    let codes = rows_map(packed.codes, [experts, outputs, form.inputs / form.codes()], matrix, COPY_BYTES, form);
    let is_copied = form.format == WeightFormat::Fp4;
    let scale_sizes = if is_copied { [experts, outputs, layout.across] } else { [1, form.outputs(), 16] };
    let scale_matrix = if is_copied { layout.matrix } else { 16 };
    let scale_bytes = if is_copied { form.scale_row_bytes() } else { 16 };
    let scales = rows_map(crate::common::launch::share(&packed.scales), scale_sizes, scale_matrix, scale_bytes, form);
    let (across, matrix) = (layout.across as u32, layout.matrix as u32);
    ([codes, scales], super::ScalesLaunch::new(packed.scales, layout.rows_log2, across, matrix))
}

/// So many bytes of each of a warp's rows; of a gated output 8 rows of the gate, then the same 8 of up.
fn rows_map(
    bytes: BufferArg,
    [experts, outputs, row]: [usize; 3],
    matrix: usize,
    width: usize,
    form: Form,
) -> TensorMapArg<Tiled> {
    let BufferArg::Handle { handle } = bytes else { unreachable!("launchers pass buffers, not aliases") };
    let swizzle = if width == COPY_BYTES { TensorMapSwizzle::B128 } else { TensorMapSwizzle::None };
    let (handle, elem) = (handle.handle, ElemType::UInt(UIntKind::U8));
    // SAFETY: there are as many matrices of as many rows and bytes.
    unsafe {
        if form.linear.gated {
            let eight = WEIGHT_ROWS / 2;
            let shape = [experts, outputs / eight, 2, eight, row];
            let strides = [matrix, eight * row, outputs * row, row, 1];
            tma::tiled_map(handle, &shape, &strides, &[1, 1, 2, eight, width], elem, swizzle)
        } else {
            let (shape, strides) = ([experts, outputs, row], [matrix, row, 1]);
            tma::tiled_map(handle, &shape, &strides, &[1, WEIGHT_ROWS, width], elem, swizzle)
        }
    }
}
