use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::DeviceError;
use mla_kernels::compress_kv::{
    self as kernels, CompressKvArgs as KernelArgs, CompressKvError as KernelError, CompressKvSizes,
};

use super::backend::{BackendCompressor, BackendTokens, CompressKvBackend};
use super::{CompressKvArgs, CompressKvOptions};
use crate::MlaError;
use crate::check::Check;
use crate::tensors::{buffers, contiguous, dims, empty, launched};

impl CompressKvBackend for CubeBackend {
    fn compress_kv(tokens: BackendTokens<Self>, compressor: BackendCompressor<Self>) -> CubeTensor {
        let BackendTokens { kv_gates, state, state_rows, cu_seqlens, starts } = tokens;
        let BackendCompressor { position_bias, norm_weight, cos, sin, options } = compressor;
        let [kv_gates, state, position_bias, norm_weight, cos, sin] =
            [kv_gates, state, position_bias, norm_weight, cos, sin].map(contiguous);
        let [state_rows, cu_seqlens, starts] = [state_rows, cu_seqlens, starts].map(contiguous);
        let ([tokens, _], [blocks, _, _], [window, _]) = (dims(&kv_gates), dims(&state), dims(&position_bias));
        let ([batch, entries, pairs], [width]) = (dims(&cos), dims(&norm_weight));
        let CompressKvOptions { overlap, norm_eps, dtype } = options;
        let dtype = DType::from(dtype);
        let elem = dtype_to_elem_type(dtype);
        let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, elem };
        let entries = empty(&cos, [batch, entries, width], dtype);
        let args = buffers!(
            kv_gates, state, state_rows, cu_seqlens, starts, position_bias, norm_weight, cos, sin, entries => KernelArgs {
                kv_gates, state, state_rows, cu_seqlens, starts, position_bias, norm_weight, cos, sin, entries,
                sizes, norm_eps,
            }
        );
        launched(kernels::launch(&entries.client, args));
        entries
    }
}

/// The device pools these windows.
pub(super) fn check_limits(check: &Check, args: &CompressKvArgs, options: &CompressKvOptions) -> Result<(), MlaError> {
    let Some(client) = check.client() else { return Ok(()) };
    let ([tokens, _], [blocks, ..], [window, _]) = (args.kv_gates.dims(), args.state.dims(), args.position_bias.dims());
    let ([batch, entries, pairs], [width]) = (args.cos.dims(), args.norm_weight.dims());
    let dtype = DType::from(options.dtype);
    let (overlap, elem) = (options.overlap, dtype_to_elem_type(dtype));
    // What there are too many of to count has no room, either.
    check.allocation("cos", dtype, [batch, entries, width])?;
    let sizes = CompressKvSizes { tokens, batch, entries, blocks, window, width, pairs, overlap, elem };
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
