//! [`kv_indices`]: page ids of a batch as a compressed sparse row list.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Int, Tensor};

use super::page_table::{BackendPagedBatch, PagedBatchArgs};
use crate::MlaError;
use crate::dispatch::tensors;

const OP: &str = "kv_indices";

/// What [`kv_indices`] gives, all i32.
#[derive(Debug, Clone)]
pub struct KvIndices {
    /// `[B + 1]`: the pages of sequence `b` are `indices[indptr[b] .. indptr[b + 1]]`. Counts what is needed even where
    /// the capacity is too small.
    pub indptr: Tensor<1, Int>,
    /// `[capacity]`: page ids, -1 in the tail. With page size 1 these are token slots.
    pub indices: Tensor<1, Int>,
    /// `[B]`: tokens in each sequence's last page, 0 for an empty sequence.
    pub last_page_len: Tensor<1, Int>,
    /// `[1]`: 0, or 1 if the capacity was too small; then `indices` has the leading part of the list.
    pub overflow: Tensor<1, Int>,
}

/// Page ids of all sequences, one after the other, at most `capacity` of them.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::{PagedBatchArgs, kv_indices};
///
/// let device = Device::flex();
/// // Pages of 2 tokens: request 0 has its tokens in the pages 3 and 1, request 1 in page 0.
/// let req_to_token = Tensor::<2, Int>::from_data([[6, 7, 2, 3], [0, 1, 0, 0]], (&device, DType::I32));
/// let (rows, lens) = (index_tensor(vec![1, 0], &device), index_tensor(vec![2, 3], &device));
/// let list = kv_indices(PagedBatchArgs::new(req_to_token, rows, lens, 2), 4)?;
/// assert_eq!(list.indptr.into_data(), TensorData::from([0, 1, 3]));
/// assert_eq!(list.indices.into_data(), TensorData::from([0, 3, 1, -1]));
/// assert_eq!(list.last_page_len.into_data(), TensorData::from([2, 1]));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, or a page size that is no power of two: nothing is launched. A capacity that is too
/// small shows in [`KvIndices::overflow`], since the lengths are known on the device only. So are the slots: one that is negative
/// or no page's first has page -1, and [`PagedBatchArgs::validate_device_inputs`] names it.
pub fn kv_indices(args: PagedBatchArgs, capacity: usize) -> Result<KvIndices, MlaError> {
    let check = args.check(OP)?;
    check.index_range("capacity", capacity)?;
    check.allocation("capacity", DType::I32, [capacity])?;
    if check.sees_values() {
        args.validate_values(OP)?;
    }
    let (indptr, indices, last_page_len, overflow) =
        tensors(<Dispatch as KvIndicesBackend>::kv_indices(args.into_backend(), capacity));
    Ok(KvIndices { indptr, indices, last_page_len, overflow })
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait KvIndicesBackend: Backend {
    /// [`kv_indices`]: indptr, indices, last_page_len, overflow.
    #[fusion(meta = |batch, capacity| {
        let sequences = batch.req_rows.shape[0];
        let list = |len: usize| crate::fusion::spec([len], DType::I32);
        (list(sequences + 1), list(*capacity), list(sequences), list(1))
    })]
    #[allow(clippy::type_complexity, reason = "four lists")]
    fn kv_indices(
        #[extension_type] batch: BackendPagedBatch<Self>,
        capacity: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "_gpu")]
mod cube {
    use burn::tensor::DType;
    use burn_cubecl::{CubeBackend, tensor::CubeTensor};
    use mla_kernels::kv_indices::{KvIndicesOut, launch_kv_indices};

    use super::{BackendPagedBatch, KvIndicesBackend};
    use crate::tensors::{buffers, dims, empty};

    impl KvIndicesBackend for CubeBackend {
        fn kv_indices(
            batch: BackendPagedBatch<Self>,
            capacity: usize,
        ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
            let [sequences] = dims(&batch.req_rows);
            let list = |len: usize| empty(&batch.req_rows, [len], DType::I32);
            let [indptr, indices, last_page_len, overflow] = [sequences + 1, capacity, sequences, 1].map(list);
            let out = buffers!(indptr, indices, last_page_len, overflow => KvIndicesOut {
                indptr, indices, last_page_len, overflow, capacity,
            });
            launch_kv_indices(&indptr.client, batch.into_buffers(), out);
            (indptr, indices, last_page_len, overflow)
        }
    }
}

#[cfg(feature = "flex")]
mod reference {
    use burn::backend::{Flex, tensor::IntTensor};
    use burn::tensor::{Int, Tensor};

    use super::{BackendPagedBatch, KvIndices, KvIndicesBackend};
    use crate::reference::{IntoFlex, device_i32, host, tensor};

    impl KvIndicesBackend for Flex {
        fn kv_indices(
            batch: BackendPagedBatch<Self>,
            capacity: usize,
        ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
            let KvIndices { indptr, indices, last_page_len, overflow } = kv_indices(batch, capacity);
            (indptr, indices, last_page_len, overflow).into_flex()
        }
    }

    fn kv_indices(batch: BackendPagedBatch<Flex>, capacity: usize) -> KvIndices {
        let BackendPagedBatch { req_to_token, req_rows, seq_lens, kv_start, page_size } = batch;
        let (req_to_token, req_rows): (Tensor<2, Int>, Tensor<1, Int>) = (tensor(req_to_token), tensor(req_rows));
        let ([_, tokens], [batch], device) = (req_to_token.dims(), req_rows.dims(), req_to_token.device());
        let (rows, lens, starts) = (host(req_rows), host::<1>(tensor(seq_lens)), host::<1>(tensor(kv_start)));
        let map = host(req_to_token);

        let mut indptr = vec![0];
        let mut indices = Vec::with_capacity(capacity);
        let mut last_page_len = Vec::with_capacity(batch);
        for ((&row, &len), &start) in rows.iter().zip(&lens).zip(&starts) {
            let len = len.max(0) as usize;
            let pages = len.div_ceil(page_size);
            // A token outside the map, from an unchecked row or length, has no page.
            let first_slot = |page: usize| map.get(row as usize * tokens + start as usize + page * page_size);
            let room = capacity - indices.len();
            let is_first = |slot: &i32| usize::try_from(*slot).is_ok_and(|slot| slot % page_size == 0);
            let page_id =
                |page: usize| first_slot(page).filter(|slot| is_first(slot)).map_or(-1, |slot| slot / page_size as i32);
            indices.extend((0..pages.min(room)).map(page_id));
            indptr.push(indptr[indptr.len() - 1] + pages as i32);
            last_page_len.push(if len == 0 { 0 } else { ((len - 1) % page_size + 1) as i32 });
        }
        let overflow = i32::from(indptr[batch] as usize > capacity);
        indices.resize(capacity, -1);
        KvIndices {
            indptr: device_i32(indptr, [batch + 1], &device),
            indices: device_i32(indices, [capacity], &device),
            last_page_len: device_i32(last_page_len, [batch], &device),
            overflow: device_i32(vec![overflow], [1], &device),
        }
    }
}
