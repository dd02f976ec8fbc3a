//! [`lightning_index`](super::lightning_index) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use super::LightningIndexOptions;

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LightningIndexBackend: Backend {
    /// [`lightning_index`](super::lightning_index).
    #[fusion(dtype = burn::tensor::DType::I32, shape = [q[0], q[1], options.k].into())]
    fn lightning_index(
        q: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        head_weights: FloatTensor<Self>,
        visible: IntTensor<Self>,
        options: LightningIndexOptions,
    ) -> IntTensor<Self>;
}
