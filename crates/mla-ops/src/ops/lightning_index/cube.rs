use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, cubecl::client::Client, tensor::CubeTensor};
use mla_kernels::cache_rows::RowFormat;
use mla_kernels::lightning_index::{
    self as kernels, LightningIndexArgs as KernelArgs, LightningIndexError, LightningIndexSizes,
};

use super::backend::LightningIndexBackend;
use super::{IndexForm, LightningIndexArgs, LightningIndexOptions, scratch_bytes};
use crate::MlaError;
use crate::cache::BackendPool;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, elem, empty, launched};

impl LightningIndexBackend for CubeBackend {
    fn lightning_index(
        q: CubeTensor,
        keys: BackendPool<Self>,
        page_table: CubeTensor,
        head_weights: CubeTensor,
        visible: CubeTensor,
        options: LightningIndexOptions,
    ) -> CubeTensor {
        let [q, page_table, head_weights, visible] = [q, page_table, head_weights, visible].map(contiguous);
        let keys = keys.map(contiguous);
        let ([batch, query_len, heads, width], elem) = (dims(&q), elem(&q));
        let ([pages, page_size, _], [_, max_pages], rows) = (keys.dims(), dims(&page_table), keys.format());
        let LightningIndexOptions { k, scale, form } = options;
        let sizes = LightningIndexSizes { batch, query_len, heads, width, pages, page_size, max_pages, k, elem, rows };
        let sizes = in_tiles(&q.client, sizes);
        let keys = if sizes.rows == RowFormat::Dense { keys.dense() } else { keys };
        let score_rows = sizes.score_rows(&q.client);
        let scores = empty(&q, [score_rows, sizes.score_stride()], DType::U32);
        let candidates = empty(&q, [score_rows, sizes.candidate_stride(&q.client)], DType::U32);
        let indices = empty(&q, [batch, query_len, k], DType::I32);
        let (slots, weights_elem) = (form == IndexForm::Slots, dtype_to_elem_type(head_weights.dtype));
        let keys = keys.arg();
        let args = buffers!(q, page_table, head_weights, visible, scores, candidates, indices => KernelArgs {
            q, keys, page_table, head_weights, visible, scores, candidates, score_rows, indices, sizes, weights_elem, scale, slots,
        });
        launched(kernels::launch(&q.client, args));
        indices
    }
}

/// The sizes that the kernels are given: with dense keys where query tokens are so many that these are read by tiles. FP8 keys are dequantised
/// then, all of the pool, which takes less time than to score them a token at a time. Larger pools than the scratch may be are scored so all
/// the same, which `explain_path` does not see: its problem has no number of pages.
pub(super) fn in_tiles(client: &Client, sizes: LightningIndexSizes) -> LightningIndexSizes {
    let dense = LightningIndexSizes { rows: RowFormat::Dense, ..sizes };
    let pays = scratch_bytes([sizes.pages, sizes.page_size, sizes.width], sizes.elem.size()).is_some()
        && kernels::available(client, &dense).first().is_some_and(|first| first.path == mla_kernels::Path::Sm90);
    if pays { dense } else { sizes }
}

/// The device chooses `k` keys for each of these query tokens.
pub(super) fn check_limits(check: &Check, args: &LightningIndexArgs, k: usize) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([batch, query_len, heads, width], [pages, page_size, _]) = (args.q.dims(), args.keys.dims());
    let [_, max_pages] = args.page_table.dims();
    let (elem, rows) = (dtype_to_elem_type(args.q.dtype()), args.keys.format().kernel(page_size, width));
    let sizes = LightningIndexSizes { batch, query_len, heads, width, pages, page_size, max_pages, k, elem, rows };
    kernels::check(&client, &in_tiles(&client, sizes)).map_err(|error| {
        let argument = match &error {
            LightningIndexError::Device(_) | LightningIndexError::NoKernel(_) => "q",
            LightningIndexError::Scores { .. } => "page_table",
            LightningIndexError::Slots(_) | LightningIndexError::Rows(_) => "keys",
            LightningIndexError::Offsets { name, .. } => *name,
        };
        check.device_limit(argument, error)
    })?;
    check.allocation("k", DType::I32, [batch, query_len, k])
}
