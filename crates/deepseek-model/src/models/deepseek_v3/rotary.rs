use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::cache::Pool;
use mla_ops::{
    MlaError, RopeConfig, RopeQuery, RopeWriteArgs, RopeWritten, WriteLatentArgs, WriteLatentError, linear_by_head,
    rms_norm, rope_write, write_latent,
};

use crate::layers::{RmsNorm, RopeTable};

/// Rotary position embedding of a rotary width `dr` (RoFormer §3.2.2; YaRN through the frequencies).
#[derive(Debug, Clone)]
pub(crate) struct RotaryEmbedding {
    table: RopeTable,
    /// Interleaved: pairs of channels `(2i, 2i + 1)`; otherwise `(i, i + dr / 2)`.
    interleaved: bool,
}

/// The rotation of each token of a step, the same in all layers.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    /// f32 `[N, dr / 2]`.
    cos: Tensor<2>,
    /// f32 `[N, dr / 2]`.
    sin: Tensor<2>,
    interleaved: bool,
}

impl RotaryEmbedding {
    pub(crate) fn new(rope: &RopeConfig, width: usize, interleaved: bool) -> Self {
        Self { table: RopeTable::new(rope, width), interleaved }
    }

    /// The rotations at these positions.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Result<Rotation, MlaError> {
        let [cos, sin] = self.table.at(positions, device)?;
        Ok(Rotation { cos, sin, interleaved: self.interleaved })
    }

    /// The rotations at the first positions, as many at least: the same tensors for all who ask, unless nobody asked for as many.
    pub(crate) fn first(&self, positions: usize, device: &Device) -> Result<Rotation, MlaError> {
        let [cos, sin] = self.table.first(positions, device)?;
        Ok(Rotation { cos, sin, interleaved: self.interleaved })
    }
}

impl Rotation {
    /// The rotations of these tokens, i32 `[M]`.
    pub(crate) fn select(&self, tokens: Tensor<1, Int>) -> Self {
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.clone().select(0, tokens.clone()));
        Self { cos, sin, ..*self }
    }

    /// Where the tables are.
    #[cfg(all(test, feature = "flex"))]
    pub(crate) fn addresses(&self) -> [*const u8; 2] {
        [&self.cos, &self.sin].map(|table| {
            let primitive = table.clone().try_into_primitive::<burn::backend::Flex>();
            primitive.expect("on the CPU").bytes().as_ptr()
        })
    }

    /// Applies RoPE to queries `[N, heads, d]` and absorbs them where asked to, norms latents `[N, D]` and applies RoPE to their
    /// rotary keys, and puts the latents into these slots of the cache. Which of the last `dr` channels a pair ends up in is the
    /// same for all tensors of a layer: queries and keys only ever meet in dot products, so that any order of the channels serves.
    pub(crate) fn rope_and_write(
        &self,
        query: RopeQuery,
        latent: Tensor<2>,
        norm: &RmsNorm,
        (cache, slots): (Pool, Tensor<1, Int>),
    ) -> std::result::Result<RopeWritten, Box<WriteLatentError>> {
        if self.interleaved {
            let [cos, sin] = [&self.cos, &self.sin].map(Tensor::clone);
            let (norm_weight, norm_eps) = (norm.weight.val(), norm.eps);
            let (q_norm_eps, index_q) = (None, None);
            #[rustfmt::skip]
            let written = rope_write(RopeWriteArgs {
                query, latent, norm_weight, norm_eps, q_norm_eps, index_q, cos, sin, cache, slots, compressors: vec![],
            });
            return Ok(written?);
        }
        let [still, rotary] = self.split(&latent.unsqueeze_dim(1));
        let latent = rms_norm(still.squeeze_dim(1), norm.weight.val(), norm.eps)
            .map(|normed| Tensor::cat(vec![normed, self.rotate_halves(rotary).squeeze_dim(1)], 1));
        let rotate = |q: Tensor<3>| {
            let [still, rotary] = self.split(&q);
            Tensor::cat(vec![still, self.rotate_halves(rotary)], 2)
        };
        let q = match query {
            RopeQuery::Heads(q) => Ok(rotate(q)),
            RopeQuery::Absorbed { q, weight, determinism } => linear_by_head(rotate(q), &weight, determinism),
        };
        let (q, latent) = match (q, latent) {
            (Ok(q), Ok(latent)) => (q, latent),
            (Err(error), _) | (_, Err(error)) => return Err(Box::new(WriteLatentError { error, cache })),
        };
        let cache = write_latent(WriteLatentArgs { cache, slots, latent: latent.clone(), rope: None })?;
        Ok(RopeWritten { q, latent: Some(latent), index_q: None, cache, compressed: vec![] })
    }

    /// The channels before the last `dr`, and those.
    fn split(&self, x: &Tensor<3>) -> [Tensor<3>; 2] {
        let ([_, _, width], [_, pairs]) = (x.dims(), self.cos.dims());
        let still = width - 2 * pairs;
        [x.clone().narrow(2, 0, still), x.clone().narrow(2, still, 2 * pairs)]
    }

    /// Applies RoPE to `[N, heads, dr]`, to pairs of channels `(i, i + dr / 2)`.
    pub(crate) fn rotate_halves(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = FloatDType::from(x.dtype());
        let half = x.dims()[2] / 2;
        let x = x.cast(FloatDType::F32);
        let (u, v) = (x.clone().narrow(2, 0, half), x.narrow(2, half, half));
        let [cos, sin] = [&self.cos, &self.sin].map(|table| table.clone().unsqueeze_dim::<3>(1));
        let turned_u = u.clone() * cos.clone() - v.clone() * sin.clone();
        let turned_v = v * cos + u * sin;
        Tensor::cat(vec![turned_u, turned_v], 2).cast(dtype)
    }
}
