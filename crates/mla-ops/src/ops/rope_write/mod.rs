//! [`rope_write`]: what stands between the projections of multi-head latent attention and the attention.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};
use thiserror::Error;

use self::backend::{BackendIndexHeads, BackendLatents, BackendRopeQuery, BackendRopeWritten, RopeWriteBackend};
use super::compress_kv::backend::{BackendSteps, BackendStepsDone};
use super::compress_kv::{CompressKvArgs, CompressKvOptions, CompressedKv, EntryCache};
use super::linear_by_head;
use super::norm_rope::BackendNorm;
use super::norm_rope::checks::{check_eps, check_tables};
use super::products::is_small_batch;
use super::write_latent::{WriteLatentArgs, WriteLatentError};
use crate::cache::Pool;
use crate::check::Check;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError, StackedWeight};

const OP: &str = "rope_write";

/// Arguments of [`rope_write`].
#[derive(Debug, Clone)]
pub struct RopeWriteArgs {
    /// The queries, of the dtype of `cache`.
    pub query: RopeQuery,
    /// `[N, D]` of the dtype of `cache`: latents, each with its rotary key behind it.
    pub latent: Tensor<2>,
    /// f32 `[D - dr]`: the weight of the latents' norm; or `[D]`, where that is one of whole rows, with their rotary keys.
    pub norm_weight: Tensor<1>,
    /// Added to the mean square in the norm.
    pub norm_eps: f32,
    /// Added to the mean square in the norm of each whole head of the queries, which has no weight (DeepSeek-V4); none for no norm.
    pub q_norm_eps: Option<f32>,
    /// Queries of an indexer, `[N, Hi, di]` of the dtype of `cache`: RoPE is applied to their last `dr` channels.
    pub index_q: Option<Tensor<3>>,
    /// f32 `[N, dr / 2]`: RoPE's cosines for the last `dr` channels of a token's heads and of its latent, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
    /// The cache `[P, S, D]`, as [`write_latent`](crate::write_latent) wants it.
    pub cache: Pool,
    /// i32 `[N]`: where each latent goes, `page * S + offset`; -1 skips it. No slot occurs twice.
    pub slots: Tensor<1, Int>,
    /// Compressors that take in the same tokens (DeepSeek-V4), as [`compress_kv`](crate::compress_kv()) of each; none where queries are
    /// absorbed.
    pub compressors: Vec<(CompressKvArgs, CompressKvOptions)>,
}

/// What becomes of the queries.
#[derive(Debug, Clone)]
pub enum RopeQuery {
    /// `[N, H, d]`: RoPE is applied.
    Heads(Tensor<3>),
    /// Then they are absorbed into the latent space. There is no norm, and there are no queries of an indexer.
    Absorbed {
        /// `[N, H, dn + dr]`.
        q: Tensor<3>,
        /// `[H, R, dn]`, of the dtype of `q`: multiplied as by [`linear_by_head`](crate::linear_by_head()).
        weight: StackedWeight,
        /// Of the product.
        determinism: Determinism,
    },
}

/// What [`rope_write`] computed.
#[derive(Debug, Clone)]
pub struct RopeWritten {
    /// `[N, H, d]`, or `[N, H, R + dr]` where queries are absorbed.
    pub q: Tensor<3>,
    /// `[N, D]`: the normed latents with their rotary keys, as they go into the cache, before they are quantised if they are; not where
    /// queries are absorbed.
    pub latent: Option<Tensor<2>>,
    /// `[N, Hi, di]`, of queries of an indexer.
    pub index_q: Option<Tensor<3>>,
    /// The cache's own buffer.
    pub cache: Pool,
    /// Of each compressor.
    pub compressed: Vec<CompressedKv>,
}

/// A refused [`rope_write`], with all caches and states as they were.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct RopeWriteError {
    /// Why.
    pub error: MlaError,
    /// The cache, unchanged.
    pub cache: Pool,
    /// State and cache of each compressor, unchanged.
    pub compressors: Vec<(Tensor<3>, Option<Pool>)>,
}

