//! [`rope_write`] and [`rope_write_absorb`]: what stands between the projections of multi-head latent attention and the attention.

mod backend;
#[cfg(feature = "_gpu")]
mod cube;
#[cfg(feature = "flex")]
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, DispatchTensor, Int, Tensor};

use self::backend::{BackendLatents, RopeWriteBackend};
use super::linear_by_head::linear_by_head;
use super::norm_rope::checks::{check_eps, check_tables};
use super::small_batch::MAX_ROWS;
use super::write_latent::{WriteLatentArgs, WriteLatentError};
use crate::device::has_kernels;
use crate::dispatch::tensors;
use crate::{Determinism, MlaError};

/// Arguments of [`rope_write`] and [`rope_write_absorb`].
#[derive(Debug, Clone)]
pub struct RopeWriteArgs {
    /// Queries `[N, H, d]`, of the dtype of `cache`.
    pub q: Tensor<3>,
    /// `[N, D]` of the dtype of `cache`: latents, each with its rotary key behind it.
    pub latent: Tensor<2>,
    /// f32 `[D - dr]`: the weight of the latents' norm.
    pub norm_weight: Tensor<1>,
    /// Added to the mean square in the norm.
    pub norm_eps: f32,
    /// f32 `[N, dr / 2]`: how the last `dr` channels of a token's heads and of its latent turn, in pairs of neighbours.
    pub cos: Tensor<2>,
    /// f32 `[N, dr / 2]`, as `cos`.
    pub sin: Tensor<2>,
    /// The cache `[P, S, D]`, as [`write_latent`](crate::write_latent) wants it.
    pub cache: Tensor<3>,
    /// i32 `[N]`: where each latent goes, `page * S + offset`; -1 skips it. No slot occurs twice.
    pub slots: Tensor<1, Int>,
}

/// What [`rope_write`] computed.
#[derive(Debug, Clone)]
pub struct RopeWritten {
    /// `[N, H, d]`: the turned queries.
    pub q: Tensor<3>,
    /// `[N, D]`: the normed latents with their turned keys, as they are in the cache.
    pub latent: Tensor<2>,
    /// The cache's own buffer.
    pub cache: Tensor<3>,
}

/// Turns queries; norms latents, turns the rotary keys behind them and writes both into the cache, in place. As
/// [`norm_rope`](crate::norm_rope()) twice and [`write_latent`](crate::write_latent), bit for bit, in one launch.
///
/// # Errors
/// As those: nothing is launched, and the cache comes back in the error, unchanged.
pub fn rope_write(args: RopeWriteArgs) -> Result<RopeWritten, Box<WriteLatentError>> {
    let (q, latents) = checked("rope_write", args, None)?.into_backend();
    let (q, latent, cache) = tensors(<Dispatch as RopeWriteBackend>::rope_write(q, latents));
    Ok(RopeWritten { q, latent, cache })
}

/// [`rope_write`], and the turned query absorbed: [`linear_by_head`](crate::linear_by_head()) with a weight `[H, R, dn]` of its
/// dtype, where `d = dn + dr`. Returns the query `[N, H, R + dr]` and the cache. Bit for bit those two; of a few tokens on a GPU
/// with matrix instructions in one launch.
///
/// # Errors
/// As [`rope_write`], and for a weight of another shape or dtype.
pub fn rope_write_absorb(
    args: RopeWriteArgs,
    weight: Tensor<3>,
    determinism: Determinism,
) -> Result<(Tensor<3>, Tensor<3>), Box<WriteLatentError>> {
    let args = checked("rope_write_absorb", args, Some(&weight))?;
    let [tokens, ..] = args.q.dims();
    if !(1..=MAX_ROWS).contains(&tokens) || weight.shape().num_elements() == 0 || !has_kernels(&args.q.device()) {
        let RopeWritten { q, cache, .. } = rope_write(args)?;
        return Ok((linear_by_head(q, weight, determinism), cache));
    }
    let (q, latents) = args.into_backend();
    Ok(tensors(<Dispatch as RopeWriteBackend>::rope_write_absorb(q, latents, weight.into_dispatch())))
}

impl RopeWriteArgs {
    fn into_backend(self) -> (DispatchTensor, BackendLatents<Dispatch>) {
        let latents = BackendLatents {
            latent: self.latent.into_dispatch(),
            norm_weight: self.norm_weight.into_dispatch(),
            cos: self.cos.into_dispatch(),
            sin: self.sin.into_dispatch(),
            cache: self.cache.into_dispatch(),
            slots: self.slots.into_dispatch(),
            norm_eps: self.norm_eps,
        };
        (self.q.into_dispatch(), latents)
    }
}

/// The arguments, if they fulfil what a call must.
fn checked(
    op: &'static str,
    args: RopeWriteArgs,
    weight: Option<&Tensor<3>>,
) -> Result<RopeWriteArgs, Box<WriteLatentError>> {
    let RopeWriteArgs { q, latent, norm_weight, norm_eps, cos, sin, cache, slots } = args;
    let write = WriteLatentArgs { cache, slots, latent, rope: None };
    if let Err(error) = check(op, &write, (&q, weight), (&norm_weight, norm_eps), [&cos, &sin]) {
        return Err(Box::new(WriteLatentError { error, cache: write.cache }));
    }
    let WriteLatentArgs { cache, slots, latent, .. } = write;
    Ok(RopeWriteArgs { q, latent, norm_weight, norm_eps, cos, sin, cache, slots })
}

fn check(
    op: &'static str,
    write: &WriteLatentArgs,
    (q, weight): (&Tensor<3>, Option<&Tensor<3>>),
    (norm_weight, norm_eps): (&Tensor<1>, f32),
    tables: [&Tensor<2>; 2],
) -> Result<(), MlaError> {
    let check = write.check_call(op)?;
    let [tokens, cache_width] = write.latent.dims();
    check.float_as("q", q, write.cache.dtype(), "the dtype of `cache`")?;
    check.dims("q", q.dims(), [Some(tokens), None, None], || format!("[N, H, d] with N = {tokens}"))?;
    let [_, heads, width] = q.dims();
    let pairs = check_tables(&check, tables, tokens, width.min(cache_width))?;
    let normed = cache_width - 2 * pairs;
    check.float_as("norm_weight", norm_weight, DType::F32, "always")?;
    check.dims("norm_weight", norm_weight.dims(), [Some(normed)], || format!("[D - dr] = [{normed}]"))?;
    check_eps(&check, "norm_eps", norm_eps)?;
    if let Some(weight) = weight {
        check.float_as("weight", weight, q.dtype(), "that of `q`")?;
        let still = width - 2 * pairs;
        check.dims("weight", weight.dims(), [Some(heads), None, Some(still)], || {
            format!("[H, R, d - dr] with H = {heads} and d - dr = {still}")
        })?;
        check.elements("weight", weight)?;
    }
    check.elements("q", q)?;
    Ok(())
}
