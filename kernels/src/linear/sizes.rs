//! What products there are to compute.

use cubecl::prelude::*;

use super::weight::WeightFormat;

/// Outputs that kernels for many rows write at once.
pub(super) const VECTOR: usize = 8;

/// What the choice of a kernel depends on.
#[derive(Debug, Clone, Copy)]
pub struct LinearSizes {
    /// Rows of all matrices together.
    pub rows: usize,
    /// Matrices that rows are divided among.
    pub matrices: usize,
    /// How rows find their matrix.
    pub division: Division,
    /// Channels of a row of x.
    pub inputs: usize,
    /// Channels of a row of the output.
    pub outputs: usize,
    /// Channels of a row of x that are copied behind its products.
    pub carried: usize,
    /// Elements from one matrix to the next.
    pub matrix_stride: usize,
    /// What becomes of the products.
    pub form: LinearForm,
    /// Of x, and of weights and output.
    pub elems: [ElemType; 2],
    /// In which format weights are stored.
    pub format: WeightFormat,
    /// Whether the bits of a row must not depend on how many rows there are.
    pub batch_invariant: bool,
}

/// What becomes of the products; by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinearForm {
    /// The output is `silu(gate) * up` of two products.
    pub gated: bool,
    /// `up` is clamped both ways and the gate from above.
    pub limited: bool,
}

impl LinearForm {
    /// Elements of a matrix.
    pub(super) fn matrix(self, inputs: usize, outputs: usize) -> usize {
        inputs * outputs * if self.gated { 2 } else { 1 }
    }
}

/// How rows find their matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// One matrix has them all.
    Dense,
    /// Each of several matrices has them all.
    Several,
    /// The rows of each head have its own.
    Heads,
    /// The rows of each expert have its own, and are sorted by expert.
    Experts,
    /// They are a single token's, and each has that of another expert.
    Token,
}

impl LinearSizes {
    /// Of so many rows of one matrix.
    pub fn dense(
        [rows, inputs, outputs]: [usize; 3],
        form: LinearForm,
        elems: [ElemType; 2],
        format: WeightFormat,
    ) -> Self {
        let (division, matrix_stride) = (Division::Dense, form.matrix(inputs, outputs));
        let (matrices, carried, batch_invariant) = (1, 0, false);
        Self { rows, matrices, division, inputs, outputs, carried, matrix_stride, form, elems, format, batch_invariant }
    }

    /// Of so many rows of heads, with channels that are carried over.
    pub fn by_head(
        [rows, heads, inputs, outputs, carried]: [usize; 5],
        elems: [ElemType; 2],
        format: WeightFormat,
    ) -> Self {
        let dense = Self::dense([rows * heads, inputs, outputs], LinearForm::default(), elems, format);
        Self { matrices: heads, division: Division::Heads, carried, ..dense }
    }

    /// Of so many pairs of token and expert.
    pub fn experts(
        [pairs, experts, inputs, outputs]: [usize; 4],
        form: LinearForm,
        elem: ElemType,
        format: WeightFormat,
        batch_invariant: bool,
    ) -> Self {
        let dense = Self::dense([pairs, inputs, outputs], form, [elem; 2], format);
        Self { matrices: experts, division: Division::Experts, batch_invariant, ..dense }
    }

    /// Of a single token's pairs, each with a matrix of its own.
    pub fn token([pairs, inputs, outputs]: [usize; 3], form: LinearForm, elem: ElemType, format: WeightFormat) -> Self {
        let dense = Self::dense([pairs, inputs, outputs], form, [elem; 2], format);
        Self { matrices: pairs, division: Division::Token, ..dense }
    }

    /// Rows of a matrix, on average.
    #[cfg(feature = "cuda")]
    pub(super) fn rows_each(&self) -> usize {
        self.rows.div_ceil(self.matrices.max(1))
    }
}

/// Whether matrices of so many outputs in these formats have the same order of sums, and kernels multiply both alike. With matrix
/// instructions the outputs do not decide it, but for where Hopper's other kernel has it, too.
pub(crate) fn pairs(first: (usize, WeightFormat), second: (usize, WeightFormat)) -> bool {
    let [(outputs, format), (second_outputs, second_format)] = [first, second];
    // Numbers and codes have their own kernels.
    let alike = format.is_dense() == second_format.is_dense();
    alike && outputs.is_multiple_of(VECTOR) == second_outputs.is_multiple_of(VECTOR)
}
