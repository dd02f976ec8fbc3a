//! [`rope_write`]: what stands between the projections of multi-head latent attention and the attention.

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use super::norm_rope::{check_eps, check_tables};
use super::write_latent::{WriteLatentArgs, WriteLatentError};
use crate::MlaError;
use crate::backend::MlaBackend;

const OP: &str = "rope_write";

/// Arguments of [`rope_write`].
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
    let RopeWriteArgs { q, latent, norm_weight, norm_eps, cos, sin, cache, slots } = args;
    let write = WriteLatentArgs { cache, slots, latent, rope: None };
    if let Err(error) = check(&write, &q, (&norm_weight, norm_eps), [&cos, &sin]) {
        return Err(Box::new(WriteLatentError { error, cache: write.cache }));
    }
    let WriteLatentArgs { cache, slots, latent, .. } = write;
    let (q, latent, cache) = <Dispatch as MlaBackend>::rope_write(
        q.into_dispatch(),
        latent.into_dispatch(),
        norm_weight.into_dispatch(),
        cos.into_dispatch(),
        sin.into_dispatch(),
        cache.into_dispatch(),
        slots.into_dispatch(),
        norm_eps,
    );
    let [q, cache] = [q, cache].map(Tensor::from_dispatch);
    Ok(RopeWritten { q, latent: Tensor::from_dispatch(latent), cache })
}

fn check(
    write: &WriteLatentArgs,
    q: &Tensor<3>,
    (norm_weight, norm_eps): (&Tensor<1>, f32),
    tables: [&Tensor<2>; 2],
) -> Result<(), MlaError> {
    let check = write.check_call(OP)?;
    let [tokens, cache_width] = write.latent.dims();
    check.float_as("q", q, write.cache.dtype(), "the dtype of `cache`")?;
    check.dims("q", q.dims(), [Some(tokens), None, None], || format!("[N, H, d] with N = {tokens}"))?;
    let [_, _, width] = q.dims();
    let pairs = check_tables(&check, tables, tokens, width.min(cache_width))?;
    let normed = cache_width - 2 * pairs;
    check.float_as("norm_weight", norm_weight, DType::F32, "always")?;
    check.dims("norm_weight", norm_weight.dims(), [Some(normed)], || format!("[D - dr] = [{normed}]"))?;
    check_eps(&check, "norm_eps", norm_eps)?;
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    crate::limits::elements(&check, "q", q)?;
    Ok(())
}
