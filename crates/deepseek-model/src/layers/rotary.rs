use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, s};
use mla_ops::{NormRopeArgs, NormRopeOptions, norm_rope};

use super::RmsNorm;
use crate::Result;
use crate::config::RopeConfig;

/// Rotary position embedding of a rotary width `dr` (RoFormer §3.2.2; YaRN through the frequencies).
#[derive(Debug, Clone)]
pub(crate) struct RotaryEmbedding {
    rope: RopeConfig,
    /// `dr`.
    width: usize,
    /// Channels `(2i, 2i + 1)` turn together; otherwise `(i, i + dr / 2)`.
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
        Self { rope: rope.clone(), width, interleaved }
    }

    /// The rotations at these positions.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Rotation {
        self.rotation(self.angles(positions, device))
    }

    /// Cosines of all positions, then their sines, f32 `[2 · N · dr / 2]`: in one piece, so that they can be refreshed at once.
    pub(crate) fn angles(&self, positions: &[usize], device: &Device) -> Tensor<1> {
        let (mut angles, sin) = self.rope.cos_sin(self.width, positions);
        angles.extend(sin);
        let len = angles.len();
        Tensor::from_data(TensorData::new(angles, [len]), (device, DType::F32))
    }

    /// The rotations of [`Self::angles`].
    pub(crate) fn rotation(&self, angles: Tensor<1>) -> Rotation {
        let [len] = angles.dims();
        let part = |first: usize| {
            let part = angles.clone().slice(s![first..first + len / 2]);
            part.reshape([len / self.width, self.width / 2])
        };
        Rotation { cos: part(0), sin: part(len / 2), interleaved: self.interleaved }
    }
}

impl Rotation {
    /// Turns the last `dr` channels of `[N, heads, d]`. Which of them a pair ends up in is the same for all tensors of a
    /// layer: queries and keys only ever meet in dot products, so that any order of the channels serves.
    pub(crate) fn turn(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        if self.interleaved {
            let options = NormRopeOptions { norm_eps: None, norm_turned: false, inverse: false };
            return self.norm_rope(x, None, &options);
        }
        let [still, turned] = self.split(&x);
        Ok(Tensor::cat(vec![still, self.turn_halves(turned)], 2))
    }

    /// Norms the first channels of `[N, d]`, and turns the last `dr`: a latent and its rotary key.
    pub(crate) fn norm_and_turn(&self, x: Tensor<2>, norm: &RmsNorm) -> Result<Tensor<2>> {
        let x = x.unsqueeze_dim::<3>(1);
        if self.interleaved {
            let options = NormRopeOptions { norm_eps: Some(norm.eps), norm_turned: false, inverse: false };
            return Ok(self.norm_rope(x, Some(norm.weight.clone()), &options)?.squeeze_dim(1));
        }
        let [still, turned] = self.split(&x);
        let turned = self.turn_halves(turned).squeeze_dim(1);
        Ok(Tensor::cat(vec![norm.forward(still.squeeze_dim(1))?, turned], 1))
    }

    fn norm_rope(&self, x: Tensor<3>, weight: Option<Tensor<1>>, options: &NormRopeOptions) -> Result<Tensor<3>> {
        Ok(norm_rope(NormRopeArgs { x, weight, cos: self.cos.clone(), sin: self.sin.clone() }, options)?)
    }

    /// The channels before the last `dr`, and those.
    fn split(&self, x: &Tensor<3>) -> [Tensor<3>; 2] {
        let ([_, _, width], [_, pairs]) = (x.dims(), self.cos.dims());
        let still = width - 2 * pairs;
        [x.clone().narrow(2, 0, still), x.clone().narrow(2, still, 2 * pairs)]
    }

    /// Turns `[N, heads, dr]`: channels `(i, i + dr / 2)` together.
    pub(crate) fn turn_halves(&self, x: Tensor<3>) -> Tensor<3> {
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
