//! What Hopper's kernels for attention of prompts have in common: warpgroups with 64 query rows each, beside one that loads, and what
//! becomes of their accumulators.

pub(crate) mod epilogue;

use cubecl::prelude::*;

use super::form::PANEL;
use crate::ptx::tma;
use crate::tiles::form::LOWEST;
use crate::tiles::softmax::SoftmaxState;

/// Query rows of a warpgroup: what it multiplies at a time.
pub(crate) const GROUP_ROWS: usize = 64;
/// Warpgroups that compute.
pub(crate) const GROUPS: u32 = 2;
/// Units of a warpgroup.
pub(crate) const GROUP: u32 = 128;
/// Warps that compute.
pub(crate) const WARPS: u32 = GROUPS * GROUP / 32;
/// Units of a cube: one warpgroup more, which loads.
pub(crate) const UNITS: u32 = (GROUPS + 1) * GROUP;
/// Shared memory for outputs on their way: 64 channels of the rows of all warpgroups.
pub(crate) const STAGING_BYTES: u32 = GROUPS * (GROUP_ROWS * PANEL * 2) as u32;

/// Whether it is a Hopper.
pub(crate) fn is_hopper(client: &Client) -> bool {
    client.properties().identity.fingerprint == "ptx_sm90"
}

/// `[tokens, heads, channels]` in panels of 64 channels of so many tokens of a head. Strides are those of tokens and heads; none where
/// the buffer is none of a launch's own.
///
/// # Safety
/// There are so many rows, so far apart.
pub(crate) unsafe fn panels_map(
    buffer: BufferArg,
    [tokens, heads, width]: [usize; 3],
    [token_stride, head_stride]: [usize; 2],
    box_tokens: usize,
    elem: ElemType,
) -> Option<TensorMapArg<Tiled>> {
    let BufferArg::Handle { handle } = buffer else { return None };
    // A map has no dimension of 0; without tokens nothing is loaded. The stride of a single head may be any.
    let head_stride = if heads == 1 { width } else { head_stride };
    let (shape, strides) = ([tokens.max(1), heads, width], [token_stride, head_stride, 1]);
    let tile = [box_tokens, 1, PANEL];
    // SAFETY: the caller's.
    Some(unsafe { tma::tiled_map(handle.handle, &shape, &strides, &tile, elem, TensorMapSwizzle::B128) })
}

/// The output of a unit before the division by the sum, and what belongs to it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Attended<A: Size> {
    pub out: Vector<f32, A>,
    pub state: SoftmaxState,
}

#[cube]
impl<A: Size> Attended<A> {
    /// Without a key.
    pub fn nothing() -> Attended<A> {
        let (lowest, none) = (f32::new(LOWEST), f32::new(0.0));
        let state = SoftmaxState { highest_a: lowest, highest_b: lowest, sum_a: none, sum_b: none };
        Attended::<A> { out: Vector::<f32, A>::zeroed(), state }
    }
}
