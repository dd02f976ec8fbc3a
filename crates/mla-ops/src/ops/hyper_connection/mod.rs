//! [`mhc_pre`], [`mhc_post`] and [`mhc_head`]: residual streams before and after a block, and behind the last one.

mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod reference;
mod streams;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub(crate) use self::backend::*;
pub use self::streams::Streams;
use self::streams::check_parts;
use super::norm_rope::checks::{check_eps, check_norm};
use super::residual_norm::Addend;
use crate::check::Check;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError, Weight};

/// Most residual streams: a unit of a GPU has the matrix that mixes them in its registers.
const MAX_STREAMS: usize = 8;

/// Arguments of [`mhc_pre`].
#[derive(Debug, Clone)]
pub struct MhcPreArgs {
    /// The residual streams `[N, n, d]`, f32, f16 or bf16; `n` from 1 to 8. Those of [`mhc_post`] may not be computed yet.
    pub streams: Streams,
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

/// Options of [`mhc_pre`] and [`mhc_head`]. The default is what DeepSeek-V4 has.
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

impl Default for MhcOptions {
    fn default() -> Self {
        Self { norm_eps: 1e-6, eps: 1e-6, sinkhorn_iters: 20, determinism: Determinism::Fast }
    }
}

/// How the output of a block goes into the streams: made by [`mhc_pre`] for [`mhc_post`].
#[derive(Debug, Clone)]
pub struct Mixing {
    /// The streams that the block has read, `[N, n, d]`, in memory.
    pub streams: Tensor<3>,
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
/// Streams that [`mhc_post`] has left uncomputed are computed in the same launches: on a GPU, for up to 64 tokens, or where tokens have to be
/// independent, there are two. One has the streams after the block before, and their products with the weight in parts, of some channels
/// each; the other one has the rest. With more tokens the streams, their [`linear`](crate::linear()) projection and the rest are a launch
/// each; the products are sums in another order then.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use mla_ops::{MhcOptions, MhcPreArgs, Mixer, mhc_post, mhc_pre};
///
/// let device = Device::flex();
/// let (n, d) = (4, 16); // streams and channels
/// let m = (2 + n) * n;
/// let mixer = Mixer {
///     weight: Tensor::<2>::random([m, n * d], Distribution::Default, &device).into(),
///     scale: Tensor::ones([3], &device),
///     base: Tensor::zeros([m], &device),
/// };
/// let options = MhcOptions::default();
/// let streams = Tensor::<3>::random([2, n, d], Distribution::Default, &device);
/// let args = MhcPreArgs { streams: streams.into(), mixer, norm_weight: Tensor::ones([d], &device) };
/// let (input, mixing) = mhc_pre(args, &options)?;
/// assert_eq!(input.dims(), [2, d]);
/// // The columns of the matrix that mixes the streams sum up to 1.
/// let sums = mixing.comb.clone().sum_dim(1);
/// assert!((sums.max().into_scalar::<f32>() - 1.0).abs() < 1e-3);
/// let block = input; // attention, or experts
/// let mut streams = mhc_post(block, mixing)?;
/// assert_eq!(streams.tensor().dims(), [2, n, d]);
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, more than 8 streams, an epsilon that is negative or not finite, no iteration, or more than the
/// device can do ([`MlaError::DeviceLimit`]): nothing is launched.
pub fn mhc_pre(args: MhcPreArgs, options: &MhcOptions) -> Result<(Tensor<2>, Mixing), MlaError> {
    let MhcPreArgs { mut streams, mixer, norm_weight } = args;
    let check = check_streams("mhc_pre", streams.like())?;
    let [tokens, n, width] = streams.dims();
    mixer.check(&check, [n, width], [(2 + n) * n, 3], options)?;
    check_norm(&check, "norm_weight", &norm_weight, width, options.norm_eps)?;
    let iterations = options.sinkhorn_iters;
    check.value("sinkhorn_iters", iterations > 0, iterations, || "at least 1".into())?;
    check.index_range("sinkhorn_iters", iterations)?;
    check_parts(&check, &streams, &mixer, options)?;
    if tokens == 0 {
        let (device, streams) = (check.device(), streams.tensor());
        let input = Tensor::empty([0, width], (device, streams.dtype()));
        let (post, comb) =
            (Tensor::empty([0, n], (device, DType::F32)), Tensor::empty([0, n, n], (device, DType::F32)));
        return Ok((input, Mixing { streams, post, comb }));
    }
    let BackendRead { streams, input, post, comb } = streams.read(mixer, norm_weight.into_dispatch(), options)?;
    let (streams, comb) = tensors((streams, comb));
    let (input, post) = tensors((input, post));
    Ok((input, Mixing { streams, post, comb }))
}

/// The sum of the residual streams behind the last block, `[N, d]` in their dtype: `Σ_k (sigmoid(z_k) + eps) stream_k`, with `z` as
/// in [`mhc_pre`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{MhcOptions, Mixer, mhc_head};
///
/// let device = Device::flex();
/// let (n, d) = (4, 16);
/// let mixer = Mixer {
///     weight: Tensor::<2>::zeros([n, n * d], &device).into(),
///     scale: Tensor::ones([1], &device),
///     base: Tensor::zeros([n], &device),
/// };
/// let options = MhcOptions { eps: 0.0, ..MhcOptions::default() };
/// let hidden = mhc_head(Tensor::<3>::ones([2, n, d], &device), mixer, &options)?;
/// // Half of each of four streams.
/// assert_eq!((hidden.dims(), hidden.max().into_scalar::<f32>()), ([2, d], 2.0));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// As [`mhc_pre`].
pub fn mhc_head(streams: impl Into<Streams>, mixer: Mixer, options: &MhcOptions) -> Result<Tensor<2>, MlaError> {
    let streams: Streams = streams.into();
    let check = check_streams("mhc_head", streams.like())?;
    let [tokens, n, width] = streams.dims();
    mixer.check(&check, [n, width], [n, 1], options)?;
    check_eps(&check, "norm_eps", options.norm_eps)?;
    check_parts(&check, &streams, &mixer, options)?;
    if tokens == 0 {
        return Ok(Tensor::empty([0, width], (check.device(), streams.like().dtype())));
    }
    let (streams, products) = streams.project(&mixer, options)?;
    let mixer = mixer.into_backend(options);
    Ok(tensors(<Dispatch as HyperConnectionBackend>::mhc_head(streams.into_dispatch(), products, mixer)))
}

/// The residual streams `[N, n, d]` after a block with the output `[N, d]`: stream `j` becomes
/// `post_j · output + Σ_k comb_kj · stream_k`, in f32, rounded to the dtype of the streams.
///
/// Nothing is launched before the [`Streams`] are read: by [`mhc_pre`] or [`mhc_head`], or by [`Streams::tensor`]. The bits are the
/// same. An output of experts that is not in memory yet ([`ExpertsSum`](crate::ExpertsSum)) is summed up there, too.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use mla_ops::{Mixing, mhc_post};
///
/// let device = Device::flex();
/// let mixing = Mixing {
///     streams: Tensor::ones([1, 2, 8], &device),
///     post: Tensor::from_data([[1.0, 0.5]], &device),
///     comb: Tensor::from_data([[[1.0, 0.0], [0.0, 1.0]]], &device), // streams stay apart
/// };
/// let output = Tensor::<2>::ones([1, 8], &device) * 4.0;
/// let streams = mhc_post(output, mixing)?.tensor();
/// assert_eq!((streams.clone().max().into_scalar::<f32>(), streams.min().into_scalar::<f32>()), (5.0, 3.0));
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// Wrong shapes, dtypes or devices, more than 8 streams, or more than the device can do ([`MlaError::DeviceLimit`]).
pub fn mhc_post(output: impl Into<Addend>, mixing: Mixing) -> Result<Streams, MlaError> {
    let output: Addend = output.into();
    let Mixing { streams, post, comb } = &mixing;
    let check = check_streams("mhc_post", streams)?;
    let [tokens, n, width] = streams.dims();
    check.float_as("output", output.like(), streams.dtype(), "that of the streams")?;
    check.dims("output", output.dims(), [Some(tokens), Some(width)], || format!("[N, d] = [{tokens}, {width}]"))?;
    check.float_as("mixing.post", post, DType::F32, "always")?;
    check.dims("mixing.post", post.dims(), [Some(tokens), Some(n)], || format!("[N, n] = [{tokens}, {n}]"))?;
    check.float_as("mixing.comb", comb, DType::F32, "always")?;
    check.dims("mixing.comb", comb.dims(), [tokens, n, n].map(Some), || format!("[N, n, n] = [{tokens}, {n}, {n}]"))?;
    Ok(Streams::mixed(output, mixing))
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

    /// What a backend takes beside the products.
    fn into_backend(self, options: &MhcOptions) -> BackendMixer<Dispatch> {
        let [scale, base] = [self.scale, self.base].map(Tensor::into_dispatch);
        BackendMixer { scale, base, options: *options }
    }
}
