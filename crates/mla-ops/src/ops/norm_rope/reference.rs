//! Norm and RoPE in loops over the values in memory, where tensor operations would go over them a dozen times.

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{FloatDType, Tensor, TensorData};

use super::backend::{BackendNorm, BackendRope, NormRopeBackend};
use crate::independent::{map_independent, piece_len};
use crate::reference::{IntoFlex, tensor};

impl NormRopeBackend for Flex {
    fn norm_rope(
        x: FloatTensor<Self>,
        norm: BackendNorm<Self>,
        rope: BackendRope<Self>,
        norm_whole_head: bool,
    ) -> FloatTensor<Self> {
        let norm = match norm {
            BackendNorm::None => Norm::None,
            BackendNorm::Plain(eps) => Norm::Plain(eps),
            BackendNorm::Weighted(weight, eps) => Norm::Weighted(tensor(weight), eps),
        };
        let rope = match rope {
            BackendRope::None => Rope::None,
            BackendRope::Tables { cos, sin, inverse } => Rope::Tables([tensor(cos), tensor(sin)], inverse),
        };
        norm_rope(tensor(x), norm, rope, norm_whole_head).into_flex()
    }
}

/// The norm of heads.
pub(crate) enum Norm {
    /// There is none.
    None,
    /// Without a weight; what is added to the mean square.
    Plain(f32),
    /// With a weight f32 `[d]` or `[d - dr]`; what is added to the mean square.
    Weighted(Tensor<1>, f32),
}

/// RoPE of the last channels of heads.
pub(crate) enum Rope {
    /// There is none.
    None,
    /// Cosines and sines f32 `[N, dr / 2]`, and whether it is inverse RoPE.
    Tables([Tensor<2>; 2], bool),
}

/// x `[N, d]`, weight f32 `[d]`: `[N, d]` in the dtype of x.
pub(crate) fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f32) -> Tensor<2> {
    norm_rope(x.unsqueeze_dim(1), Norm::Weighted(weight, eps), Rope::None, true).squeeze_dim(1)
}

/// x `[N, H, d]`: `[N, H, d]` in the dtype of x. The norm is that of all channels, or of those alone that RoPE leaves out.
pub(crate) fn norm_rope(x: Tensor<3>, norm: Norm, rope: Rope, norm_whole_head: bool) -> Tensor<3> {
    let ([tokens, heads, width], dtype, device) = (x.dims(), x.dtype(), x.device());
    if tokens * heads * width == 0 {
        return x;
    }
    let (eps, weight) = match norm {
        Norm::None => (None, None),
        Norm::Plain(eps) => (Some(eps), None),
        Norm::Weighted(weight, eps) => (Some(eps), Some(values(weight))),
    };
    let (pairs, [cos, sin], inverse) = match rope {
        Rope::None => (0, [vec![], vec![]], false),
        Rope::Tables(tables, inverse) => (tables[0].dims()[1], tables.map(values), inverse),
    };
    let normed = if norm_whole_head { width } else { width - 2 * pairs };
    let sign = if inverse { -1.0 } else { 1.0 };
    let mut x = values(x.cast(FloatDType::F32));

    let piece = piece_len(tokens, tokens * heads * width);
    let pieces = x.chunks_mut(piece * heads * width).enumerate().collect();
    map_independent(&device, tokens * heads * width, pieces, |(i, x): (usize, &mut [f32])| {
        for (row, head) in x.chunks_exact_mut(width).enumerate() {
            if let Some(eps) = eps {
                normalise(&mut head[..normed], weight.as_deref(), eps);
            }
            let token = i * piece + row / heads;
            let angles = cos[token * pairs..][..pairs].iter().zip(&sin[token * pairs..][..pairs]);
            for (pair, (cos, sin)) in head[width - 2 * pairs..].chunks_exact_mut(2).zip(angles) {
                let (u, v) = (pair[0], pair[1]);
                pair[0] = u * cos - v * (sign * sin);
                pair[1] = v * cos + u * (sign * sin);
            }
        }
    });
    Tensor::from_data(TensorData::new(x, [tokens, heads, width]), (&device, dtype))
}

/// What the norm multiplies a row with.
pub(crate) fn scale_of(row: &[f32], eps: f32) -> f32 {
    // Several sums, which the CPU adds up side by side.
    let mut sums = [0.0; 16];
    for values in row.chunks(sums.len()) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * value);
    }
    let squares: f32 = sums.iter().sum();
    (squares / row.len() as f32 + eps).sqrt().recip()
}

fn normalise(head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let scale = scale_of(head, eps);
    match weight {
        Some(weight) => head.iter_mut().zip(weight).for_each(|(value, weight)| *value *= scale * weight),
        None => head.iter_mut().for_each(|value| *value *= scale),
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as().expect("computed on the CPU")
}
