//! How tiles are divided among warps, and whether a device has what the kernels need.

use cubecl::features::{MmaConfig, Plane};
use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::load::vectors;
pub(crate) use crate::tiles::prefill::form::{Form, PANEL};

/// Threads of a warp.
pub(crate) const LANES: usize = 32;

/// The matrix instruction: 16 rows, 8 columns, 16 terms.
pub(crate) const M: usize = 16;
pub(crate) const N: usize = 8;
pub(crate) const K: usize = 16;

/// Keys of a block.
pub(crate) const KEYS: usize = 64;
/// Scores of a unit: of two rows (a and b, 8 apart), every other pair of columns.
pub(crate) const SCORES: usize = KEYS / 2;
/// Pairs of weights of a unit.
pub(crate) const PAIRS: usize = SCORES / 2;

/// Elements of a vector: 16 bytes, what is copied at once and a row of what `ldmatrix` loads.
pub(crate) const VECTOR: usize = 8;
/// Vectors of a row of a panel.
pub(crate) const PANEL_VECTORS: usize = PANEL / VECTOR;
/// Bytes of a row of a panel.
pub(crate) const PANEL_BYTES: u32 = (PANEL * 2) as u32;

impl Form {
    /// Units of a cube: a warp for 16 query rows.
    pub(crate) fn units(self) -> usize {
        self.rows / M * LANES
    }

    /// Whether a device has the instructions, and shared memory for a cube beside `bytes` more.
    pub(crate) fn fits(self, client: &Client, elem: ElemType, bytes: usize) -> bool {
        let (features, float) = (client.features(), ElemType::Float(FloatKind::F32));
        let [m, n, k] = [M, N, K].map(|size| size as u32);
        let hardware = &client.properties().hardware;
        features.matmul.mma.contains(&MmaConfig { a_type: elem, b_type: elem, cd_type: float, m, n, k })
            && features.matmul.ldmatrix.contains(&elem)
            && features.copy_async
            && features.memory_reinterpret
            && features.plane.contains(Plane::Ops)
            && (hardware.plane_size_min, hardware.plane_size_max) == (LANES as u32, LANES as u32)
            && self.shared_bytes() + bytes <= hardware.max_shared_memory_size
    }

    /// Shared memory of a cube.
    pub(crate) fn shared_bytes(self) -> usize {
        vectors(self) * VECTOR * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GPUs with 100 KiB in a multiprocessor have 99 for a cube.
    #[test]
    fn every_form_fits_a_small_multiprocessor() {
        for (key_panels, value_panels) in [(3, 2), (2, 2), (1, 1)] {
            let form = Form::plain(128, [key_panels, value_panels, 0], true);
            assert!(form.shared_bytes() <= 99 << 10, "{form:?}");
        }
    }
}
