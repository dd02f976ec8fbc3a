//! [`Streams`]: the residual streams of a model, with the output of a block that is not mixed in yet.

use burn::backend::{Dispatch, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::backend::{BackendMixerProducts, BackendMixing, BackendRead, BackendStreams, HyperConnectionBackend};
use super::{MhcOptions, Mixer, Mixing};
use crate::MlaError;
use crate::check::Check;
use crate::ops::experts_mlp::ExpertsSum;
use crate::ops::linear::linear;
use crate::ops::residual_norm::{Addend, Summand};

/// Tokens up to which streams are mixed and multiplied in one launch, which is spread over the whole device however few there are;
/// more are enough for the kernels that products of many rows have.
const FEW_TOKENS: usize = 64;

/// Residual streams `[N, n, d]`, f32, f16 or bf16: in memory, or those after a block, which are not computed yet. Clones share memory.
#[derive(Debug, Clone)]
#[must_use = "nothing is launched before they are read"]
pub struct Streams(Form);

#[derive(Debug, Clone)]
enum Form {
    InMemory(Tensor<3>),
    /// Checked.
    Mixed(Box<Mixed>),
}

#[derive(Debug, Clone)]
struct Mixed {
    output: Addend,
    mixing: Mixing,
}

impl From<Tensor<3>> for Streams {
    fn from(streams: Tensor<3>) -> Self {
        Self(Form::InMemory(streams))
    }
}

impl Streams {
    /// Of checked arguments.
    pub(super) fn mixed(output: Addend, mixing: Mixing) -> Self {
        Self(Form::Mixed(Box::new(Mixed { output, mixing })))
    }

    /// `[N, n, d]`.
    pub fn dims(&self) -> [usize; 3] {
        self.like().dims()
    }

    /// The streams `[N, n, d]`; computed once. Their bits, and those of all that follows, are the same whether or not somebody looked.
    pub fn tensor(&mut self) -> Tensor<3> {
        let streams = match &self.0 {
            Form::InMemory(streams) => return streams.clone(),
            Form::Mixed(mixed) => mixed.materialise(),
        };
        self.0 = Form::InMemory(streams.clone());
        streams
    }

    /// A tensor of their shape, dtype and device.
    pub(super) fn like(&self) -> &Tensor<3> {
        match &self.0 {
            Form::InMemory(streams) => streams,
            Form::Mixed(mixed) => &mixed.mixing.streams,
        }
    }

    /// Their products with a mixer, before any norm, and the streams in memory. There are elements.
    pub(super) fn project(
        self,
        mixer: &Mixer,
        options: &MhcOptions,
    ) -> Result<(Tensor<3>, BackendMixerProducts<Dispatch>), MlaError> {
        if !takes_parts(self.dims()[0], mixer, options) {
            return self.whole_products(mixer, options);
        }
        let weight = mixer.weight.dense().into_dispatch();
        let (streams, parts) = match self.into_backend() {
            Ok(streams) => Dispatch::mhc_project(streams, weight),
            Err(experts) => experts.0.project(experts.1, weight),
        };
        Ok((Tensor::from_dispatch(streams), BackendMixerProducts::InParts(parts)))
    }

    /// What a block reads of them, and the streams in memory. There are elements.
    pub(super) fn read(
        self,
        mixer: Mixer,
        norm_weight: FloatTensor<Dispatch>,
        options: &MhcOptions,
    ) -> Result<BackendRead<Dispatch>, MlaError> {
        if !takes_parts(self.dims()[0], &mixer, options) {
            let (streams, products) = self.whole_products(&mixer, options)?;
            let (streams, mixer) = (streams.into_dispatch(), mixer.into_backend(options));
            let (input, post, comb) =
                <Dispatch as HyperConnectionBackend>::mhc_pre(streams.clone(), products, norm_weight, mixer);
            return Ok(BackendRead { streams, input, post, comb });
        }
        let (weight, mixer) = (mixer.weight.dense().into_dispatch(), mixer.into_backend(options));
        Ok(match self.into_backend() {
            Ok(streams) => Dispatch::mhc_read(streams, weight, norm_weight, mixer),
            Err(experts) => experts.0.read(experts.1, weight, norm_weight, mixer),
        })
    }

    /// All of a token's products together, of many tokens.
    fn whole_products(
        mut self,
        mixer: &Mixer,
        options: &MhcOptions,
    ) -> Result<(Tensor<3>, BackendMixerProducts<Dispatch>), MlaError> {
        let ([tokens, n, width], streams) = (self.dims(), self.tensor());
        let rows = streams.clone().reshape([tokens, n * width]);
        let products = linear(rows, &mixer.weight, options.determinism)?;
        Ok((streams, BackendMixerProducts::Whole(products.into_dispatch())))
    }

    /// For backends, or a sum of experts, which has a launch of its own for them.
    fn into_backend(self) -> Result<BackendStreams<Dispatch>, Box<(ExpertsSum, BackendMixing<Dispatch>)>> {
        let Mixed { output, mixing } = match self.0 {
            Form::InMemory(streams) => return Ok(BackendStreams::InMemory(streams.into_dispatch())),
            Form::Mixed(mixed) => *mixed,
        };
        let mixing = mixing.into_backend();
        match output {
            Addend(Summand::Rows(rows)) => Ok(BackendStreams::Mixed(rows.into_dispatch(), mixing)),
            Addend(Summand::Experts(sum)) => Err(Box::new((*sum, mixing))),
        }
    }
}

impl Mixed {
    /// `[N, n, d]`, by a launch of its own.
    fn materialise(&self) -> Tensor<3> {
        let Self { output, mixing } = self.clone();
        if mixing.streams.shape().num_elements() == 0 {
            return mixing.streams;
        }
        let output = output.materialise().into_dispatch();
        Tensor::from_dispatch(<Dispatch as HyperConnectionBackend>::mhc_post(output, mixing.into_backend()))
    }
}

impl Mixing {
    fn into_backend(self) -> BackendMixing<Dispatch> {
        let [streams, comb] = [self.streams, self.comb].map(Tensor::into_dispatch);
        BackendMixing { streams, post: self.post.into_dispatch(), comb }
    }
}

/// Whether products are computed in parts. A token's bits depend on it, so where they may not depend on the others, all are.
fn takes_parts(tokens: usize, mixer: &Mixer, options: &MhcOptions) -> bool {
    mixer.weight.format().is_dense() && (tokens <= FEW_TOKENS || options.determinism.is_batch_invariant())
}

/// Where products come in parts, the device has room for them.
pub(super) fn check_parts(
    check: &Check,
    streams: &Streams,
    mixer: &Mixer,
    options: &MhcOptions,
) -> Result<(), MlaError> {
    #[cfg(feature = "_gpu")]
    if check.client().is_some() {
        let ([tokens, _, width], [rows, _]) = (streams.dims(), mixer.weight.dims());
        if takes_parts(tokens, mixer, options) {
            let parts = [tokens, mla_kernels::hyper_connection::slices(width), rows + 1];
            return check.allocation("streams", burn::tensor::DType::F32, parts);
        }
    }
    let _ = (check, streams, mixer, options);
    Ok(())
}
