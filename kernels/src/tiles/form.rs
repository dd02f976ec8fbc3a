//! The tiles of Hopper's and Blackwell's kernels for `mla_decode`: their sizes, and the load of a query.

use cubecl::prelude::*;

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
