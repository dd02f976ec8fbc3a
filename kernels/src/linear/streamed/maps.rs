//! Codes and scales of FP4 as copies see them: bytes of the rows of a warp.

use cubecl::ir::UIntKind;
use cubecl::prelude::*;

use super::ScalesLaunch;
use super::form::{COPY_BYTES, Form, WEIGHT_ROWS};
use crate::common::launch::share;
use crate::linear::{BlockLayout, WeightArg, WeightFormat};
use crate::ptx::tma;

/// Those of codes and of scales, and the scales themselves. Of FP8, whose scales are not copied, the second is that of the codes, too.
pub(super) fn maps(
    weight: WeightArg,
    [experts, outputs]: [usize; 2],
    form: Form,
) -> ([TensorMapArg<Tiled>; 2], ScalesLaunch) {
    let (WeightArg::Fp8(packed) | WeightArg::Fp4(packed)) = weight else {
        unreachable!("the kernel takes weights in blocks of codes only")
    };
    let BlockLayout { rows_log2, across, matrix } = packed.layout;
    let rows = if form.linear.gated { 2 * outputs } else { outputs };
    let row = form.inputs / form.codes();
    let codes = || rows_map(share(&packed.codes), [experts, outputs, row], rows * row, COPY_BYTES, form);
    let scales = match form.format {
        WeightFormat::Fp4 => {
            rows_map(share(&packed.scales), [experts, outputs, across], matrix, form.scale_row_bytes(), form)
        }
        WeightFormat::Fp8 | WeightFormat::Dense => codes(),
    };
    ([codes(), scales], ScalesLaunch::new(packed.scales, rows_log2, across as u32, matrix as u32))
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
