use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::vertical_slash_index::{IndexArgs, launch};

use super::VerticalSlashIndexOptions;
use super::backend::{BackendEntries, VerticalSlashIndexBackend};
use crate::tensors::{buffers, contiguous, dims, empty};

impl VerticalSlashIndexBackend for CubeBackend {
    fn vertical_slash_index(
        q_lens: CubeTensor,
        kv_lens: CubeTensor,
        vertical: BackendEntries<Self>,
        slash: BackendEntries<Self>,
        options: VerticalSlashIndexOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let BackendEntries { values: vertical, counts: vertical_counts } = vertical;
        let BackendEntries { values: slash, counts: slash_counts } = slash;
        let [q_lens, kv_lens, vertical, slash] = [q_lens, kv_lens, vertical, slash].map(contiguous);
        let [vertical_counts, slash_counts] = [vertical_counts, slash_counts].map(contiguous);
        let ([batch, heads, verticals], [_, _, slashes]) = (dims(&vertical), dims(&slash));
        let count = || empty(&vertical, [batch, heads, options.rows()], DType::I32);
        let list = |len: usize| empty(&vertical, [batch, heads, options.rows(), len], DType::I32);
        let (block_count, column_count) = (count(), count());
        let (block_offset, column_index) = (list(slashes * options.blocks_per_band()), list(verticals));
        let [sorted_vertical, sorted_slash] = [&vertical, &slash].map(|it| empty(it, dims::<3>(it), DType::I32));
        let VerticalSlashIndexOptions { max_query_len, block_size_m, block_size_n, causal } = options;
        let args = buffers!(
            q_lens, kv_lens, vertical, slash, vertical_counts, slash_counts, sorted_vertical, sorted_slash,
            block_count, block_offset, column_count, column_index => IndexArgs {
                q_lens, kv_lens, vertical, slash, vertical_counts, slash_counts, sorted_vertical, sorted_slash,
                block_count, block_offset, column_count, column_index,
                batch, heads, verticals, slashes, max_query_len, block_size_m, block_size_n, causal,
            }
        );
        launch(&vertical.client, args);
        (block_count, block_offset, column_count, column_index)
    }
}
