//! Norm and rotation in loops over the values in memory, where tensor operations would go over them a dozen times.

use burn::tensor::{FloatDType, Tensor, TensorData};

use crate::backend::NormRopeSpec;
use crate::independent::{map_independent, piece_len};

/// x `[N, H, d]`, weight f32 `[d]` or `[d - dr]`, cosines and sines f32 `[N, dr / 2]`: `[N, H, d]` in the dtype of x.
pub(crate) fn norm_rope(
    x: Tensor<3>,
    weight: Option<Tensor<1>>,
    tables: Option<[Tensor<2>; 2]>,
    spec: &NormRopeSpec,
) -> Tensor<3> {
    let ([tokens, heads, width], dtype, device) = (x.dims(), x.dtype(), x.device());
    if tokens * heads * width == 0 {
        return x;
    }
    let pairs = spec.pairs;
    let weight = weight.map(values);
    let [cos, sin] = tables.map_or([vec![], vec![]], |tables| tables.map(values));
    let normed = if spec.norm_turned { width } else { width - 2 * pairs };
    let sign = if spec.inverse { -1.0 } else { 1.0 };
    let mut x = values(x.cast(FloatDType::F32));

    let piece = piece_len(tokens, tokens * heads * width);
    let pieces = x.chunks_mut(piece * heads * width).enumerate().collect();
    map_independent(&device, tokens * heads * width, pieces, |(i, x): (usize, &mut [f32])| {
        for (row, head) in x.chunks_exact_mut(width).enumerate() {
            if let Some(eps) = spec.norm_eps {
                norm(&mut head[..normed], weight.as_deref(), eps);
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

fn norm(head: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    // Several sums, which the CPU adds up side by side.
    let mut sums = [0.0; 16];
    for values in head.chunks(sums.len()) {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value * value);
    }
    let squares: f32 = sums.iter().sum();
    let scale = (squares / head.len() as f32 + eps).sqrt().recip();
    match weight {
        Some(weight) => head.iter_mut().zip(weight).for_each(|(value, weight)| *value *= scale * weight),
        None => head.iter_mut().for_each(|value| *value *= scale),
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as().expect("computed on the CPU")
}
