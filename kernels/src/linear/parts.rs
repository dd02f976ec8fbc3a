//! The order of the sums of batch-invariant products on Hopper. A few rows are computed by `mma` and many by `sm90`, with the same
//! bits.
//!
//! Channels come in blocks of [`BLOCK`], which are dealt to [`PARTS`] parts in turn. The sum of a part starts at zero and takes 16
//! channels at a time, in order: one step of a matrix instruction. The parts are added up in order, in f32. On Hopper `mma.sync`
//! and `wgmma` compute the same bits of the same 16 channels (Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores
//! and Matrix Cores", 2025: both add the aligned products and the sum so far with 25 bits behind the point, and truncate).

/// Parts of the channels.
pub(super) const PARTS: usize = 8;
/// Channels of a block.
pub(super) const BLOCK: usize = 64;
