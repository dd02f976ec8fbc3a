use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Tensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::ragged_attention::{self as kernels, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionSizes};

use super::RaggedAttentionOptions;
use super::backend::RaggedAttentionBackend;
use crate::MlaError;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, elem, empty, launched};

impl RaggedAttentionBackend for CubeBackend {
    fn ragged_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        cu_seqlens: CubeTensor,
        options: RaggedAttentionOptions,
    ) -> (CubeTensor, CubeTensor) {
        let [q, k, v, cu_seqlens] = [q, k, v, cu_seqlens].map(contiguous);
        let ([tokens, heads, key_width], [_, _, value_width]) = (dims(&q), dims(&v));
        let ([entries], elem) = (dims(&cu_seqlens), elem(&q));
        let out = empty(&q, [tokens, heads, value_width], q.dtype);
        let lse = empty(&q, [tokens, heads], DType::F32);
        let RaggedAttentionOptions { softmax_scale, causal } = options;
        let sequences = entries - 1;
        let args = buffers!(q, k, v, cu_seqlens, out, lse => RaggedAttentionArgs {
            q, k, v, cu_seqlens, out, lse, tokens, heads, key_width, value_width, sequences, softmax_scale, causal, elem,
        });
        launched(kernels::launch(&q.client, args));
        (out, lse)
    }
}

/// The device computes attention of these sizes.
pub(super) fn check_limits(check: &Check, q: &Tensor<3>, value_width: usize, sequences: usize) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let [tokens, heads, key_width] = q.dims();
    let elem = dtype_to_elem_type(q.dtype());
    let sizes = RaggedAttentionSizes { tokens, heads, key_width, value_width, sequences, elem };
    kernels::check(&client, &sizes).map_err(|error| {
        let argument = match &error {
            RaggedAttentionError::Offsets(_) if value_width > key_width => "v",
            RaggedAttentionError::Width { .. } if value_width == 0 => "v",
            _ => "q",
        };
        check.device_limit(argument, error)
    })
}
