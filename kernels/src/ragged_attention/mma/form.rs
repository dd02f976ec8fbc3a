//! How tiles are divided among warps, and whether a device has what the kernel needs.

use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::load::vectors;
pub(super) use crate::ragged_attention::form::{Form, PANEL};
use crate::ragged_attention::problem::RaggedAttentionSizes;
use crate::ragged_attention::tiles::cube_count;

/// Threads of a warp, and warps of a cube.
pub(super) const LANES: usize = 32;
pub(super) const WARPS: usize = 8;
pub(super) const UNITS: usize = LANES * WARPS;

/// The matrix instruction: 16 rows, 8 columns, 16 terms.
pub(super) const M: usize = 16;
pub(super) const N: usize = 8;
pub(super) const K: usize = 16;

/// Query rows of a tile: a warp has 16.
pub(super) const ROWS: usize = WARPS * M;
/// Keys of a block.
pub(super) const KEYS: usize = 64;
/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(super) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(super) const PAIRS: usize = SCORES / 2;

/// Elements of a vector: 16 bytes, what is copied at once and a row of what `ldmatrix` loads.
pub(super) const VECTOR: usize = 8;
/// Vectors of a row of a panel.
pub(super) const PANEL_VECTORS: usize = PANEL / VECTOR;
/// Bytes of a row of a panel.
pub(super) const PANEL_BYTES: u32 = (PANEL * 2) as u32;

/// The form for a problem, where the device and the kernel take it.
pub(in crate::ragged_attention) fn form(client: &Client, sizes: &RaggedAttentionSizes) -> Option<Form> {
    let (features, elem, float) = (client.features(), sizes.elem, ElemType::Float(FloatKind::F32));
    let [m, n, k] = [M, N, K].map(|size| size as u32);
    let hardware = &client.properties().hardware;
    let supported = features.matmul.mma.contains(&MmaConfig { a_type: elem, b_type: elem, cd_type: float, m, n, k })
        && features.matmul.ldmatrix.contains(&elem)
        && features.copy_async
        && features.memory_reinterpret
        && features.plane.contains(Plane::Ops)
        && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32);
    let form = if supported { Form::of(sizes)? } else { return None };
    let fits = shared_bytes(form) <= hardware.max_shared_memory_size && cube_count(client, sizes, ROWS).is_ok();
    fits.then_some(form)
}

/// Shared memory of a cube.
fn shared_bytes(form: Form) -> usize {
    vectors(form) * VECTOR * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPUs with 100 KiB in a multiprocessor have 99 for a cube.
    #[test]
    fn every_form_fits_a_small_multiprocessor() {
        for (key_panels, value_panels) in [(3, 2), (2, 2), (1, 1)] {
            let (negative, capped, windowed) = (false, false, false);
            let form = Form { key_panels, value_panels, shared_panels: 0, bf16: true, negative, capped, windowed };
            assert!(shared_bytes(form) <= 99 << 10, "{form:?}");
        }
    }
}
