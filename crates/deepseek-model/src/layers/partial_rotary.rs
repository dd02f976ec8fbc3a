use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use crate::config::RopeConfig;

/// Rotary embedding of the trailing channels of a head (DeepSeek-V4): `(2i, 2i + 1)` of them turn together.
#[derive(Debug, Clone)]
pub(crate) struct PartialRotary {
    rope: RopeConfig,
    /// `dr`.
    width: usize,
}

/// The rotations of some tokens.
#[derive(Debug, Clone)]
pub(crate) struct PartialRotation {
    /// f32 `[N, 1, dr / 2, 1]`.
    cos: Tensor<4>,
    /// f32 `[N, 1, dr / 2, 1]`.
    sin: Tensor<4>,
}

impl PartialRotary {
    pub(crate) fn new(rope: &RopeConfig, width: usize) -> Self {
        Self { rope: rope.clone(), width }
    }

    /// The rotations at these positions.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> PartialRotation {
        let (cos, sin) = self.tables(positions, [positions.len(), 1], device);
        PartialRotation { cos: cos.unsqueeze_dim(3), sin: sin.unsqueeze_dim(3) }
    }

    /// Cosines and sines at these positions, f32 `[shape[0], shape[1], dr / 2]` each.
    pub(crate) fn tables(&self, positions: &[usize], shape: [usize; 2], device: &Device) -> (Tensor<3>, Tensor<3>) {
        let (cos, sin) = self.rope.cos_sin(self.width, positions);
        let shape = [shape[0], shape[1], self.width / 2];
        let tensor = |values| Tensor::from_data(TensorData::new(values, shape), (device, DType::F32));
        (tensor(cos), tensor(sin))
    }
}

impl PartialRotation {
    /// Turns the trailing channels of `[N, heads, d]`; all channels keep their places.
    pub(crate) fn apply(&self, x: Tensor<3>) -> Tensor<3> {
        self.turn(x, self.sin.clone())
    }

    /// Turns them back: the values that attention adds up are turned keys.
    pub(crate) fn invert(&self, x: Tensor<3>) -> Tensor<3> {
        self.turn(x, -self.sin.clone())
    }

    fn turn(&self, x: Tensor<3>, sin: Tensor<4>) -> Tensor<3> {
        let dtype = FloatDType::from(x.dtype());
        let [tokens, heads, width] = x.dims();
        let half = self.cos.dims()[2];
        let still = width - 2 * half;
        let pairs = x.clone().narrow(2, still, 2 * half).cast(FloatDType::F32).reshape([tokens, heads, half, 2]);
        let (u, v) = (pairs.clone().narrow(3, 0, 1), pairs.narrow(3, 1, 1));
        let turned_u = u.clone() * self.cos.clone() - v.clone() * sin.clone();
        let turned_v = v * self.cos.clone() + u * sin;
        let turned = Tensor::cat(vec![turned_u, turned_v], 3).reshape([tokens, heads, 2 * half]).cast(dtype);
        match still {
            0 => turned,
            _ => Tensor::cat(vec![x.narrow(2, 0, still), turned], 2),
        }
    }
}
