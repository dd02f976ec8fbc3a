//! Attention of a tile of queries to blocks of keys, for the operations of prefill: what their kernels' code depends on, the online
//! softmax between the products, and ([`mma`]) all of it with the matrix instructions of a warp.

pub(crate) mod form;
pub(crate) mod mma;
pub(crate) mod softmax;
pub(crate) mod wgmma;
