//! [`rope_write`]: what stands between the projections of multi-head latent attention and the attention.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use self::backend::{BackendLatents, BackendRopeQuery, BackendRopeWritten, RopeWriteBackend};
use super::linear_by_head;
use super::norm_rope::checks::{check_eps, check_tables};
use super::products::is_small_batch;
use super::write_latent::{WriteLatentArgs, WriteLatentError};
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
    /// f32 `[D - dr]`: the weight of the latents' norm.
    pub norm_weight: Tensor<1>,
    /// Added to the mean square in the norm.
    pub norm_eps: f32,
    /// f32 `[N, dr / 2]`: RoPE's cosines for the last `dr` channels of a token's heads and of its latent, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
    /// The cache `[P, S, D]`, as [`write_latent`](crate::write_latent) wants it.
    pub cache: Tensor<3>,
    /// i32 `[N]`: where each latent goes, `page * S + offset`; -1 skips it. No slot occurs twice.
    pub slots: Tensor<1, Int>,
}

/// What becomes of the queries.
#[derive(Debug, Clone)]
pub enum RopeQuery {
    /// `[N, H, d]`: RoPE is applied.
    Heads(Tensor<3>),
    /// Then they are absorbed into the latent space.
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
    /// `[N, D]`: the normed latents with their rotary keys, as they are in the cache; not where queries are absorbed.
    pub latent: Option<Tensor<2>>,
    /// The cache's own buffer.
    pub cache: Tensor<3>,
}

/// Applies RoPE to queries; norms latents, applies RoPE to the rotary keys behind them and writes both into the cache, in place.
/// As [`norm_rope`](crate::norm_rope()) twice, [`write_latent`](crate::write_latent) and
/// [`linear_by_head`](crate::linear_by_head()) of absorbed queries, bit for bit. It is one launch, for absorbed queries of a few
/// tokens on a GPU with matrix instructions.
///
/// # Errors
/// As those: nothing is launched, and the cache comes back in the error, unchanged.
pub fn rope_write(args: RopeWriteArgs) -> Result<RopeWritten, Box<WriteLatentError>> {
    let (query, latents) = checked(args)?;
    Ok(match query {
        RopeQuery::Absorbed { q, weight, determinism } if !has_launch(&q, &weight) => {
            let RopeWritten { q, cache, .. } = launch(BackendRopeQuery::Heads(q.into_dispatch()), latents);
            RopeWritten { q: linear_by_head::in_memory(q, &weight, determinism), latent: None, cache }
        }
        RopeQuery::Absorbed { q, weight, determinism } => {
            launch(BackendRopeQuery::Absorbed(q.into_dispatch(), weight.into_backend(), determinism), latents)
        }
        RopeQuery::Heads(q) => launch(BackendRopeQuery::Heads(q.into_dispatch()), latents),
    })
}

/// Whether a backend absorbs queries like these itself.
fn has_launch(q: &Tensor<3>, weight: &StackedWeight) -> bool {
    let [tokens, ..] = q.dims();
    is_small_batch(tokens, &q.device()) && !weight.dims().contains(&0)
}

fn launch(query: BackendRopeQuery<Dispatch>, latents: BackendLatents<Dispatch>) -> RopeWritten {
    match <Dispatch as RopeWriteBackend>::rope_write(query, latents) {
        BackendRopeWritten::Heads { q, latent, cache } => {
            RopeWritten { q: tensors(q), latent: Some(tensors(latent)), cache: tensors(cache) }
        }
        BackendRopeWritten::Absorbed { q, cache } => RopeWritten { q: tensors(q), latent: None, cache: tensors(cache) },
    }
}

/// The arguments as a backend takes them, if they fulfil what a call must.
fn checked(args: RopeWriteArgs) -> Result<(RopeQuery, BackendLatents<Dispatch>), Box<WriteLatentError>> {
    let RopeWriteArgs { query, latent, norm_weight, norm_eps, cos, sin, cache, slots } = args;
    let write = WriteLatentArgs { cache, slots, latent, rope: None };
    if let Err(error) = check(&write, &query, (&norm_weight, norm_eps), [&cos, &sin]) {
        return Err(Box::new(WriteLatentError { error, cache: write.cache }));
    }
    let latents = BackendLatents {
        latent: write.latent.into_dispatch(),
        norm_weight: norm_weight.into_dispatch(),
        cos: cos.into_dispatch(),
        sin: sin.into_dispatch(),
        cache: write.cache.into_dispatch(),
        slots: write.slots.into_dispatch(),
        norm_eps,
    };
    Ok((query, latents))
}

fn check(
    write: &WriteLatentArgs,
    query: &RopeQuery,
    (norm_weight, norm_eps): (&Tensor<1>, f32),
    tables: [&Tensor<2>; 2],
) -> Result<(), MlaError> {
    let check = write.check_call(OP)?;
    let (RopeQuery::Heads(q) | RopeQuery::Absorbed { q, .. }) = query;
    let [tokens, cache_width] = write.latent.dims();
    check.float_as("q", q, write.cache.dtype(), "the dtype of `cache`")?;
    check.dims("q", q.dims(), [Some(tokens), None, None], || format!("[N, H, d] with N = {tokens}"))?;
    let [_, heads, width] = q.dims();
    let pairs = check_tables(&check, tables, tokens, width.min(cache_width))?;
    let normed = cache_width - 2 * pairs;
    check.float_as("norm_weight", norm_weight, DType::F32, "always")?;
    check.dims("norm_weight", norm_weight.dims(), [Some(normed)], || format!("[D - dr] = [{normed}]"))?;
    check_eps(&check, "norm_eps", norm_eps)?;
    if let RopeQuery::Absorbed { weight, .. } = query {
        weight.check(&check, "weight", q.dtype(), "that of `q`")?;
        let still = width - 2 * pairs;
        check.dims("weight", weight.dims(), [Some(heads), None, Some(still)], || {
            format!("[H, R, d - dr] with H = {heads} and d - dr = {still}")
        })?;
    }
    check.elements("q", q)?;
    Ok(())
}
