use burn::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::backend::{LogProbsBackend, LogProbsSpec};
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl LogProbsBackend for Flex {
    fn log_probs(
        logits: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        spec: LogProbsSpec,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        log_probs(tensor(logits), tensor(tokens), spec.top).into_flex()
    }
}

fn log_probs(logits: Tensor<2>, tokens: Tensor<1, Int>, top: usize) -> (Tensor<1>, Tensor<2, Int>, Tensor<2>) {
    let ([batch, width], device) = (logits.dims(), logits.device());
    let logits: Vec<f32> = logits.try_into_vec_as().expect("computed on the CPU");
    let (mut chosen, mut ids, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for (logits, token) in logits.chunks(width).zip(host(tokens)) {
        let is_token = |token: &usize| !logits[*token].is_nan() && logits[*token] > f32::NEG_INFINITY;
        let finite = |token: usize| f64::from(logits[token].min(f32::MAX));
        let mut order: Vec<usize> = (0..width).filter(is_token).collect();
        // Stable: of equal logits the lowest id comes first.
        order.sort_by(|&a, &b| finite(b).partial_cmp(&finite(a)).expect("no NaN"));
        let largest = order.first().map_or(0.0, |&token| finite(token));
        let lse = largest + order.iter().map(|&token| (finite(token) - largest).exp()).sum::<f64>().ln();
        let of = |token: usize| (finite(token) - lse) as f32;
        let token = usize::try_from(token).ok().filter(|&token| token < width && is_token(&token));
        chosen.push(token.map_or(f32::NEG_INFINITY, of));
        for place in 0..top {
            let token = order.get(place).copied();
            ids.push(token.map_or(-1, |token| token as i32));
            values.push(token.map_or(f32::NEG_INFINITY, of));
        }
    }
    let ids = device_i32(ids, [batch, top], &device);
    (floats(chosen, [batch], &device), ids, floats(values, [batch, top], &device))
}

fn floats<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}
