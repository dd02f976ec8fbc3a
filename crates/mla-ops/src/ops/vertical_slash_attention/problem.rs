//! What decides which implementation of vertical-slash attention runs.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use {
    burn::backend::cubecl::dtype_to_elem_type,
    cubecl::client::Client,
    mla_kernels::vertical_slash_attention::{Layout, VerticalSlashSizes, available},
};

#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;

/// What decides which implementation of [`vertical_slash_attention`](crate::vertical_slash_attention()) and
/// [`packed_vertical_slash_attention`](crate::packed_vertical_slash_attention) runs: see [`explain_path`](crate::explain_path).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerticalSlashAttentionProblem {
    /// Query heads (`H`).
    pub heads: usize,
    /// Heads of keys and values (`Hkv`).
    pub kv_heads: usize,
    /// Channels of query and key (d).
    pub key_width: usize,
    /// Channels of a value (dv).
    pub value_width: usize,
    /// Of queries, keys and values: f32, f16 or bf16.
    pub dtype: DType,
}

impl Sizes for VerticalSlashAttentionProblem {
    fn words(&self) -> String {
        let Self { heads, kv_heads, key_width, value_width, dtype } = self;
        format!("{dtype:?}, {heads} heads on {kv_heads} of keys, widths of {key_width} and {value_width}")
    }

    fn dtypes(&self) -> Vec<DType> {
        vec![self.dtype]
    }

    fn shapes(&self) -> Vec<Vec<usize>> {
        let &Self { heads, kv_heads, key_width, value_width, .. } = self;
        vec![vec![heads, key_width], vec![kv_heads, key_width], vec![heads, value_width]]
    }

    #[cfg(feature = "_gpu")]
    fn on_gpu(&self, client: &Client) -> Vec<Implementation> {
        let &Self { heads, kv_heads, key_width, value_width, dtype } = self;
        // How many tokens, sequences and keys of a block row there are decides nothing.
        let sizes = VerticalSlashSizes {
            layout: Layout::Packed,
            batch: 1,
            query_tokens: 1,
            key_tokens: 1,
            heads,
            kv_heads,
            key_width,
            value_width,
            rows: 1,
            max_blocks: 1,
            max_columns: 1,
            block_size_m: 1,
            block_size_n: 1,
            elem: dtype_to_elem_type(dtype),
        };
        Implementation::of_kernels(available(client, &sizes))
    }
}
