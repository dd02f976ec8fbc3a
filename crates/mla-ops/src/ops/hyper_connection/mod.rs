//! [`mhc_pre`], [`mhc_post`] and [`mhc_head`]: residual streams before and after a block, and behind the last one.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::{Dispatch, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};

pub(crate) use self::backend::*;
use super::linear::linear;
use super::norm_rope::checks::{check_eps, check_norm};
use crate::check::Check;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError, Weight};

/// Most residual streams: a unit of a GPU has the matrix that mixes them in its registers.
const MAX_STREAMS: usize = 8;

/// Arguments of [`mhc_pre`].
#[derive(Debug, Clone)]
pub struct MhcPreArgs {
    /// The residual streams `[N, n, d]`, f32, f16 or bf16; `n` from 1 to 8.
    pub streams: Tensor<3>,
    /// What mixes them: rows for `pre`, `post` and the rows of `comb`, a scale of each of the three.
    pub mixer: Mixer,
    /// f32 `[d]`: the weight of the norm before the block.
    pub norm_weight: Tensor<1>,
}

/// What is learnt of a hyper-connection: with `m = (2 + n) n` rows before a block, or `m = n` behind the last one. Clones share
/// memory.
#[derive(Debug, Clone)]
pub struct Mixer {
    /// f32 `[m, n d]`.
    pub weight: Weight,
    /// f32 `[3]`, or `[1]` behind the last block: factors of the products of each part.
    pub scale: Tensor<1>,
    /// f32 `[m]`: added to them.
    pub base: Tensor<1>,
}

/// Options of [`mhc_pre`] and [`mhc_head`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MhcOptions {
    /// Added to the mean squares: of all streams of a token, and of what a block reads.
    pub norm_eps: f32,
    /// Added to what must not be zero.
    pub eps: f32,
    /// Times that the columns of `comb` are normalised, at least 1; [`mhc_head`] has none.
    pub sinkhorn_iters: usize,
    /// Whether the bits of a token may depend on the others.
    pub determinism: Determinism,
}

/// How the output of a block goes into the streams: made by [`mhc_pre`] for [`mhc_post`].
#[derive(Debug, Clone)]
pub struct Mixing {
    /// f32 `[N, n]`: how much of the output goes into each stream.
    pub post: Tensor<2>,
    /// f32 `[N, n, n]`: what each stream (first index) gives to each stream. Rows and columns sum up to about 1.
    pub comb: Tensor<3>,
}

/// What a block reads of several residual streams, normed, `[N, d]` in the dtype of the streams, and how its output will go into
/// them (manifold-constrained hyper-connections, DeepSeek-V4).
///
/// With `z = (weight · x) · scale + base`, `x` all streams of a token after a norm without weight, and the parts of `z` for `pre`
/// `[n]`, `post` `[n]` and `comb` `[n, n]`: the block reads the norm of `Σ_k (sigmoid(pre_k) + eps) stream_k`, which is rounded to
/// the dtype of the streams before that norm; `post` is `2 sigmoid`; `comb` is the softmax of its rows plus `eps`, whose columns
/// and rows are then divided by their sums plus `eps`, alternately, columns first and last (Sinkhorn-Knopp). All in f32.
///
/// On a GPU that is two launches for a few tokens: the projection, and the rest.
///
/// # Errors
/// Wrong shapes, dtypes or devices, more than 8 streams, an epsilon that is negative or not finite, no iteration, or more than the
/// device can do ([`MlaError::DeviceLimit`]): nothing is launched.
pub fn mhc_pre(args: MhcPreArgs, options: &MhcOptions) -> Result<(Tensor<2>, Mixing), MlaError> {
    let MhcPreArgs { streams, mixer, norm_weight } = args;
    let check = check_streams("mhc_pre", &streams)?;
    let [tokens, n, width] = streams.dims();
    mixer.check(&check, [n, width], [(2 + n) * n, 3], options)?;
    check_norm(&check, "norm_weight", &norm_weight, width, options.norm_eps)?;
    let iterations = options.sinkhorn_iters;
    check.value("sinkhorn_iters", iterations > 0, iterations, || "at least 1".into())?;
    check.index_range("sinkhorn_iters", iterations)?;
    if tokens == 0 {
        let (device, input) = (streams.device(), Tensor::empty([0, width], (check.device(), streams.dtype())));
        let post = Tensor::empty([0, n], (&device, DType::F32));
        return Ok((input, Mixing { post, comb: Tensor::empty([0, n, n], (&device, DType::F32)) }));
    }
    let (products, mixer) = mixer.products(&streams, options)?;
    let norm_weight = norm_weight.into_dispatch();
    let (input, post, comb) =
        <Dispatch as HyperConnectionBackend>::mhc_pre(streams.into_dispatch(), products, norm_weight, mixer);
    let mixing = Mixing { post: Tensor::from_dispatch(post), comb: Tensor::from_dispatch(comb) };
    Ok((Tensor::from_dispatch(input), mixing))
}

