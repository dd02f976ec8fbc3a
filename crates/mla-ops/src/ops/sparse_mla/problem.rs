//! What decides which implementation of sparse attention runs.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use {
    burn::backend::cubecl::dtype_to_elem_type,
    cubecl::client::Client,
    mla_kernels::sparse_mla::{SparseMlaSizes, available},
};

use crate::MlaDecodeProblem;
use crate::cache::RowFormat;
use crate::check::Check;
#[cfg(feature = "flex")]
use crate::independent::is_flex;
#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;

/// What decides which implementation of [`sparse_mla`](crate::sparse_mla()) runs, for each of its scopes: see
/// [`explain_path`](crate::explain_path).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseMlaProblem {
    /// Sequences (`B`).
    pub batch: usize,
    /// Query tokens of each (`Sq`).
    pub query_len: usize,
    /// Query heads (`H`).
    pub heads: usize,
    /// Channels of a row (`D`).
    pub key_width: usize,
    /// Channels of the value (`Dv`).
    pub value_width: usize,
    /// Of query and rows: f32, f16 or bf16.
    pub dtype: DType,
    /// How the rows are stored.
    pub rows: RowFormat,
    /// How those of a second scope are stored, if there is one.
    pub second_rows: Option<RowFormat>,
}

impl SparseMlaProblem {
    /// Whether the call's device has an implementation for it that is none of decode steps.
    pub(super) fn has_own_kernel(&self, check: &Check) -> bool {
        #[cfg(feature = "flex")]
        if is_flex(check.device()) {
            return true;
        }
        #[cfg(feature = "_gpu")]
        if let Some(client) = check.client() {
            return !available(&client, &self.sizes()).is_empty();
        }
        false
    }

    #[cfg(feature = "_gpu")]
    fn sizes(&self) -> SparseMlaSizes {
        let &Self { batch, query_len, heads, key_width, value_width, dtype, rows, second_rows } = self;
        let (tokens, elem) = (batch.saturating_mul(query_len), dtype_to_elem_type(dtype));
        let kernel = |rows: RowFormat| rows.kernel(1, key_width);
        let (rows, second_rows) = (kernel(rows), second_rows.map(kernel));
        SparseMlaSizes { tokens, heads, key_width, value_width, elem, rows, second_rows }
    }

    /// The decode step that it is on other GPUs: each query token is a sequence, with pages of one row.
    pub(super) fn as_decode(&self) -> MlaDecodeProblem {
        let &Self { batch, query_len, heads, key_width, value_width, dtype, rows, .. } = self;
        let batch = batch.saturating_mul(query_len);
        MlaDecodeProblem { batch, query_len: 1, heads, key_width, value_width, page_size: 1, dtype, rows }
    }
}

impl Sizes for SparseMlaProblem {
    fn words(&self) -> String {
        let Self { dtype, key_width, value_width, .. } = self;
        format!("{dtype:?}, widths of {key_width} and {value_width} and rows that are named one by one")
    }

    fn dtypes(&self) -> Vec<DType> {
        vec![self.dtype]
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        self.as_decode().shapes()
    }

    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation> {
        let mut implementations = Implementation::of_kernels(available(client, &self.sizes()));
        implementations.extend(self.as_decode().on_gpu(client));
        implementations
    }
}
