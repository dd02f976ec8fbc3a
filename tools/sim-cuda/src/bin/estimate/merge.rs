//! The form of the kernel that merges splits.
use crate::shapes::VALUE;

/// Vectors of four f32 in a row of results.
const VECTORS: usize = VALUE / 4;

/// How the merge divides its work (`Shape` of `merge_splits`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Merge {
    pub groups: usize,
    pub columns: usize,
    pub chunks: usize,
    pub cube_rows: usize,
}

impl Merge {
    /// For so many rows, with so many splits on average.
    pub fn new(rows: usize, splits: usize) -> Self {
        let power = |n: usize| 1 << n.max(1).ilog2();
        let chains = power(splits / 8).min(16);
        let groups: usize = chains.min(power((1 << 17) / (rows * VECTORS).max(1)));
        let columns = VECTORS.min(256 / groups.max(2));
        let chunks = VECTORS.div_ceil(columns);
        let cube_rows = if groups == 1 { (rows * chunks).div_ceil(1 << 11).next_power_of_two() } else { 1 };
        Self { groups, columns, chunks, cube_rows }
    }

    /// The offline compiler's name of this form, or of the one of its kind that has most in common.
    pub fn name(self) -> String {
        let rows = if self.cube_rows > 1 { ".rows.2" } else { "" };
        format!("merge_splits.step.{}{rows}.bf16.sm_90a", self.groups)
    }

    /// Rows of a cube of that form.
    pub fn compiled(self) -> Self {
        Self { cube_rows: self.cube_rows.min(2), ..self }
    }
}