impl From<Box<RopeWriteError>> for MlaError {
    fn from(refused: Box<RopeWriteError>) -> Self {
        refused.error
    }
}

/// Without compressors.
impl From<Box<RopeWriteError>> for Box<WriteLatentError> {
    fn from(refused: Box<RopeWriteError>) -> Self {
        Self::new(WriteLatentError { error: refused.error, cache: refused.cache })
    }
}

/// Norms queries where asked to, and applies RoPE to them; norms latents, applies RoPE to the rotary keys behind them and writes both
/// into the cache, in place. As [`norm_rope`](crate::norm_rope()) of each, [`write_latent`](crate::write_latent) and
/// [`linear_by_head`](crate::linear_by_head()) of absorbed queries, bit for bit (where the widths differ in the largest power of two
/// that divides them, up to 16 bytes, the sums of norms are rounded otherwise). It is one launch, for absorbed queries of a few tokens
/// on a GPU with matrix instructions; one more where the rows of the cache are FP8. It is the same launch with up to two compressors, of
/// which each sequence has one entry and about one token, on a GPU with room for their buffers: CUDA.
///
/// ```
/// use burn::tensor::{Device, Distribution, FloatDType, Tensor};
/// use mla_ops::batch::index_tensor;
/// use mla_ops::cache::new_pool;
/// use mla_ops::{Determinism, RopeConfig, RopeQuery, RopeWriteArgs, StackedWeight, rope_write};
///
/// let device = Device::flex();
/// // A latent of 8 channels and 4 rotary ones; 2 heads with 6 channels beside the rotary ones. Tokens 5 and 6 of a sequence.
/// let random = |shape| Tensor::<3>::random(shape, Distribution::Default, &device);
/// let w_uk = StackedWeight::from(random([2, 8, 6]));
/// let [cos, sin] = RopeConfig { rope_theta: 10_000.0, yarn: None }.tables(4, &[5, 6], &device)?;
/// let args = RopeWriteArgs {
///     query: RopeQuery::Absorbed { q: random([2, 2, 6 + 4]), weight: w_uk, determinism: Determinism::Fast },
///     latent: random([1, 2, 8 + 4]).squeeze_dim(0),
///     norm_weight: Tensor::ones([8], &device),
///     norm_eps: 1e-6,
///     q_norm_eps: None,
///     index_q: None,
///     cos,
///     sin,
///     cache: new_pool([4, 4, 8 + 4], FloatDType::F32, &device)?.into(),
///     slots: index_tensor(vec![9, 10], &device),
///     compressors: vec![],
/// };
/// let written = rope_write(args)?;
/// assert_eq!((written.q.dims(), written.cache.dims()), ([2, 2, 8 + 4], [4, 4, 8 + 4])); // q is for `mla_decode`
/// # Ok::<(), mla_ops::MlaError>(())
/// ```
///
/// # Errors
/// As those: nothing is launched, and caches and states come back in the error, unchanged.
pub fn rope_write(args: RopeWriteArgs) -> Result<RopeWritten, Box<RopeWriteError>> {
    let (query, norm_eps, index_q, latents, compressors) = checked(args)?;
    let heads = |q: Tensor<3>| {
        let norm = norm_eps.map_or(BackendNorm::None, BackendNorm::Plain);
        let index = index_q.map_or(BackendIndexHeads::None, |q| BackendIndexHeads::Heads(q.into_dispatch()));
        BackendRopeQuery::Heads { q: q.into_dispatch(), norm, index }
    };
    Ok(match query {
        RopeQuery::Absorbed { q, weight, determinism } if !has_launch(&q, &weight) => {
            let RopeWritten { q, cache, .. } = launch(heads(q), latents, vec![]);
            let q = linear_by_head::in_memory(q, &weight, determinism);
            RopeWritten { q, latent: None, index_q: None, cache, compressed: vec![] }
        }
        RopeQuery::Absorbed { q, weight, determinism } => {
            launch(BackendRopeQuery::Absorbed(q.into_dispatch(), weight.into_backend(), determinism), latents, vec![])
        }
        RopeQuery::Heads(q) => launch(heads(q), latents, compressors),
    })
}

