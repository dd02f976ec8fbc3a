//! [`lightning_index`](super::lightning_index) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use super::LightningIndexOptions;
use crate::cache::BackendPool;

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LightningIndexBackend: Backend {
    /// [`lightning_index`](super::lightning_index).
    #[fusion(meta = |q, _keys, _page_table, _head_weights, _visible, options| {
        let [batch, query_len, ..] = q.shape.dims::<4>();
        crate::fusion::spec([batch, query_len, options.k], burn::tensor::DType::I32)
    })]
    fn lightning_index(
        q: FloatTensor<Self>,
        #[extension_type] keys: BackendPool<Self>,
        page_table: IntTensor<Self>,
        head_weights: FloatTensor<Self>,
        visible: IntTensor<Self>,
        options: LightningIndexOptions,
    ) -> IntTensor<Self>;
}
