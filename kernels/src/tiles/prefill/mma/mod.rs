//! Attention of a tile of queries with the matrix instructions of a warp: asynchronous copies bring blocks of keys and values, a warp
//! has 16 of the rows. Which keys are in a block, and who sees them, is up to the operation ([`BlockRows`](load::BlockRows),
//! [`Visible`](super::softmax::Visible)). `ragged_attention/mma/README.md` has the schedule.

pub(crate) mod attend;
pub(crate) mod epilogue;
pub(crate) mod form;
pub(crate) mod load;
pub(crate) mod products;
