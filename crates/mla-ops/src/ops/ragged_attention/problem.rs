//! What decides which implementation of ragged attention runs.

use burn::tensor::DType;
#[cfg(feature = "_gpu")]
use {
    burn::backend::cubecl::dtype_to_elem_type,
    cubecl::client::Client,
    mla_kernels::ragged_attention::{RaggedAttentionSizes, available},
};

#[cfg(feature = "_gpu")]
use crate::path::problem::Implementation;
use crate::path::problem::Sizes;

/// What decides which implementation of [`ragged_attention`](crate::ragged_attention()) runs: see
/// [`explain_path`](crate::explain_path).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaggedAttentionProblem {
    /// Query heads (`H`).
    pub heads: usize,
    /// Heads of keys and values (`Hkv`).
    pub kv_heads: usize,
    /// Channels of query and key (dqk).
    pub key_width: usize,
    /// Channels of a value (dv).
    pub value_width: usize,
    /// The last channels of a key that all heads share (dr); 0 for none.
    pub shared_width: usize,
    /// Of queries, keys and values: f32, f16 or bf16.
    pub dtype: DType,
}

#[cfg(feature = "_gpu")]
impl RaggedAttentionProblem {
    /// With so many query tokens and key tokens in so many sequences.
    pub(super) fn sizes(&self, [tokens, keys, sequences]: [usize; 3]) -> RaggedAttentionSizes {
        let &Self { heads, kv_heads, key_width, value_width, shared_width, dtype } = self;
        let elem = dtype_to_elem_type(dtype);
        #[rustfmt::skip]
        let sizes = RaggedAttentionSizes {
            tokens, keys, heads, kv_heads, key_width, value_width, shared_width, sequences, elem,
        };
        sizes
    }
}

impl Sizes for RaggedAttentionProblem {
    fn words(&self) -> String {
        let Self { heads, kv_heads, key_width, value_width, shared_width, dtype } = self;
        let shared = if *shared_width > 0 { format!(" ({shared_width} shared)") } else { String::new() };
        format!("{dtype:?}, {heads} heads on {kv_heads} of keys, widths of {key_width}{shared} and {value_width}")
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
        // How many tokens and sequences there are decides nothing.
        Implementation::of_kernels(available(client, &self.sizes([1, 1, 1])))
    }
}
