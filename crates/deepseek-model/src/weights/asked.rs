//! What a rank has of tensors that are asked for together.

use std::ops::Range;

use super::WeightRole;
use crate::parallel::{Cut, Parallel, Part};

/// Tensors that are asked for together.
#[derive(Clone, Copy)]
pub(super) struct Asked<'n> {
    pub(super) names: &'n [&'n str],
    /// The shape of each.
    pub(super) each: &'n [usize],
    /// Where they are stacked along a new leading axis, how many of them are one expert's; otherwise there is one.
    pub(super) stack: Option<usize>,
    pub(super) role: WeightRole,
    pub(super) cut: Cut,
    /// How they become matrices that may stay in blocks, if they may.
    pub(super) matrices: Option<MatrixRows>,
}

/// Rows of a matrix that is made of tensors `[rows, columns]` below one another.
#[derive(Clone, Copy)]
pub(super) enum MatrixRows {
    /// Those of all tensors.
    All,
    /// Those of so many tensors.
    Tensors(usize),
    /// So many of a tensor.
    Rows(usize),
}

impl MatrixRows {
    /// How many, where there are so many tensors of so many rows.
    pub(super) fn count(self, tensors: usize, rows: usize) -> usize {
        match self {
            Self::All => tensors * rows,
            Self::Tensors(each) => each * rows,
            Self::Rows(rows) => rows,
        }
    }
}

/// What a rank has of them.
pub(super) struct Own {
    /// These of them.
    pub(super) names: Range<usize>,
    /// And this part of each.
    pub(super) part: Part,
}

impl Asked<'_> {
    /// The shape of what a rank has.
    pub(super) fn shape<const D: usize>(&self, own: &Own) -> [usize; D] {
        let mut sizes = self.stack.map(|_| own.names.len()).into_iter().chain(own.part.shape(self.each));
        std::array::from_fn(|_| sizes.next().unwrap_or(1))
    }

    /// What this rank has of them, and what is wrong where the parts of the ranks are not equal.
    pub(super) fn own(&self, parallel: &Parallel) -> (Own, Option<String>) {
        let count = self.names.len();
        match (self.cut, self.stack) {
            (Cut::Experts, Some(per_expert)) => {
                let (Part { range, .. }, wrong) = parallel.part(Cut::Experts, &[count / per_expert]);
                let names = range.start * per_expert..range.end * per_expert;
                (Own { names, part: Part::whole(self.each) }, wrong)
            }
            (cut, _) => {
                let (part, wrong) = parallel.part(cut, self.each);
                (Own { names: 0..count, part }, wrong)
            }
        }
    }

    /// What a rank that is alone has of them.
    pub(super) fn all(&self) -> Own {
        Own { names: 0..self.names.len(), part: Part::whole(self.each) }
    }
}
