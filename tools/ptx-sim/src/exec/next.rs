//! What a cluster does next.

/// One of its warps, or what goes on beside them, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Warp(usize),
    Flight(usize),
    /// The tensor cores of a CTA begin or end a product.
    Tensor(usize),
}
