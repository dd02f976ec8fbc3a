use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::ragged_attention::{
    self as kernels, HeadRows, RaggedAttentionArgs as KernelArgs, RaggedAttentionError,
    RaggedAttentionOptions as KernelOptions,
};

use super::backend::{BackendKeys, RaggedAttentionBackend};
use super::{RaggedAttentionArgs, RaggedAttentionOptions, RaggedAttentionProblem};
use crate::MlaError;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, empty, launched};

impl RaggedAttentionBackend for CubeBackend {
    fn ragged_attention(
        q: CubeTensor,
        k: BackendKeys<Self>,
        v: CubeTensor,
        cu_seqlens: CubeTensor,
        cu_seqlens_k: CubeTensor,
        options: RaggedAttentionOptions,
    ) -> (CubeTensor, CubeTensor) {
        let ([tokens, heads, key_width], [keys, kv_heads, value_width]) = (dims(&q), dims(&v));
        let (k, k_pe) = match k {
            BackendKeys::Whole(k) => (k, None),
            BackendKeys::Shared(k, k_pe) => (k, Some(k_pe)),
        };
        let shared_width = k_pe.as_ref().map_or(0, |k_pe| dims::<2>(k_pe)[1]);
        let problem = RaggedAttentionProblem { heads, kv_heads, key_width, value_width, shared_width, dtype: q.dtype };
        let [cu_seqlens, cu_seqlens_k] = [cu_seqlens, cu_seqlens_k].map(contiguous);
        let [entries] = dims(&cu_seqlens);
        let out = empty(&q, [tokens, heads, value_width], q.dtype);
        let lse = empty(&q, [tokens, heads], DType::F32);
        let mut sizes = problem.sizes([tokens, keys, entries - 1]);
        let path = sizes.path(&q.client);
        let tiled = path != mla_kernels::Path::Plain;
        // Whole keys, where the kernel takes no others.
        let (k, k_pe) = match k_pe {
            Some(k_pe) if !tiled => (whole_keys(k, k_pe), None),
            k_pe => (k, k_pe),
        };
        if k_pe.is_none() {
            sizes.shared_width = 0;
        }
        let [q, k, v] = [q, k, v].map(|rows| head_rows(rows, tiled));
        let k_pe = k_pe.map(|k_pe| head_rows(k_pe, tiled));
        let RaggedAttentionOptions { softmax_scale, softcap, causal, window } = options;
        let options = KernelOptions { softmax_scale, softcap, causal, window };
        let args = buffers!(cu_seqlens, cu_seqlens_k, out, lse => KernelArgs {
            q, k, k_pe, v, cu_seqlens, cu_seqlens_k, out, lse, sizes, options,
        });
        launched(kernels::launch(&out.client, args, path));
        (out, lse)
    }
}

/// `[M, Hkv, dk]` and `[M, dr]` side by side, for each head.
fn whole_keys(k: CubeTensor, k_pe: CubeTensor) -> CubeTensor {
    let ([keys, kv_heads, _], [_, shared_width]) = (dims(&k), dims(&k_pe));
    let k_pe = CubeBackend::float_reshape(k_pe, Shape::new([keys, 1, shared_width]));
    let k_pe = CubeBackend::float_expand(k_pe, Shape::new([keys, kv_heads, shared_width]));
    CubeBackend::float_cat(vec![k, k_pe], 2)
}

/// A tensor `[tokens, heads, channels]`, or without heads, as the kernels take it: where it lies where tile loads can read that,
/// otherwise a copy.
fn head_rows(tensor: CubeTensor, tiled: bool) -> HeadRows {
    let tensor = if tiled && is_tileable(&tensor) { tensor } else { contiguous(tensor) };
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let (heads, width) = (if shape.len() == 3 { shape[1] } else { 1 }, shape[shape.len() - 1]);
    // Of a single token or head, and without elements, strides may be any.
    let (token_stride, head_stride) = match shape[0] {
        0 => (heads * width, width),
        tokens => {
            let token_stride = if tokens > 1 { strides[0] } else { heads * width };
            (token_stride, if heads > 1 { strides[1] } else { width })
        }
    };
    HeadRows { buffer: tensor.into_buffer_arg(), token_stride, head_stride }
}

/// Whether channels lie side by side, and all else is at multiples of 16 bytes.
fn is_tileable(tensor: &CubeTensor) -> bool {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let last = shape.len() - 1;
    let aligned = |stride: usize| stride >= shape[last] && (stride * tensor.dtype.size()).is_multiple_of(16);
    let rows = (0..last).all(|dim| shape[dim] <= 1 || aligned(strides[dim]));
    rows && strides[last] == 1 && tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// The device computes attention of these sizes.
pub(super) fn check_limits(check: &Check, args: &RaggedAttentionArgs) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([tokens, ..], [keys, _, value_width], [entries]) = (args.q.dims(), args.v.dims(), args.cu_seqlens.dims());
    let problem = args.problem();
    kernels::check(&client, &problem.sizes([tokens, keys, entries - 1])).map_err(|error| {
        let argument = match &error {
            RaggedAttentionError::Offsets(_) if value_width > problem.key_width => "v",
            RaggedAttentionError::Width { .. } if value_width == 0 => "v",
            _ => "q",
        };
        check.device_limit(argument, error)
    })
}
