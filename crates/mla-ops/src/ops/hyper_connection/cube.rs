//! Hyper-connections by kernels.

use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::hyper_connection::{
    BlockArgs, MixArgs, PostArgs, PreArgs, Products, ProjectArgs, Sizes, launch_post, launch_pre, launch_project,
    slices,
};
use mla_kernels::residual_norm::Summand;

use super::MhcOptions;
use super::backend::{BackendMixer, BackendMixerProducts, BackendMixing, BackendStreams, HyperConnectionBackend};
use crate::tensors::{buffers, contiguous, dims, elem, empty};

fn sizes(streams: &CubeTensor) -> Sizes {
    let [tokens, n, width] = dims(streams);
    Sizes { tokens, streams: n, width, elem: elem(streams) }
}

impl HyperConnectionBackend for CubeBackend {
    fn mhc_project(streams: BackendStreams<Self>, weight: CubeTensor) -> (CubeTensor, CubeTensor) {
        match streams {
            BackendStreams::InMemory(streams) => {
                let streams = contiguous(streams);
                let parts = project(&streams, None, weight);
                (streams, parts)
            }
            BackendStreams::Mixed(output, mixing) => {
                project_mixed(Summand::Rows(contiguous(output).into_buffer_arg()), mixing, weight)
            }
        }
    }

    fn mhc_pre(
        streams: CubeTensor,
        products: BackendMixerProducts<Self>,
        norm_weight: CubeTensor,
        mixer: BackendMixer<Self>,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let Sizes { tokens, streams: n, .. } = sizes(&streams);
        let (norm_weight, iterations) = (contiguous(norm_weight), mixer.options.sinkhorn_iters);
        let post = empty(&streams, [tokens, n], DType::F32);
        let comb = empty(&streams, [tokens, n, n], DType::F32);
        let block = buffers!(norm_weight, post, comb => BlockArgs { norm_weight, post, comb, iterations });
        (sum(streams, products, mixer, Some(block)), post, comb)
    }

    fn mhc_head(streams: CubeTensor, products: BackendMixerProducts<Self>, mixer: BackendMixer<Self>) -> CubeTensor {
        sum(streams, products, mixer, None)
    }

    fn mhc_post(output: CubeTensor, mixing: BackendMixing<Self>) -> CubeTensor {
        let BackendMixing { streams, post, comb } = mixing;
        let [streams, output, post, comb] = [streams, output, post, comb].map(contiguous);
        let sizes = sizes(&streams);
        let mixed = empty(&streams, [sizes.tokens, sizes.streams, sizes.width], streams.dtype);
        let args =
            buffers!(streams, output, post, comb, mixed => PostArgs { streams, output, post, comb, mixed, sizes });
        launch_post(&mixed.client, args);
        mixed
    }
}

/// The streams after a block, and their products in parts.
pub(crate) fn project_mixed(
    output: Summand,
    mixing: BackendMixing<CubeBackend>,
    weight: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let BackendMixing { streams, post, comb } = mixing;
    let [streams, post, comb] = [streams, post, comb].map(contiguous);
    let mixed = empty(&streams, dims::<3>(&streams), streams.dtype);
    let mix = buffers!(post, comb, mixed => MixArgs { output, post, comb, mixed });
    let parts = project(&streams, Some(mix), weight);
    (mixed, parts)
}

/// Products in parts of contiguous streams, after something is mixed into them.
fn project(streams: &CubeTensor, mix: Option<MixArgs>, weight: CubeTensor) -> CubeTensor {
    let (weight, sizes) = (contiguous(weight), sizes(streams));
    let [rows, _] = dims(&weight);
    let parts = empty(streams, [sizes.tokens, slices(sizes.width), rows + 1], DType::F32);
    let args = buffers!(streams, weight, parts => ProjectArgs { streams, mix, weight, parts, rows, sizes });
    launch_project(&parts.client, args);
    parts
}

/// The sum of the streams, before a block or behind the last one.
fn sum(
    streams: CubeTensor,
    products: BackendMixerProducts<CubeBackend>,
    mixer: BackendMixer<CubeBackend>,
    block: Option<BlockArgs>,
) -> CubeTensor {
    let BackendMixer { scale, base, options } = mixer;
    let products = match products {
        BackendMixerProducts::Whole(products) => Products::Whole(contiguous(products).into_buffer_arg()),
        BackendMixerProducts::InParts(parts) => Products::InParts(contiguous(parts).into_buffer_arg()),
    };
    let [streams, scale, base] = [streams, scale, base].map(contiguous);
    let (sizes, MhcOptions { norm_eps, eps, .. }) = (sizes(&streams), options);
    let input = empty(&streams, [sizes.tokens, sizes.width], streams.dtype);
    let args = buffers!(streams, scale, base, input => PreArgs {
        streams, products, scale, base, input, block, sizes, norm_eps, eps,
    });
    launch_pre(&input.client, args);
    input
}
