//! Mixture of experts: order of the work, sum over the experts. The products are those of [`linear`](crate::linear).
//!
//! Nothing comes back to the host on the way. The tokens' pairs of token and expert are sorted by expert on the device, and
//! cut into tiles, as many as there may be at most; a cube whose tile has no pairs exits early.

pub mod combine;
#[cfg(feature = "cuda")]
pub(crate) mod gather;
pub mod sort;

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    [combine::offline(), gather::offline(), sort::offline()].into_iter().flatten().collect()
}
