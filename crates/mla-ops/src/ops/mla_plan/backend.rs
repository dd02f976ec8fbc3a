//! [`mla_plan`](super::mla_plan) as a backend extension.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::Splits;

/// What [`MlaPlanBackend::mla_plan`] needs beside the lengths.
#[derive(Debug, Clone)]
pub(crate) struct PlanSpec {
    /// Keys in a tile.
    pub(crate) tile: usize,
    /// Cubes that run at a time.
    pub(crate) cubes: usize,
    /// How the keys of a sequence are divided.
    pub(crate) splits: Splits,
    /// Longer lengths are cut to this.
    pub(crate) max_seq_len: usize,
    /// Rows of the item list.
    pub(crate) capacity: usize,
    /// Where keys are the entries of two lists: of each at most, in whole tiles.
    pub(crate) lists: Option<[usize; 2]>,
}

/// Lengths of the second list of each query token, i32 `[B]`.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) enum SecondLengths<B: Backend> {
    /// There is none, or all are as long as lists may be.
    None,
    /// Those.
    Lengths(IntTensor<B>),
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait MlaPlanBackend: Backend {
    /// [`mla_plan`](super::mla_plan): items, cube_ptr, split_ptr.
    #[fusion(meta = |seq_lens, _second, plan| {
        let list = |len: usize| crate::fusion::spec([len], seq_lens.dtype);
        let items = crate::fusion::spec([plan.capacity, 4], seq_lens.dtype);
        (items, list(plan.cubes + 1), list(seq_lens.shape[0] + 1))
    })]
    fn mla_plan(
        seq_lens: IntTensor<Self>,
        #[extension_type] second: SecondLengths<Self>,
        plan: PlanSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}
