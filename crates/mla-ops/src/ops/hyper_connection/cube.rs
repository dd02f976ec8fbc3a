//! Hyper-connections by kernels.

use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::hyper_connection::{
    BlockArgs, MixArgs, PostArgs, PreArgs, Products, ProjectArgs, Sizes, launch_post, launch_pre, launch_project,
    launch_project_and_pre, slices,
};
use mla_kernels::residual_norm::Summand;

use super::MhcOptions;
use super::backend::{
    BackendMixer, BackendMixerProducts, BackendMixing, BackendRead, BackendStreams, HyperConnectionBackend,
};
use crate::tensors::{buffers, contiguous, dims, elem, empty};

fn sizes(streams: &CubeTensor) -> Sizes {
    let [tokens, n, width] = dims(streams);
    Sizes { tokens, streams: n, width, elem: elem(streams) }
}

impl HyperConnectionBackend for CubeBackend {
    fn mhc_project(streams: BackendStreams<Self>, weight: CubeTensor) -> (CubeTensor, CubeTensor) {
        Projection::of(streams, weight).launch()
    }

    fn mhc_pre(
        streams: CubeTensor,
        products: BackendMixerProducts<Self>,
        norm_weight: CubeTensor,
        mixer: BackendMixer<Self>,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let (args, BackendRead { input, post, comb, .. }) = pre(streams, products, norm_weight, mixer);
        launch_pre(&input.client, args);
        (input, post, comb)
    }

    fn mhc_read(
        streams: BackendStreams<Self>,
        weight: CubeTensor,
        norm_weight: CubeTensor,
        mixer: BackendMixer<Self>,
    ) -> BackendRead<Self> {
        Projection::of(streams, weight).read(norm_weight, mixer)
    }

    fn mhc_head(streams: CubeTensor, products: BackendMixerProducts<Self>, mixer: BackendMixer<Self>) -> CubeTensor {
        let (args, sum) = sum(streams, products, mixer, None);
        launch_pre(&sum.client, args);
        sum
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

/// Streams in memory, or what is mixed into them first, and their products in parts.
pub(crate) struct Projection {
    args: ProjectArgs,
    /// Written, if something is mixed.
    streams: CubeTensor,
    /// Written.
    parts: CubeTensor,
}

impl Projection {
    fn of(streams: BackendStreams<CubeBackend>, weight: CubeTensor) -> Self {
        match streams {
            BackendStreams::InMemory(streams) => {
                let streams = contiguous(streams);
                Self::new(&streams, streams.clone(), None, weight)
            }
            BackendStreams::Mixed(output, mixing) => {
                Self::mixed(Summand::Rows(contiguous(output).into_buffer_arg()), mixing, weight)
            }
        }
    }

    /// The streams after a block.
    pub(crate) fn mixed(output: Summand, mixing: BackendMixing<CubeBackend>, weight: CubeTensor) -> Self {
        let BackendMixing { streams, post, comb } = mixing;
        let [streams, post, comb] = [streams, post, comb].map(contiguous);
        let mixed = empty(&streams, dims::<3>(&streams), streams.dtype);
        let mix = buffers!(post, comb, mixed => MixArgs { output, post, comb, mixed });
        Self::new(&streams, mixed, Some(mix), weight)
    }

    /// Of contiguous streams.
    fn new(from: &CubeTensor, streams: CubeTensor, mix: Option<MixArgs>, weight: CubeTensor) -> Self {
        let (weight, sizes) = (contiguous(weight), sizes(from));
        let [rows, _] = dims(&weight);
        let parts = empty(from, [sizes.tokens, slices(sizes.width), rows + 1], DType::F32);
        let from = from.clone().into_buffer_arg();
        let args = buffers!(weight, parts => ProjectArgs { streams: from, mix, weight, parts, rows, sizes });
        Self { args, streams, parts }
    }

    /// The streams, and their products in parts.
    pub(crate) fn launch(self) -> (CubeTensor, CubeTensor) {
        launch_project(&self.parts.client, self.args);
        (self.streams, self.parts)
    }

    /// The streams, and what a block reads of them.
    pub(crate) fn read(self, norm_weight: CubeTensor, mixer: BackendMixer<CubeBackend>) -> BackendRead<CubeBackend> {
        let Self { args, streams, parts } = self;
        let (pre, read) = pre(streams, BackendMixerProducts::InParts(parts), norm_weight, mixer);
        launch_project_and_pre(&read.input.client, args, pre);
        read
    }
}

/// What is launched before a block, and what that writes.
fn pre(
    streams: CubeTensor,
    products: BackendMixerProducts<CubeBackend>,
    norm_weight: CubeTensor,
    mixer: BackendMixer<CubeBackend>,
) -> (PreArgs, BackendRead<CubeBackend>) {
    let Sizes { tokens, streams: n, .. } = sizes(&streams);
    let (norm_weight, iterations) = (contiguous(norm_weight), mixer.options.sinkhorn_iters);
    let post = empty(&streams, [tokens, n], DType::F32);
    let comb = empty(&streams, [tokens, n, n], DType::F32);
    let block = buffers!(norm_weight, post, comb => BlockArgs { norm_weight, post, comb, iterations });
    let (args, input) = sum(streams.clone(), products, mixer, Some(block));
    (args, BackendRead { streams, input, post, comb })
}

/// What is launched for the sum of the streams, before a block or behind the last one, and the sum.
fn sum(
    streams: CubeTensor,
    products: BackendMixerProducts<CubeBackend>,
    mixer: BackendMixer<CubeBackend>,
    block: Option<BlockArgs>,
) -> (PreArgs, CubeTensor) {
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
    (args, input)
}
