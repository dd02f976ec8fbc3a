//! Tensors of the files that a model has as one.

use burn::tensor::Tensor;
use mla_ops::{StackedWeight, Weight};

use super::WeightLoader;
use crate::parallel::Cut;
use crate::weights::WeightRole;
use crate::weights::asked::Asked;

impl WeightLoader<'_> {
    /// Matrices of the same shape `[out, in]` below one another, as one: `shape` is `[names.len() · out, in]`. Each is cut.
    ///
    /// # Panics
    /// As [`Self::stacked`].
    pub fn joined(&mut self, names: &[String], [rows, columns]: [usize; 2], cut: Cut) -> Weight {
        let stack: Tensor<3> = self.stacked(names, [names.len(), rows / names.len(), columns], cut);
        let [count, rows, columns] = stack.dims();
        self.reshape::<3, 2>(stack, [count * rows, columns]).into()
    }

    /// Experts `[E, out, in]`, each of which is one matrix, or several of the same shape below one another: as many names each.
    ///
    /// # Panics
    /// If the experts do not have as many names each.
    pub fn experts(&mut self, names: &[String], [experts, rows, columns]: [usize; 3]) -> StackedWeight {
        let each = names.len() / experts;
        assert_eq!(each * experts, names.len(), "as many names for each expert");
        let stack: Tensor<3> = self.stacked_by(each, names, &[rows / each, columns], Cut::Experts);
        let [count, rows, columns] = stack.dims();
        self.reshape::<3, 3>(stack, [count / each, each * rows, columns]).into()
    }

    /// Experts that are one tensor `[E, out, in]` in the files.
    pub fn packed_experts(&mut self, name: &str, shape: [usize; 3]) -> StackedWeight {
        self.tensor::<3>(name, shape, Cut::Experts).into()
    }

    /// The tensors `names` as one, stacked along a new leading axis: `shape` is that of the result,
    /// `[names.len(), ...]`, and each tensor must have `shape[1..]`. Of [`Cut::Experts`] a rank has some of the tensors, of other
    /// cuts a part of each.
    ///
    /// # Panics
    /// If `shape[0]` is not the number of names.
    pub fn stacked<const D: usize>(&mut self, names: &[String], shape: [usize; D], cut: Cut) -> Tensor<D> {
        assert_eq!(shape[0], names.len(), "the leading axis of a stack counts its tensors");
        self.stacked_by(1, names, &shape[1..], cut)
    }

    /// [`Self::stacked`] of experts that have so many names each.
    fn stacked_by<const D: usize>(
        &mut self,
        per_expert: usize,
        names: &[String],
        each: &[usize],
        cut: Cut,
    ) -> Tensor<D> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.load(&Asked { names: &names, each, stack: Some(per_expert), role: WeightRole::Weight, cut })
    }
}