/// Whether a backend absorbs queries like these itself.
fn has_launch(q: &Tensor<3>, weight: &StackedWeight) -> bool {
    let [tokens, ..] = q.dims();
    is_small_batch(tokens, &q.device()) && !weight.dims().contains(&0)
}

fn launch(
    query: BackendRopeQuery<Dispatch>,
    latents: BackendLatents<Dispatch>,
    compressors: Compressors,
) -> RopeWritten {
    let (steps, quantised, apart) = steps(compressors);
    match <Dispatch as RopeWriteBackend>::rope_write(query, latents, steps) {
        BackendRopeWritten::Heads { q, index, latent, cache, compressed } => {
            let index_q = match index {
                BackendIndexHeads::None => None,
                BackendIndexHeads::Heads(q) => Some(tensors(q)),
            };
            let steps = match compressed {
                BackendStepsDone::None => vec![],
                BackendStepsDone::One(only) => vec![only],
                BackendStepsDone::Two(first, second) => vec![first, second],
            };
            let steps = steps.into_iter().zip(quantised).map(|(step, to)| CompressedKv::of_step(step, to));
            let compressed = steps.chain(apart.into_iter().map(|(args, options)| args.compress(&options))).collect();
            let (q, latent, cache) = (tensors(q), Some(tensors(latent)), Pool::from_backend(cache));
            RopeWritten { q, latent, index_q, cache, compressed }
        }
        BackendRopeWritten::Absorbed { q, cache } => {
            let (q, cache) = (tensors(q), Pool::from_backend(cache));
            RopeWritten { q, latent: None, index_q: None, cache, compressed: vec![] }
        }
    }
}

type Compressors = Vec<(CompressKvArgs, CompressKvOptions)>;

/// What a backend takes, with the caches that another launch quantises entries for; or else all as they are.
fn steps(compressors: Compressors) -> (BackendSteps<Dispatch>, Vec<Option<EntryCache>>, Compressors) {
    if compressors.len() > 2 || !compressors.iter().all(|(args, _)| args.is_step()) {
        return (BackendSteps::None, vec![], compressors);
    }
    let steps = compressors.into_iter().map(|(args, options)| args.into_step(&options));
    let (steps, quantised): (Vec<_>, _) = steps.unzip();
    let mut steps = steps.into_iter();
    let steps = match (steps.next(), steps.next()) {
        (Some(first), Some(second)) => BackendSteps::Two(first, second),
        (Some(only), None) => BackendSteps::One(only),
        (None, _) => BackendSteps::None,
    };
    (steps, quantised, vec![])
}

/// Queries, the epsilon of their norm, those of an indexer, latents, and compressors.
type Checked = (RopeQuery, Option<f32>, Option<Tensor<3>>, BackendLatents<Dispatch>, Compressors);

