//! Mixture of experts: choice of experts, order of the work, products, sum.
//!
//! Nothing comes back to the host on the way. The tokens' pairs of token and expert are sorted by expert on the device, and
//! cut into tiles, as many as there may be at most; a tile without pairs costs a cube that ends at once.

#[cfg(feature = "cuda")]
pub(crate) mod choice;
pub mod combine;
#[cfg(feature = "cuda")]
pub(crate) mod latents;
pub mod linear;
pub mod route;
pub mod sort;
#[cfg(feature = "cuda")]
pub(crate) mod source;
pub(crate) mod tiles;

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    [combine::offline(), linear::offline(), route::offline(), sort::offline(), crate::sm80::linear::offline()]
        .into_iter()
        .flatten()
        .collect()
}
