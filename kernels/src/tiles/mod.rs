//! What kernels of several operations or architectures share: the tile of the plain attention kernels, operands of a warp's matrix
//! instructions, attention of prefill with them, and of Hopper's and Blackwell's kernels the tile loads, the ring of stages, the
//! online softmax and the epilogue; of Blackwell's the products of one cube and
//! of a pair.

pub(crate) mod attention;
#[cfg(feature = "cuda")]
pub(crate) mod form;
#[cfg(feature = "cuda")]
pub(crate) mod fragments;
#[cfg(feature = "cuda")]
pub(crate) mod loader;
#[cfg(feature = "cuda")]
pub(crate) mod one_cube;
#[cfg(feature = "cuda")]
pub(crate) mod output;
#[cfg(feature = "cuda")]
pub(crate) mod pair;
#[cfg(feature = "cuda")]
pub(crate) mod prefill;
#[cfg(feature = "cuda")]
pub(crate) mod ring;
#[cfg(feature = "cuda")]
pub(crate) mod softmax;
