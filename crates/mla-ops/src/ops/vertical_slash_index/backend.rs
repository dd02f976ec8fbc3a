//! [`vertical_slash_index`](super::vertical_slash_index) as a backend extension.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};

use super::VerticalSlashIndexOptions;

/// Columns or diagonals.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(all(feature = "fusion", feature = "_gpu")))]
pub(crate) struct BackendEntries<B: Backend> {
    /// i32 `[B, H, Nv]` or `[B, H, Ns]`.
    pub(super) values: IntTensor<B>,
    /// i32 `[H]`: how many of them each head uses.
    pub(super) counts: IntTensor<B>,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait VerticalSlashIndexBackend: Backend {
    /// [`vertical_slash_index`](super::vertical_slash_index): block_count, block_offset, column_count, column_index.
    #[fusion(meta = |_q_lens, _kv_lens, vertical, slash, options| {
        let [batch, heads, columns] = vertical.values.shape.dims();
        let blocks = slash.values.shape[2] * options.blocks_per_band();
        let count = crate::fusion::spec([batch, heads, options.rows()], vertical.values.dtype);
        let list = |len: usize| crate::fusion::spec([batch, heads, options.rows(), len], vertical.values.dtype);
        (count.clone(), list(blocks), count, list(columns))
    })]
    #[allow(clippy::type_complexity, reason = "four lists")]
    fn vertical_slash_index(
        q_lens: IntTensor<Self>,
        kv_lens: IntTensor<Self>,
        #[extension_type] vertical: BackendEntries<Self>,
        #[extension_type] slash: BackendEntries<Self>,
        options: VerticalSlashIndexOptions,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}
