//! What decides which implementation of a decode step runs.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use {
    burn::backend::cubecl::dtype_to_elem_type,
    cubecl::client::Client,
    mla_kernels::mla_decode::{DecodeSizes, available},
};

use crate::cache::RowFormat;
#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;

/// What decides which implementation of [`mla_decode`](crate::mla_decode()) runs: see [`explain_path`](crate::explain_path).
///
/// ```
/// use burn::tensor::{DType, Device};
/// use mla_ops::cache::RowFormat;
/// use mla_ops::{MlaDecodeProblem, Path, explain_path};
///
/// let problem = MlaDecodeProblem {
///     batch: 8, query_len: 1, heads: 128, key_width: 576, value_width: 512, page_size: 64, dtype: DType::BF16,
///     rows: RowFormat::Dense,
/// };
/// assert_eq!(explain_path(&problem, &Device::flex()).path, Path::Reference);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaDecodeProblem {
    /// Sequences (`B`).
    pub batch: usize,
    /// Query tokens of each (`Sq`).
    pub query_len: usize,
    /// Query heads (`H`).
    pub heads: usize,
    /// Channels of a cache row (`D`).
    pub key_width: usize,
    /// Channels of the value (`Dv`).
    pub value_width: usize,
    /// Tokens in a page (`S`).
    pub page_size: usize,
    /// Of query and cache: f32, f16 or bf16.
    pub dtype: DType,
    /// How the rows of the cache are stored.
    pub rows: RowFormat,
}

#[cfg(feature = "_gpu")]
impl MlaDecodeProblem {
    /// With a cache of `pages`, of which a sequence has `max_pages` at most, and a plan of `cubes` and `capacity` work items.
    pub(super) fn sizes(
        &self,
        [pages, max_pages]: [usize; 2],
        [cubes, capacity]: [usize; 2],
        causal: bool,
    ) -> DecodeSizes {
        let &Self { batch, query_len, heads, key_width, value_width, page_size, dtype, rows } = self;
        let (elem, rows) = (dtype_to_elem_type(dtype), rows.kernel(page_size, key_width));
        #[rustfmt::skip]
        let sizes = DecodeSizes {
            batch, query_len, heads, key_width, value_width, pages, page_size, max_pages, cubes, capacity, causal, elem, rows,
        };
        sizes
    }
}

impl Sizes for MlaDecodeProblem {
    fn words(&self) -> String {
        let Self { dtype, key_width, value_width, page_size, .. } = self;
        format!("{dtype:?}, widths of {key_width} and {value_width} and pages of {page_size}")
    }

    fn dtypes(&self) -> Vec<DType> {
        vec![self.dtype]
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let &Self { batch, query_len, heads, key_width, value_width, page_size, .. } = self;
        let tokens = [batch.max(1), query_len.max(1), heads.max(1)];
        let rows = |width: usize| tokens.into_iter().chain([width]).collect();
        vec![rows(key_width), rows(value_width), vec![page_size, key_width]]
    }

    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation> {
        // The sizes of cache and plan decide nothing.
        Implementation::of_kernels(available(client, &self.sizes([1, 1], [1, 1], true)))
    }
}
