use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::DeviceError;
use mla_kernels::compress_kv::{
    self as kernels, CompressKvArgs as KernelArgs, CompressKvError as KernelError, CompressKvSizes, EntryCache, Writes,
};

use super::backend::{
    BackendCompressed, BackendCompressor, BackendEntryCache, BackendStep, BackendTokens, BackendWrittenCache,
    CompressKvBackend,
};
use super::{CompressKvArgs, CompressKvOptions};
use crate::MlaError;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, empty, launched, own};

impl CompressKvBackend for CubeBackend {
    fn compress_kv(tokens: BackendTokens<Self>, compressor: BackendCompressor<Self>) -> CubeTensor {
        let BackendTokens { state, .. } = tokens;
        let tokens = BackendTokens { state: contiguous(state), ..tokens };
        let (args, entries) = pool_args(&tokens, None, compressor);
        launched(kernels::launch(&entries.client, args));
        entries
    }

    fn compress_and_write(step: BackendStep<Self>) -> BackendCompressed<Self> {
        let (args, compressed) = step_args(step);
        launched(kernels::launch(&compressed.entries.client, args));
        compressed
    }
}

/// What the kernel takes for a step, and what that will be.
pub(crate) fn step_args(step: BackendStep<CubeBackend>) -> (KernelArgs, BackendCompressed<CubeBackend>) {
    let BackendStep { tokens, state_slots, cache, compressor } = step;
    let BackendTokens { state, .. } = tokens;
    let tokens = BackendTokens { state: own(contiguous(state)), ..tokens };
    let (written, cache) = match cache {
        BackendEntryCache::None => (BackendWrittenCache::None, None),
        BackendEntryCache::Slots(cache, slots) => {
            let cache = own(contiguous(cache));
            let [pages, page_size, _] = dims(&cache);
            let (slots, rows) = (contiguous(slots).into_buffer_arg(), pages * page_size);
            let target = EntryCache { cache: cache.clone().into_buffer_arg(), slots, rows };
            (BackendWrittenCache::Cache(cache), Some(target))
        }
    };
    let writes = Writes { state_slots: contiguous(state_slots).into_buffer_arg(), cache };
    let (args, entries) = pool_args(&tokens, Some(writes), compressor);
    (args, BackendCompressed { entries, state: tokens.state, cache: written })
}

/// The same, and the entries; the state is as the kernel takes it.
fn pool_args(
    tokens: &BackendTokens<CubeBackend>,
    writes: Option<Writes>,
    compressor: BackendCompressor<CubeBackend>,
) -> (KernelArgs, CubeTensor) {
    let BackendCompressor { position_bias, norm_weight, cos, sin, options } = compressor;
    let [position_bias, norm_weight, cos, sin] = [position_bias, norm_weight, cos, sin].map(contiguous);
    let BackendTokens { kv_gates, state, state_rows, cu_seqlens, starts } = tokens;
    let [kv_gates, state_rows, cu_seqlens, starts] =
        [kv_gates, state_rows, cu_seqlens, starts].map(|tensor| contiguous(tensor.clone()));
    let ([tokens, _], [blocks, _, _], [window, _]) = (dims(&kv_gates), dims(state), dims(&position_bias));
    let ([batch, entries, pairs], [width]) = (dims(&cos), dims(&norm_weight));
    let CompressKvOptions { overlap, norm_eps, dtype } = options;
    let (dtype, gates_elem) = (DType::from(dtype), dtype_to_elem_type(kv_gates.dtype));
    let elem = dtype_to_elem_type(dtype);
    let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, gates_elem, elem };
    let entries = empty(&cos, [batch, entries, width], dtype);
    let args = buffers!(
        kv_gates, state, state_rows, cu_seqlens, starts, position_bias, norm_weight, cos, sin, entries => KernelArgs {
            kv_gates, state, state_rows, cu_seqlens, starts, position_bias, norm_weight, cos, sin, entries,
            writes, sizes, norm_eps,
        }
    );
    (args, entries)
}

/// The device pools these windows.
pub(super) fn check_limits(check: &Check, args: &CompressKvArgs, options: &CompressKvOptions) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([tokens, _], [blocks, ..], [window, _]) = (args.kv_gates.dims(), args.state.dims(), args.position_bias.dims());
    let ([batch, entries, pairs], [width]) = (args.cos.dims(), args.norm_weight.dims());
    let dtype = DType::from(options.dtype);
    let (overlap, elem) = (options.overlap, dtype_to_elem_type(dtype));
    let gates_elem = dtype_to_elem_type(args.kv_gates.dtype());
    // What there are too many of to count has no room, either.
    check.allocation("cos", dtype, [batch, entries, width])?;
    let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, gates_elem, elem };
    kernels::check(&client, &sizes).map_err(|error| {
        let argument = match &error {
            KernelError::Device(DeviceError::Elem(_)) => "dtype",
            KernelError::Device(_) => "norm_weight",
            KernelError::Offsets { name: "entries", .. } => "cos",
            KernelError::Offsets { name, .. } => *name,
        };
        check.device_limit(argument, error)
    })
}
