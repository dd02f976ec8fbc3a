use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, s};

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
    /// f32 `[N, 1, dr / 2]`.
    cos: Tensor<3>,
    /// f32 `[N, 1, dr / 2]`.
    sin: Tensor<3>,
    interleaved: bool,
}

impl RotaryEmbedding {
    pub(crate) fn new(rope: &RopeConfig, width: usize, interleaved: bool) -> Self {
        Self { rope: rope.clone(), width, interleaved }
    }

    /// The rotations at these positions.
    pub(crate) fn at(&self, positions: &[usize], device: &Device) -> Rotation {
        let (cos, sin) = self.rope.cos_sin(self.width, positions);
        let shape = [positions.len(), 1, self.width / 2];
        let tensor = |values| Tensor::from_data(TensorData::new(values, shape), (device, DType::F32));
        Rotation { cos: tensor(cos), sin: tensor(sin), interleaved: self.interleaved }
    }
}

impl Rotation {
    /// Puts other angles for as many tokens into the same buffers.
    pub(crate) fn refresh(&mut self, rotation: Rotation) {
        let size = self.cos.dims();
        let all = s![..size[0], .., ..];
        self.cos.inplace(|cos| cos.slice_assign(all, rotation.cos));
        self.sin.inplace(|sin| sin.slice_assign(all, rotation.sin));
    }

    /// The same angles for channels `(i, i + dr / 2)`.
    pub(crate) fn in_halves(&self) -> Self {
        Self { interleaved: false, ..self.clone() }
    }

    /// Turns `[N, heads, dr]`. The turned pairs come out as halves, whatever the pairing: queries and keys only ever
    /// meet in dot products, so that any order of the channels serves as long as both have it.
    pub(crate) fn apply(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = FloatDType::from(x.dtype());
        let [tokens, heads, width] = x.dims();
        let half = width / 2;
        let x = x.cast(FloatDType::F32);
        let (u, v) = if self.interleaved {
            let pairs = x.reshape([tokens, heads, half, 2]);
            (pairs.clone().narrow(3, 0, 1).squeeze_dim(3), pairs.narrow(3, 1, 1).squeeze_dim(3))
        } else {
            (x.clone().narrow(2, 0, half), x.narrow(2, half, half))
        };
        let (cos, sin) = (&self.cos, &self.sin);
        let turned_u = u.clone() * cos.clone() - v.clone() * sin.clone();
        let turned_v = v * cos.clone() + u * sin.clone();
        Tensor::cat(vec![turned_u, turned_v], 2).cast(dtype)
    }
}
