//! [`sample`](super::sample()) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait SampleBackend: Backend {
    /// [`sample`](super::sample()) of a row at least: tokens, and the buffer of `seen`.
    #[fusion(meta = |logits, _rows, seen| (crate::fusion::spec([logits.shape[0]], seen.dtype), seen.clone()))]
    fn sample(
        logits: FloatTensor<Self>,
        rows: IntTensor<Self>,
        seen: IntTensor<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>);
}
