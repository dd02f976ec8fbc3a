//! What kernels of several operations or architectures share: the tile of the plain attention kernels, and of Hopper's and
//! Blackwell's kernels the tile loads, the online softmax and the epilogue.

pub(crate) mod attention;
#[cfg(feature = "cuda")]
pub(crate) mod form;
#[cfg(feature = "cuda")]
pub(crate) mod loader;
#[cfg(feature = "cuda")]
pub(crate) mod output;
#[cfg(feature = "cuda")]
pub(crate) mod softmax;
