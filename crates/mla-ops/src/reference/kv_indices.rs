use burn::tensor::{Int, Tensor};

use super::{device_i32, host};
use crate::backend::KvIndicesSpec;

/// indptr `[B + 1]`, indices `[capacity]`, last_page_len `[B]`, overflow `[1]`.
pub(crate) fn kv_indices(
    req_to_token: Tensor<2, Int>,
    req_rows: Tensor<1, Int>,
    seq_lens: Tensor<1, Int>,
    kv_start: Tensor<1, Int>,
    spec: &KvIndicesSpec,
) -> [Tensor<1, Int>; 4] {
    let device = req_to_token.device();
    let [_, tokens] = req_to_token.dims();
    let [batch] = req_rows.dims();
    let (rows, lens, starts) = (host(req_rows), host(seq_lens), host(kv_start));
    let map = host(req_to_token);

    let mut indptr = vec![0];
    let mut indices = Vec::with_capacity(spec.capacity);
    let mut last_page_len = Vec::with_capacity(batch);
    for ((&row, &len), &start) in rows.iter().zip(&lens).zip(&starts) {
        let (len, page_size) = (len.max(0) as usize, spec.page_size);
        let pages = len.div_ceil(page_size);
        // A token outside the map, from a row or length that nobody checked, has no page.
        let first_slot = |page: usize| map.get(row as usize * tokens + start as usize + page * page_size);
        let room = spec.capacity - indices.len();
        let page_id = |page: usize| first_slot(page).map_or(-1, |slot| slot / page_size as i32);
        indices.extend((0..pages.min(room)).map(page_id));
        indptr.push(indptr[indptr.len() - 1] + pages as i32);
        last_page_len.push(if len == 0 { 0 } else { ((len - 1) % page_size + 1) as i32 });
    }
    let overflow = i32::from(indptr[batch] as usize > spec.capacity);
    indices.resize(spec.capacity, -1);
    [
        device_i32(indptr, [batch + 1], &device),
        device_i32(indices, [spec.capacity], &device),
        device_i32(last_page_len, [batch], &device),
        device_i32(vec![overflow], [1], &device),
    ]
}
