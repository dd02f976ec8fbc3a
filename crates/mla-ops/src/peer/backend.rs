//! The sum as a Burn backend extension.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::all_reduce::{AllReduceArgs, MOST_RANKS, launch};

use crate::dispatch::tensors;
use crate::tensors::{buffers, contiguous, elem, empty, launched};

/// What a call is of besides its tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    /// Where the rank's epochs are.
    pub epochs: u64,
    /// Where all mailboxes are.
    pub mailboxes: [u64; MOST_RANKS],
    /// The number of the rank.
    pub rank: usize,
    /// Ranks.
    pub ranks: usize,
    /// As the kernel counts it.
    pub patience: u32,
}

/// Checked arguments.
pub(super) fn all_reduce(x: Tensor<2>, call: Call) -> Tensor<2> {
    tensors(<Dispatch as AllReduceBackend>::all_reduce(x.into_dispatch(), call))
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait AllReduceBackend: Backend {
    /// [`all_reduce`] of an element at least.
    #[fusion(meta = |x, _call| x.clone())]
    fn all_reduce(x: FloatTensor<Self>, call: Call) -> FloatTensor<Self>;
}

impl AllReduceBackend for CubeBackend {
    fn all_reduce(x: CubeTensor, call: Call) -> CubeTensor {
        let x = contiguous(x);
        let (elements, elem) = (x.meta.shape().num_elements(), elem(&x));
        let out = empty(&x, x.meta.shape().clone(), x.dtype);
        let Call { epochs, mailboxes, rank, ranks, patience } = call;
        launched(launch(
            &x.client,
            buffers!(x, out => AllReduceArgs { x, out, epochs, mailboxes, elements, rank, ranks, patience, elem }),
        ));
        // CubeCL keeps launches back until it has several, and the other ranks wait for this one. An error is that of something
        // before, and comes again.
        let _ = x.client.flush();
        out
    }
}
