use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::vertical_slash_attention::{AttentionArgs, Layout, VerticalSlashOptions, VerticalSlashSizes, launch};

use super::backend::{AttentionSpec, BackendKeyLists, VerticalSlashAttentionBackend};
use crate::tensors::{buffers, contiguous, dims, elem, empty, launched};

impl VerticalSlashAttentionBackend for CubeBackend {
    fn vertical_slash_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        q_bounds: CubeTensor,
        kv_bounds: CubeTensor,
        lists: BackendKeyLists<Self>,
        spec: AttentionSpec,
    ) -> (CubeTensor, CubeTensor) {
        let BackendKeyLists { block_count, block_offset, column_count, column_index } = lists;
        let [q, k, v, q_bounds, kv_bounds] = [q, k, v, q_bounds, kv_bounds].map(contiguous);
        let [block_count, block_offset] = [block_count, block_offset].map(contiguous);
        let [column_count, column_index] = [column_count, column_index].map(contiguous);
        let ([query_tokens, heads, key_width], [key_tokens, kv_heads, value_width]) = (dims(&q), dims(&v));
        let ([batch, _, rows, max_blocks], [_, _, _, max_columns]) = (dims(&block_offset), dims(&column_index));
        let out = empty(&q, [query_tokens, heads, value_width], q.dtype);
        let lse = empty(&q, [query_tokens, heads], DType::F32);
        let AttentionSpec { strides, block_size_m, block_size_n, softmax_scale, softcap, causal } = spec;
        let (elem, layout) = (
            elem(&q),
            match strides {
                Some([query_stride, key_stride]) => Layout::Padded { query_stride, key_stride },
                None => Layout::Packed,
            },
        );
        #[rustfmt::skip]
        let sizes = VerticalSlashSizes {
            layout, batch, query_tokens, key_tokens, heads, kv_heads, key_width, value_width, rows, max_blocks, max_columns,
            block_size_m, block_size_n, elem,
        };
        let options = VerticalSlashOptions { softmax_scale, softcap, causal };
        let args = buffers!(
            q, k, v, q_bounds, kv_bounds, block_count, block_offset, column_count, column_index, out, lse => AttentionArgs {
                q, k, v, q_bounds, kv_bounds, block_count, block_offset, column_count, column_index, out, lse, sizes, options,
            }
        );
        launched(launch(&q.client, args, sizes.path(&q.client)));
        (out, lse)
    }
}
