//! What decides which implementation scores the keys.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use {
    burn::backend::cubecl::dtype_to_elem_type,
    cubecl::client::Client,
    mla_kernels::lightning_index::{LightningIndexSizes, available},
};

use crate::cache::RowFormat;
#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;

/// What decides which implementation of [`lightning_index`](crate::lightning_index()) scores the keys: see
/// [`explain_path`](crate::explain_path). The choice of the best has one; a query token that sees at most `k` keys is not scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LightningIndexProblem {
    /// Sequences (`B`).
    pub batch: usize,
    /// Query tokens of each (`Sq`).
    pub query_len: usize,
    /// Index heads (`Hi`).
    pub heads: usize,
    /// Channels of a head (`di`).
    pub width: usize,
    /// Tokens in a page of the keys (`S`).
    pub page_size: usize,
    /// Of queries, and of the numbers that keys are read as: f32, f16 or bf16.
    pub dtype: DType,
    /// How keys are stored: dense, or [`RowFormat::Fp8IndexKeys`].
    pub keys: RowFormat,
}

impl Sizes for LightningIndexProblem {
    fn words(&self) -> String {
        let Self { query_len, heads, width, page_size, dtype, keys, .. } = self;
        let tokens = if *query_len == 1 { "query token" } else { "query tokens" };
        let keys = if *keys == RowFormat::Dense { "" } else { "FP8 keys in " };
        format!("{dtype:?}, {query_len} {tokens}, {heads} index heads of width {width}, {keys}pages of {page_size}")
    }

    fn dtypes(&self) -> Vec<DType> {
        vec![self.dtype]
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let &Self { batch, query_len, heads, width, page_size, .. } = self;
        vec![vec![batch.max(1), query_len.max(1), heads.max(1), width.max(1)], vec![page_size.max(1), width.max(1)]]
    }

    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation> {
        let &Self { batch, query_len, heads, width, page_size, dtype, keys } = self;
        let (elem, rows) = (dtype_to_elem_type(dtype), keys.kernel(page_size, width));
        // The number of pages, and how many keys are chosen, decide nothing.
        let (pages, max_pages, k) = (1, 1, 1);
        let sizes = LightningIndexSizes { batch, query_len, heads, width, pages, page_size, max_pages, k, elem, rows };
        Implementation::of_kernels(available(client, &super::cube::in_tiles(client, sizes)))
    }
}
