use burn::tensor::{DType, Int, Tensor};

use super::device_i32;
use crate::backend::PageTableSpec;

/// Page ids i32 `[B, max_pages]`, -1 from a sequence's end on.
pub(crate) fn page_table(
    req_to_token: Tensor<2, Int>,
    req_rows: Tensor<1, Int>,
    seq_lens: Tensor<1, Int>,
    kv_start: Tensor<1, Int>,
    spec: &PageTableSpec,
) -> Tensor<2, Int> {
    let [_, tokens] = req_to_token.dims();
    let [batch] = req_rows.dims();
    let device = req_to_token.device();
    let shape = [batch, spec.max_pages];
    if batch == 0 || tokens == 0 || spec.max_pages == 0 {
        return Tensor::full(shape, -1, (&device, DType::I32));
    }
    // No sequence is longer than the map, so that a later token counts as the one behind its end.
    let firsts = (0..spec.max_pages).map(|page| (page * spec.page_size).min(tokens) as i32).collect();
    let firsts = device_i32(firsts, [1, spec.max_pages], &device).expand(shape);
    let past_end = firsts.clone().greater_equal(seq_lens.unsqueeze_dim::<2>(1).expand(shape));
    let columns = firsts + kv_start.unsqueeze_dim::<2>(1).expand(shape);
    // Columns past the end of the map belong to pages past the end of the sequence, which the mask replaces.
    let slots = req_to_token.select(0, req_rows).gather(1, columns.clamp_max(tokens as i32 - 1));
    (slots / spec.page_size as i32).mask_fill(past_end, -1)
}
