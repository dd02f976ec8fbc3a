//! What a query row of an item ends with.

use cubecl::prelude::*;

/// Normalises a row.
#[derive(CubeType, Clone, Copy)]
pub(super) struct RowEnd {
    /// What its accumulators are multiplied with.
    pub factor: f32,
    /// The logarithm of its sum.
    pub lse: f32,
}

#[cube]
impl RowEnd {
    /// `highest` is what the weights are relative to, `sum` their sum. `empty_lse` is the lse of a row that sees nothing.
    pub fn of(highest: f32, sum: f32, sees_keys: bool, empty_lse: u32) -> RowEnd {
        let mut lse = f32::from_bits(empty_lse);
        let mut factor = 0.0f32;
        if sees_keys {
            lse = highest + sum.ln();
            factor = 1.0f32 / sum;
        }
        RowEnd { factor, lse }
    }
}