/// The arguments as a backend takes them, if they fulfil what a call must.
fn checked(args: RopeWriteArgs) -> Result<Checked, Box<RopeWriteError>> {
    let RopeWriteArgs {
        query,
        latent,
        norm_weight,
        norm_eps,
        q_norm_eps,
        index_q,
        cos,
        sin,
        cache,
        slots,
        compressors,
    } = args;
    let write = WriteLatentArgs { cache, slots, latent, rope: None };
    let norms = (&norm_weight, norm_eps, q_norm_eps);
    let checked = check(&write, (&query, index_q.as_ref()), norms, [&cos, &sin]);
    if let Err(error) = checked.and_then(|check| check_compressors(&check, &query, &compressors)) {
        let kept = |(args, _): (CompressKvArgs, CompressKvOptions)| (args.state, args.cache.map(|to| to.cache));
        let compressors = compressors.into_iter().map(kept).collect();
        return Err(Box::new(RopeWriteError { error, cache: write.cache, compressors }));
    }
    let latents = BackendLatents {
        latent: write.latent.into_dispatch(),
        norm_weight: norm_weight.into_dispatch(),
        cos: cos.into_dispatch(),
        sin: sin.into_dispatch(),
        cache: write.cache.into_backend(),
        slots: write.slots.into_dispatch(),
        norm_eps,
    };
    Ok((query, q_norm_eps, index_q, latents, compressors))
}

fn check(
    write: &WriteLatentArgs,
    (query, index_q): (&RopeQuery, Option<&Tensor<3>>),
    (norm_weight, norm_eps, q_norm_eps): (&Tensor<1>, f32, Option<f32>),
    tables: [&Tensor<2>; 2],
) -> Result<Check, MlaError> {
    let check = write.check_call(OP)?;
    let (RopeQuery::Heads(q) | RopeQuery::Absorbed { q, .. }) = query;
    let [tokens, cache_width] = write.latent.dims();
    check.float_as("q", q, write.cache.dtype(), "the dtype of `cache`")?;
    check.dims("q", q.dims(), [Some(tokens), None, None], || format!("[N, H, d] with N = {tokens}"))?;
    let [_, heads, width] = q.dims();
    let pairs = check_tables(&check, tables, tokens, width.min(cache_width))?;
    let normed = cache_width - 2 * pairs;
    check.float_as("norm_weight", norm_weight, DType::F32, "always")?;
    let expected = if norm_weight.dims() == [cache_width] { cache_width } else { normed };
    let words = || format!("[D - dr] = [{normed}], or [D] = [{cache_width}]");
    check.dims("norm_weight", norm_weight.dims(), [Some(expected)], words)?;
    check_eps(&check, "norm_eps", norm_eps)?;
    q_norm_eps.map_or(Ok(()), |eps| check_eps(&check, "q_norm_eps", eps))?;
    if let Some(index_q) = index_q {
        check.float_as("index_q", index_q, write.cache.dtype(), "the dtype of `cache`")?;
        let [_, _, width] = index_q.dims();
        let words = || format!("[N, Hi, di] with N = {tokens} and di at least {}, as RoPE has channels", 2 * pairs);
        check.dims("index_q", index_q.dims(), [Some(tokens), None, Some(width.max(2 * pairs))], words)?;
        check.elements("index_q", index_q)?;
    }
    if let RopeQuery::Absorbed { weight, .. } = query {
        let words = || "none, where queries are absorbed".to_string();
        check.value("q_norm_eps", q_norm_eps.is_none(), "a norm", words)?;
        check.value("index_q", index_q.is_none(), "queries of an indexer", words)?;
        weight.check(&check, "weight", q.dtype(), "that of `q`")?;
        let still = width - 2 * pairs;
        check.dims("weight", weight.dims(), [Some(heads), None, Some(still)], || {
            format!("[H, R, d - dr] with H = {heads} and d - dr = {still}")
        })?;
    }
    check.elements("q", q)?;
    Ok(check)
}

/// Each fulfils what a call must.
fn check_compressors(
    check: &Check,
    query: &RopeQuery,
    compressors: &[(CompressKvArgs, CompressKvOptions)],
) -> Result<(), MlaError> {
    let absorbs = matches!(query, RopeQuery::Absorbed { .. });
    check.value("compressors", !absorbs || compressors.is_empty(), compressors.len(), || {
        "none, where queries are absorbed".into()
    })?;
    compressors.iter().try_for_each(|(args, options)| {
        check.float("compressors", &args.kv_gates)?;
        args.check_call(options)
    })
}
