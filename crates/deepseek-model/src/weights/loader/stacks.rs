//! Tensors of the files that a model has as one.

use burn::tensor::Tensor;
use mla_ops::{StackedWeight, Weight};

use super::WeightLoader;
use crate::parallel::Cut;
use crate::weights::WeightRole;
use crate::weights::asked::{Asked, MatrixRows};

impl WeightLoader<'_> {
    /// Matrices of the same shape `[out, in]` below one another, as one: `shape` is `[names.len() · out, in]`. Each is cut.
    ///
    /// # Panics
    /// As [`Self::stacked`].
    pub fn joined(&mut self, names: &[String], [rows, columns]: [usize; 2], cut: Cut) -> Weight {
        let (each, strs) = ([rows / names.len(), columns], strs(names));
        let (stack, role, matrices) = (Some(1), WeightRole::Weight, Some(MatrixRows::All));
        let asked = Asked { names: &strs, each: &each, stack, role, cut, matrices };
        if let Some((blocks, [_, rows, columns])) = self.load_blocks(&asked)
            && let Some(weight) = self.of_blocks(strs[0], Weight::from_blocks(blocks, [rows, columns]))
        {
            return weight;
        }
        let stack: Tensor<3> = self.load(&asked);
        let [count, rows, columns] = stack.dims();
        self.reshape::<3, 2>(stack, [count * rows, columns]).into()
    }

    /// Experts `[E, out, in]`, each of which is one matrix, or several of the same shape below one another: as many names each. Of
    /// [`Cut::Experts`] a rank has some of them, of other cuts a part of each matrix.
    ///
    /// # Panics
    /// If the experts do not have as many names each.
    pub fn experts(&mut self, names: &[String], [experts, rows, columns]: [usize; 3], cut: Cut) -> StackedWeight {
        let each = names.len() / experts;
        assert_eq!(each * experts, names.len(), "as many names for each expert");
        let (shape, strs) = ([rows / each, columns], strs(names));
        let (stack, role, matrices) = (Some(each), WeightRole::Weight, Some(MatrixRows::Tensors(each)));
        let asked = Asked { names: &strs, each: &shape, stack, role, cut, matrices };
        if let Some((blocks, dims)) = self.load_blocks(&asked)
            && let Some(weight) = self.of_blocks(strs[0], StackedWeight::from_blocks(blocks, dims))
        {
            return weight;
        }
        let stack: Tensor<3> = self.load(&asked);
        let [count, rows, columns] = stack.dims();
        self.reshape::<3, 3>(stack, [count / each, each * rows, columns]).into()
    }

    /// Matrices `[H, out, in]` that are one tensor `[H * out, in]` in the files, those of heads or of groups of them; a rank has whole
    /// ones.
    pub fn by_head(&mut self, name: &str, [heads, rows, columns]: [usize; 3]) -> StackedWeight {
        let (each, matrices) = ([heads * rows, columns], Some(MatrixRows::Rows(rows)));
        let (stack, role, cut) = (None, WeightRole::Weight, Cut::Heads(heads));
        let asked = Asked { names: &[name], each: &each, stack, role, cut, matrices };
        if let Some((blocks, dims)) = self.load_blocks(&asked)
            && let Some(weight) = self.of_blocks(name, StackedWeight::from_blocks(blocks, dims))
        {
            return weight;
        }
        let matrix: Tensor<2> = self.load(&asked);
        let [all, columns] = matrix.dims();
        self.reshape::<2, 3>(matrix, [all / rows, rows, columns]).into()
    }

    /// Experts that are one tensor `[E, out, in]` in the files; a rank has whole ones.
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
        let (names, stack, role) = (strs(names), Some(1), WeightRole::Weight);
        self.load(&Asked { names: &names, each: &shape[1..], stack, role, cut, matrices: None })
    }
}

fn strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}
