use burn::tensor::{DType, Device, Int, Tensor};
use mla_ops::{
    CompressKvArgs, CompressKvOptions, InverseRope, MlaError, NormRopeArgs, NormRopeOptions, RopeConfig, RopeQuery,
    RopeWriteArgs, RopeWriteError, RopeWritten, norm_rope, rope_write,
};

use crate::layers::RopeTable;

/// Rotary embedding of the trailing channels of a head (DeepSeek-V4): in pairs `(2i, 2i + 1)`.
#[derive(Debug, Clone)]
pub(crate) struct PartialRotary(RopeTable);

/// The rotations of some tokens.
#[derive(Debug, Clone)]
pub(crate) struct PartialRotation {
    /// f32 `[N, dr / 2]`.
    cos: Tensor<2>,
    /// f32 `[N, dr / 2]`.
    sin: Tensor<2>,
}

impl PartialRotary {
    pub(crate) fn new(rope: &RopeConfig, width: usize) -> Self {
        Self(RopeTable::new(rope, width))
    }

    /// The rotations at these positions.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Result<PartialRotation, MlaError> {
        let [cos, sin] = self.0.at(positions, device)?;
        Ok(PartialRotation { cos, sin })
    }

    /// The rotations at the first positions, as many at least: the same tensors for all who ask, unless nobody asked for as many.
    pub(crate) fn first(&self, positions: usize, device: &Device) -> Result<PartialRotation, MlaError> {
        let [cos, sin] = self.0.first(positions, device)?;
        Ok(PartialRotation { cos, sin })
    }

    /// Cosines, then sines at the first positions, as many at least: f32 `[2 · positions, dr / 2]`, the same for all who ask.
    pub(crate) fn joined(&self, positions: usize, device: &Device) -> Result<Tensor<2>, MlaError> {
        self.0.joined(positions, device)
    }
}

impl PartialRotation {
    /// Of cosines and sines, f32 `[N, dr / 2]` each.
    pub(crate) fn of([cos, sin]: [Tensor<2>; 2]) -> Self {
        Self { cos, sin }
    }

    /// Cosines and sines, f32 `[N, 1, dr / 2]` each.
    pub(crate) fn of_entries(self) -> (Tensor<3>, Tensor<3>) {
        (self.cos.unsqueeze_dim(1), self.sin.unsqueeze_dim(1))
    }

    /// Cosines and sines of these tokens, i32 `[M]`, with M the product of `shape`: f32 `[shape[0], shape[1], dr / 2]` each.
    pub(crate) fn tables(&self, tokens: &Tensor<1, Int>, shape: [usize; 2]) -> (Tensor<3>, Tensor<3>) {
        let shape = [shape[0], shape[1], self.cos.dims()[1]];
        if tokens.dims() == [0] {
            // A reshape to 0 of something would keep the dimension that is there.
            let none = Tensor::empty(shape, (&tokens.device(), DType::F32));
            return (none.clone(), none);
        }
        let [cos, sin] = [&self.cos, &self.sin].map(|rows| rows.clone().select(0, tokens.clone()));
        (cos.reshape(shape), sin.reshape(shape))
    }

    /// Norms each head of q `[N, H, d]`, and keys kv `[N, d]` with a weight f32 `[d]`, applies RoPE to their trailing channels and to those
    /// of an indexer's heads `[N, Hi, di]`, and puts the keys into these slots of a cache; compressors take in the same tokens. All channels
    /// keep their places.
    pub(crate) fn norm_and_write(
        &self,
        (q, index_q): (Tensor<3>, Option<Tensor<3>>),
        kv: Tensor<2>,
        (norm_weight, norm_eps): (Tensor<1>, f32),
        (cache, slots): (Tensor<3>, Tensor<1, Int>),
        compressors: Vec<(CompressKvArgs, CompressKvOptions)>,
    ) -> std::result::Result<RopeWritten, Box<RopeWriteError>> {
        rope_write(RopeWriteArgs {
            query: RopeQuery::Heads(q),
            latent: kv,
            norm_weight,
            norm_eps,
            q_norm_eps: Some(norm_eps),
            index_q,
            cos: self.cos.clone(),
            sin: self.sin.clone(),
            cache: cache.into(),
            slots,
            compressors,
        })
    }

    /// RoPE on the trailing channels of heads `[N, heads, d]`.
    pub(crate) fn rotate(&self, x: Tensor<3>) -> Result<Tensor<3>, MlaError> {
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        norm_rope(NormRopeArgs { x, weight: None, cos, sin }, &NormRopeOptions::default())
    }

    /// Heads `[N, heads, d]` before the inverse RoPE of their trailing channels: the values that attention sums are keys with RoPE applied.
    pub(crate) fn invert(&self, x: Tensor<3>) -> InverseRope {
        InverseRope { x, cos: self.cos.clone(), sin: self.sin.clone() }
    }
}
