use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::mla_decode::{self as kernels, DecodeArgs, DecodeError, DecodeKernel, DecodeSizes};

use super::backend::{BackendDecode, MlaDecodeBackend};
use super::{MlaDecodeOptions, MlaDecodeProblem};
use crate::cache::BackendPool;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, elem, empty, evenly_spaced, launched, row_stride};
use crate::{MlaError, Path};

impl MlaDecodeBackend for CubeBackend {
    fn mla_decode(step: BackendDecode<Self>) -> (CubeTensor, CubeTensor) {
        let Launch { args, kernel, out, lse } = Launch::new(step);
        launched(kernels::launch_kernel(&out.client, args, kernel));
        (out, lse)
    }
}

/// A decode step, and what it writes.
pub(in crate::ops) struct Launch {
    pub(in crate::ops) args: DecodeArgs,
    pub(in crate::ops) kernel: DecodeKernel,
    pub(in crate::ops) out: CubeTensor,
    lse: CubeTensor,
}

impl Launch {
    pub(in crate::ops) fn new(step: BackendDecode<CubeBackend>) -> Self {
        let BackendDecode { q, kv_cache, page_table, seq_lens, items, cube_ptr, split_ptr, spec } = step;
        let [page_table, seq_lens] = [page_table, seq_lens].map(contiguous);
        let ([batch, query_len, heads, key_width], [pages, page_size, _]) = (dims(&q), kv_cache.dims());
        let ([_, max_pages], [capacity, _], [cubes_and_one]) = (dims(&page_table), dims(&items), dims(&cube_ptr));
        let (rows, value_width, cubes, elem) = (query_len * heads, spec.value_width, cubes_and_one - 1, elem(&q));
        let (causal, softmax_scale, rows_of_cache) = (spec.causal, spec.softmax_scale, kv_cache.format());
        let out = empty(&q, [batch, query_len, heads, value_width], q.dtype);
        let lse = empty(&q, [batch, query_len, heads], DType::F32);
        #[rustfmt::skip]
        let sizes = DecodeSizes {
            batch, query_len, heads, key_width, value_width, pages, page_size, max_pages, cubes, capacity, causal, elem,
            rows: rows_of_cache,
        };
        let kernel = spec.path.and_then(Path::kernel).unwrap_or_else(|| sizes.kernel(&q.client));
        // Of a plan with an item for each sequence nothing is partial, where the kernel writes whole sequences itself: a prompt would
        // need several GB.
        let whole = kernel.writes_whole() && capacity <= batch;
        let partial = if whole { [1, 1] } else { [capacity, rows] };
        let partial_out = empty(&q, [partial[0], partial[1], value_width], DType::F32);
        let partial_lse = empty(&q, partial, DType::F32);
        let is_fp8 = matches!(kv_cache, BackendPool::Fp8(..));
        let in_memory = |rows| if kernel.takes_strides() && !is_fp8 { evenly_spaced(rows) } else { contiguous(rows) };
        let (q, kv_cache) = (in_memory(q), kv_cache.map(in_memory));
        let q_stride = row_stride(&q).unwrap_or(key_width);
        let kv_stride = match &kv_cache {
            BackendPool::Dense(rows) => row_stride(rows).unwrap_or(key_width),
            BackendPool::Fp8(..) => key_width,
        };
        let kv_cache = kv_cache.arg();
        let args = buffers!(
            q, page_table, seq_lens, items, cube_ptr, split_ptr, partial_out, partial_lse, out, lse => DecodeArgs {
                q, kv_cache, page_table, seq_lens, items, cube_ptr, split_ptr, partial_out, partial_lse, out, lse,
                q_stride, kv_stride, sizes, softmax_scale,
            }
        );
        Self { args, kernel, out, lse }
    }
}

/// The device decodes this, with a cache of so many pages, a page table of so many columns, and a plan of these cubes and work
/// items.
pub(super) fn check_limits(
    check: &Check,
    problem: &MlaDecodeProblem,
    tables: [usize; 2],
    [cubes, capacity]: [usize; 2],
    options: &MlaDecodeOptions,
) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let sizes = problem.sizes(tables, [cubes, capacity], options.causal);
    let DecodeSizes { batch, query_len, heads, key_width, value_width, max_pages, .. } = sizes;
    let kernel = options.path.and_then(Path::kernel).unwrap_or_else(|| sizes.kernel(&client));
    kernels::check_kernel(&client, &sizes, kernel).map_err(|error| {
        let argument = match &error {
            DecodeError::NoKernel(_) => "path",
            DecodeError::Element(_) => "q",
            DecodeError::Size { name: "tiles of query rows", .. } => "q",
            DecodeError::Size { name: "cubes", .. } => "plan",
            DecodeError::Address(len) if *len == capacity * query_len * heads * value_width => "splits",
            DecodeError::Address(len) if *len == batch * query_len * heads * key_width => "q",
            DecodeError::Address(len) if *len == batch * max_pages => "page_table",
            DecodeError::SharedMemory { .. } | DecodeError::Size { .. } | DecodeError::Address(_) => "kv_cache",
        };
        check.device_limit(argument, error)
    })?;
    // What the items give before they are merged, in f32.
    check.allocation("splits", DType::F32, [capacity, query_len, heads, value_width])
}
