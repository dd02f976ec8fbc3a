//! Hyper-connections by kernels.

use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::hyper_connection::{BlockArgs, PostArgs, PreArgs, Sizes, launch_post, launch_pre};

use super::MhcOptions;
use super::backend::{BackendMixer, HyperConnectionBackend};
use crate::tensors::{buffers, contiguous, dims, elem, empty};

fn sizes(streams: &CubeTensor) -> Sizes {
    let [tokens, n, width] = dims(streams);
    Sizes { tokens, streams: n, width, elem: elem(streams) }
}

impl HyperConnectionBackend for CubeBackend {
    fn mhc_pre(
        streams: CubeTensor,
        products: CubeTensor,
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

    fn mhc_head(streams: CubeTensor, products: CubeTensor, mixer: BackendMixer<Self>) -> CubeTensor {
        sum(streams, products, mixer, None)
    }

    fn mhc_post(streams: CubeTensor, output: CubeTensor, post: CubeTensor, comb: CubeTensor) -> CubeTensor {
        let [streams, output, post, comb] = [streams, output, post, comb].map(contiguous);
        let sizes = sizes(&streams);
        let mixed = empty(&streams, [sizes.tokens, sizes.streams, sizes.width], streams.dtype);
        let args =
            buffers!(streams, output, post, comb, mixed => PostArgs { streams, output, post, comb, mixed, sizes });
        launch_post(&mixed.client, args);
        mixed
    }
}

/// The sum of the streams, before a block or behind the last one.
fn sum(
    streams: CubeTensor,
    products: CubeTensor,
    mixer: BackendMixer<CubeBackend>,
    block: Option<BlockArgs>,
) -> CubeTensor {
    let BackendMixer { scale, base, options } = mixer;
    let [streams, products, scale, base] = [streams, products, scale, base].map(contiguous);
    let (sizes, MhcOptions { norm_eps, eps, .. }) = (sizes(&streams), options);
    let input = empty(&streams, [sizes.tokens, sizes.width], streams.dtype);
    let args = buffers!(streams, products, scale, base, input => PreArgs {
        streams, products, scale, base, input, block, sizes, norm_eps, eps,
    });
    launch_pre(&input.client, args);
    input
}
