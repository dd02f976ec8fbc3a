//! Whether and how TMA brings the tiles of a decode step.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::problem::{DecodeError, DecodeSizes};
use crate::cache_rows::RowFormat;
use crate::common::select::Path;
use crate::ptx::tma;
use crate::tiles::form::{Form, ROWS, TILE_WIDTH, VALUE_WIDTH};

/// The form for a problem, if TMA and the tensor cores take it in such tiles; a load brings `most_keys` at most.
pub(super) fn form_of(sizes: &DecodeSizes, most_keys: usize) -> Option<Form> {
    let bf16 = match sizes.elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let widths = sizes.value_width == VALUE_WIDTH && matches!(sizes.key_width, 512 | 576);
    let paged = sizes.page_size >= 16 && sizes.rows == RowFormat::Dense;
    (widths && paged).then_some(Form {
        tiles: sizes.key_width / TILE_WIDTH,
        box_keys: sizes.page_size.min(most_keys),
        bf16,
        causal: sizes.causal,
    })
}

/// Rows of a matrix as `[tiles of 64 channels, rows, 64]`, so that one load brings tiles of rows.
pub(super) fn tile_map(
    matrix: BufferArg,
    [tiles, rows]: [usize; 2],
    stride: usize,
    [tile_count, tile_rows]: [usize; 2],
    elem: ElemType,
    path: Path,
) -> Result<TensorMapArg<Tiled>, DecodeError> {
    let BufferArg::Handle { handle } = matrix else { return Err(DecodeError::NoKernel(path)) };
    // A map has no dimension of 0; without rows nothing is loaded.
    let (shape, strides) = ([tiles, rows.max(1), TILE_WIDTH], [TILE_WIDTH, stride, 1]);
    let tile = [tile_count, tile_rows, TILE_WIDTH];
    // SAFETY: the matrix has as many rows of as many channels.
    Ok(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &tile, elem, TensorMapSwizzle::B128) })
}

/// Whether a pair of Blackwell's cubes shares the keys, where one cube has not all query rows.
pub(super) fn is_pair(sizes: &DecodeSizes) -> bool {
    sizes.query_rows() > ROWS
}
