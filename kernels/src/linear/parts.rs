//! The order of the sums of batch-invariant products on Hopper. A few rows are computed by `mma` and many by `sm90`, with the same
//! bits.
//!
//! Channels come in blocks of [`BLOCK`], which are dealt to [`PARTS`] parts in turn. The sum of a part starts at zero and takes 16
//! channels at a time, in order: one step of a matrix instruction. The parts are added up in order, in f32. On Hopper `mma.sync`
//! and `wgmma` compute the same bits of the same 16 channels (Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores
//! and Matrix Cores", 2025: both add the aligned products and the sum so far with 25 bits behind the point, and truncate).

use cubecl::prelude::Client;

use super::{LinearSizes, mma, sm90};

/// Parts of the channels.
pub(super) const PARTS: usize = 8;
/// Channels of a block.
pub(super) const BLOCK: usize = 64;

/// Whether products are summed in this order: where both kernels take the matrix. How many rows there are plays no part.
pub(super) fn applies(client: &Client, sizes: &LinearSizes) -> bool {
    sizes.batch_invariant && sm90::supported(client, sizes) && mma::supported(client, sizes)
}