/// The sum of the residual streams behind the last block, `[N, d]` in their dtype: `Σ_k (sigmoid(z_k) + eps) stream_k`, with `z` as
/// in [`mhc_pre`].
///
/// # Errors
/// As [`mhc_pre`].
pub fn mhc_head(streams: Tensor<3>, mixer: Mixer, options: &MhcOptions) -> Result<Tensor<2>, MlaError> {
    let check = check_streams("mhc_head", &streams)?;
    let [tokens, n, width] = streams.dims();
    mixer.check(&check, [n, width], [n, 1], options)?;
    check_eps(&check, "norm_eps", options.norm_eps)?;
    if tokens == 0 {
        return Ok(Tensor::empty([0, width], (check.device(), streams.dtype())));
    }
    let (products, mixer) = mixer.products(&streams, options)?;
    Ok(tensors(<Dispatch as HyperConnectionBackend>::mhc_head(streams.into_dispatch(), products, mixer)))
}

/// The residual streams `[N, n, d]` after a block with the output `[N, d]`: stream `j` becomes
/// `post_j · output + Σ_k comb_kj · stream_k`, in f32, rounded to the dtype of the streams.
///
/// # Errors
/// Wrong shapes, dtypes or devices, more than 8 streams, or more than the device can do ([`MlaError::DeviceLimit`]): nothing is
/// launched.
pub fn mhc_post(streams: Tensor<3>, output: Tensor<2>, mixing: Mixing) -> Result<Tensor<3>, MlaError> {
    let check = check_streams("mhc_post", &streams)?;
    let [tokens, n, width] = streams.dims();
    check.float_as("output", &output, streams.dtype(), "that of `streams`")?;
    check.dims("output", output.dims(), [Some(tokens), Some(width)], || format!("[N, d] = [{tokens}, {width}]"))?;
    let Mixing { post, comb } = mixing;
    check.float_as("mixing.post", &post, DType::F32, "always")?;
    check.dims("mixing.post", post.dims(), [Some(tokens), Some(n)], || format!("[N, n] = [{tokens}, {n}]"))?;
    check.float_as("mixing.comb", &comb, DType::F32, "always")?;
    check.dims("mixing.comb", comb.dims(), [tokens, n, n].map(Some), || format!("[N, n, n] = [{tokens}, {n}, {n}]"))?;
    if streams.shape().num_elements() == 0 {
        return Ok(streams);
    }
    let [output, post] = [output, post].map(Tensor::into_dispatch);
    let mixed =
        <Dispatch as HyperConnectionBackend>::mhc_post(streams.into_dispatch(), output, post, comb.into_dispatch());
    Ok(tensors(mixed))
}

fn check_streams(op: &'static str, streams: &Tensor<3>) -> Result<Check, MlaError> {
    let check = Check::new(op, "streams", streams)?;
    check.float("streams", streams)?;
    let [_, n, width] = streams.dims();
    check.value("streams", (1..=MAX_STREAMS).contains(&n), format!("{n} streams"), || format!("1 to {MAX_STREAMS}"))?;
    check.value("streams", width > 0, "0 channels", || "at least 1".into())?;
    check.elements("streams", streams)?;
    Ok(check)
}

impl Mixer {
    /// For `n` streams of `d` channels: so many rows, and factors.
    fn check(
        &self,
        check: &Check,
        [n, width]: [usize; 2],
        [rows, factors]: [usize; 2],
        options: &MhcOptions,
    ) -> Result<(), MlaError> {
        let inputs = n * width;
        self.weight.check(check, "mixer.weight", DType::F32, "always")?;
        let words = || format!("[m, n d] = [{rows}, {inputs}]");
        check.dims("mixer.weight", self.weight.dims(), [Some(rows), Some(inputs)], words)?;
        check.float_as("mixer.scale", &self.scale, DType::F32, "always")?;
        check.dims("mixer.scale", self.scale.dims(), [Some(factors)], || format!("[{factors}]"))?;
        check.float_as("mixer.base", &self.base, DType::F32, "always")?;
        check.dims("mixer.base", self.base.dims(), [Some(rows)], || format!("[m] = [{rows}]"))?;
        check_eps(check, "eps", options.eps)
    }

    /// f32 `[N, m]`: the projections of all streams of a token, before their norm.
    fn products(
        self,
        streams: &Tensor<3>,
        options: &MhcOptions,
    ) -> Result<(FloatTensor<Dispatch>, BackendMixer<Dispatch>), MlaError> {
        let [tokens, n, width] = streams.dims();
        let rows = streams.clone().reshape([tokens, n * width]);
        let products = linear(rows, &self.weight, options.determinism)?.into_dispatch();
        let [scale, base] = [self.scale, self.base].map(Tensor::into_dispatch);
        Ok((products, BackendMixer { scale, base, options: *options }))
    }
}
