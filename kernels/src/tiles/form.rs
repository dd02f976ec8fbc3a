//! The tiles of Hopper's and Blackwell's kernels for `mla_decode`: their sizes, and how tile loads find them.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::common::select::Path;
use crate::mla_decode::{DecodeError, DecodeSizes};
use crate::ptx::wgmma::Elem;
use crate::ptx::{mbarrier, tma};

/// Query rows of a tile: what a warpgroup multiplies at a time.
pub(crate) const ROWS: usize = 64;
/// Keys of a block, which arrives in two halves.
pub(crate) const KEYS: usize = 64;
pub(crate) const HALF_KEYS: usize = KEYS / 2;
/// Blocks of keys in shared memory.
pub(crate) const STAGES: u32 = 2;
/// Units of a warpgroup.
pub(crate) const GROUP: u32 = 128;

/// Channels of a value.
pub(crate) const VALUE_WIDTH: usize = 512;
/// Channels of a tile: 128 bytes, the width of the swizzle.
pub(crate) const TILE_WIDTH: usize = 64;
/// Bytes of 64 rows in one tile, of keys or queries.
pub(crate) const TILE_BYTES: u32 = 8192;

/// Where the maximum of a row starts.
pub(crate) const LOWEST: f32 = -1e30;

/// What the kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Tiles of 64 channels in a key.
    pub(crate) tiles: usize,
    /// Keys that one tile load brings: half a block, or a page if that is shorter.
    pub(crate) box_keys: usize,
    /// bf16, otherwise f16.
    pub(crate) bf16: bool,
    /// Whether keys may be hidden.
    pub(crate) causal: bool,
}

impl Form {
    pub(crate) fn stage_bytes(self) -> u32 {
        self.tiles as u32 * TILE_BYTES
    }

    pub(crate) fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }
}

/// The form for a problem, if TMA and the tensor cores take it in such tiles; a load brings `most_keys` at most.
pub(crate) fn form_of(sizes: &DecodeSizes, most_keys: usize) -> Option<Form> {
    let bf16 = match sizes.elem {
        ElemType::Float(FloatKind::BF16) => true,
        ElemType::Float(FloatKind::F16) => false,
        _ => return None,
    };
    let widths = sizes.value_width == VALUE_WIDTH && matches!(sizes.key_width, 512 | 576);
    let paged = sizes.page_size >= 16;
    (widths && paged).then_some(Form {
        tiles: sizes.key_width / TILE_WIDTH,
        box_keys: sizes.page_size.min(most_keys),
        bf16,
        causal: sizes.causal,
    })
}

/// Rows of a matrix as `[tiles of 64 channels, rows, 64]`, so that one load brings tiles of rows.
pub(crate) fn tile_map(
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

/// Starts to load the query rows of a tile, of which `row` is the first.
#[cube]
pub(crate) fn load_query<E: Float>(
    map: &TensorMap<E, Tiled>,
    query_at: u32,
    query_full: u32,
    row: u32,
    #[comptime] form: Form,
) {
    mbarrier::arrive_expect(query_full, form.stage_bytes());
    tma::load_3d(query_at, tma::tensor_map_address::<E, Tiled>(map), query_full, 0i32, row as i32, 0i32);
}
