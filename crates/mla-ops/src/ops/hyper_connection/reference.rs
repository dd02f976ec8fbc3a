//! Hyper-connections in loops over the values in memory.

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};

use super::MhcOptions;
use super::backend::{
    BackendMixer, BackendMixerProducts, BackendMixing, BackendRead, BackendStreams, HyperConnectionBackend,
};
use crate::independent::{map_independent, piece_len};
use crate::ops::norm_rope::reference::{rms_norm, scale_of};
use crate::reference::{IntoFlex, tensor};

impl HyperConnectionBackend for Flex {
    /// In one part.
    fn mhc_project(streams: BackendStreams<Self>, weight: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let streams: Tensor<3> = tensor(match streams {
            BackendStreams::InMemory(streams) => streams,
            BackendStreams::Mixed(output, mixing) => Self::mhc_post(output, mixing),
        });
        let parts = projected(streams.clone(), tensor(weight));
        (streams.into_flex(), parts.into_flex())
    }

    fn mhc_pre(
        streams: FloatTensor<Self>,
        products: BackendMixerProducts<Self>,
        norm_weight: FloatTensor<Self>,
        mixer: BackendMixer<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let streams: Tensor<3> = tensor(streams);
        let ([tokens, n, _], device, mixer) = (streams.dims(), streams.device(), Mixer::new(mixer));
        let (input, numbers) = mixer.read(streams, products);
        let part = |first: usize, len: usize| -> Vec<f32> {
            numbers.chunks_exact(mixer.base.len() + 1).flat_map(|token| &token[first..first + len]).copied().collect()
        };
        let post = TensorData::new(part(n, n), [tokens, n]);
        let comb = TensorData::new(part(2 * n, n * n), [tokens, n, n]);
        (
            rms_norm(input, tensor(norm_weight), mixer.options.norm_eps).into_flex(),
            Tensor::<2>::from_data(post, (&device, DType::F32)).into_flex(),
            Tensor::<3>::from_data(comb, (&device, DType::F32)).into_flex(),
        )
    }

    fn mhc_read(
        streams: BackendStreams<Self>,
        weight: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        mixer: BackendMixer<Self>,
    ) -> BackendRead<Self> {
        let (streams, parts) = Self::mhc_project(streams, weight);
        let products = BackendMixerProducts::InParts(parts);
        let (input, post, comb) = Self::mhc_pre(streams.clone(), products, norm_weight, mixer);
        BackendRead { streams, input, post, comb }
    }

    fn mhc_head(
        streams: FloatTensor<Self>,
        products: BackendMixerProducts<Self>,
        mixer: BackendMixer<Self>,
    ) -> FloatTensor<Self> {
        let (input, _) = Mixer::new(mixer).read(tensor(streams), products);
        input.into_flex()
    }

    fn mhc_post(output: FloatTensor<Self>, mixing: BackendMixing<Self>) -> FloatTensor<Self> {
        let BackendMixing { streams, post, comb } = mixing;
        mixed(tensor(streams), tensor(output), &values::<2>(tensor(post)), &values::<3>(tensor(comb))).into_flex()
    }
}

/// Products of the streams `[N, n, d]` with a weight f32 `[m, n d]`, and the sum of their squares: f32 `[N, 1, m + 1]`.
fn projected(streams: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let ([tokens, ..], [rows, inputs], device) = (streams.dims(), weight.dims(), streams.device());
    let (x, weight, work) = (values(streams), values(weight), tokens * (rows + 1) * inputs);
    let tokens: Vec<&[f32]> = x.chunks_exact(inputs).collect();
    let parts = map_independent(&device, work, tokens.clone(), |x| -> Vec<f32> {
        weight.chunks_exact(inputs).chain([x]).map(|row| product(row, x)).collect()
    });
    Tensor::from_data(TensorData::new(parts.concat(), [tokens.len(), 1, rows + 1]), (&device, DType::F32))
}

struct Mixer {
    scale: Vec<f32>,
    base: Vec<f32>,
    options: MhcOptions,
}

impl Mixer {
    fn new(mixer: BackendMixer<Flex>) -> Self {
        let BackendMixer { scale, base, options } = mixer;
        Self { scale: values::<1>(tensor(scale)), base: values::<1>(tensor(base)), options }
    }

    /// The sums of the streams `[N, n, d]`, before any norm; of their products what becomes of them, and a number behind: pre, post and
    /// comb, `[N, m + 1]`.
    fn read(&self, streams: Tensor<3>, products: BackendMixerProducts<Flex>) -> (Tensor<2>, Vec<f32>) {
        let ([tokens, n, width], dtype, device) = (streams.dims(), streams.dtype(), streams.device());
        let (x, work) = (values(streams), 3 * tokens * n * width);
        let (piece, count) = (piece_len(tokens, work), self.base.len() + 1);
        let mut products = self.with_factors(products, &x);
        let numbers = products.chunks_mut(piece * count).zip(x.chunks(piece * n * width)).collect();
        let inputs = map_independent(&device, work, numbers, |(numbers, x): (&mut [f32], &[f32])| {
            let tokens = numbers.chunks_exact_mut(count).zip(x.chunks_exact(n * width));
            tokens.flat_map(|(numbers, x)| self.read_token(numbers, x, n)).collect::<Vec<f32>>()
        });
        let inputs = TensorData::new(inputs.concat(), [tokens, width]);
        (Tensor::from_data(inputs, (&device, dtype)), products)
    }

    /// The products of each token, and behind them the factor of their norm: `[N, m + 1]`.
    fn with_factors(&self, products: BackendMixerProducts<Flex>, x: &[f32]) -> Vec<f32> {
        let (rows, eps) = (self.base.len(), self.options.norm_eps);
        match products {
            BackendMixerProducts::Whole(products) => {
                let products = values::<2>(tensor(products));
                let inputs = x.len() / (products.len() / rows);
                let tokens = products.chunks_exact(rows).zip(x.chunks_exact(inputs));
                tokens.flat_map(|(products, x)| products.iter().copied().chain([scale_of(x, eps)])).collect()
            }
            BackendMixerProducts::InParts(parts) => {
                let parts: Tensor<3> = tensor(parts);
                let [tokens, ..] = parts.dims();
                let mut sums = values(parts.sum_dim(1));
                let inputs = (x.len() / tokens) as f32;
                for squares in sums.iter_mut().skip(rows).step_by(rows + 1) {
                    *squares = (*squares / inputs + eps).sqrt().recip();
                }
                sums
            }
        }
    }

    /// The sum of a token's streams `x`; its products become pre, post and comb, if they are there. The number behind them is the
    /// factor of their norm.
    fn read_token(&self, numbers: &mut [f32], x: &[f32], n: usize) -> Vec<f32> {
        let eps = self.options.eps;
        let (factor, numbers) = numbers.split_last_mut().expect("there is a factor");
        for (at, (number, base)) in numbers.iter_mut().zip(&self.base).enumerate() {
            *number = *number * *factor * self.scale[(at / n).min(2)] + base;
        }
        let (pre, rest) = numbers.split_at_mut(n);
        pre.iter_mut().for_each(|pre| *pre = sigmoid(*pre) + eps);
        if let Some((post, comb)) = rest.split_at_mut_checked(n) {
            post.iter_mut().for_each(|post| *post = 2.0 * sigmoid(*post));
            self.doubly_stochastic(comb, n);
        }
        let mut sum = vec![0.0; x.len() / n];
        for (pre, stream) in pre.iter().zip(x.chunks_exact(x.len() / n)) {
            sum.iter_mut().zip(stream).for_each(|(sum, value)| *sum += pre * value);
        }
        sum
    }

    /// Sinkhorn-Knopp: rows and columns of `[n, n]` are normalised alternately. The softmax is the first of the rows, columns come
    /// last.
    fn doubly_stochastic(&self, matrix: &mut [f32], n: usize) {
        let eps = self.options.eps;
        for row in matrix.chunks_exact_mut(n) {
            let largest = row.iter().copied().fold(f32::MIN, f32::max);
            row.iter_mut().for_each(|value| *value = (*value - largest).exp());
            let share = row.iter().sum::<f32>().recip();
            row.iter_mut().for_each(|value| *value = *value * share + eps);
        }
        let rows = |matrix: &mut [f32]| {
            for row in matrix.chunks_exact_mut(n) {
                let share = (row.iter().sum::<f32>() + eps).recip();
                row.iter_mut().for_each(|value| *value *= share);
            }
        };
        let columns = |matrix: &mut [f32]| {
            for column in 0..n {
                let share = (matrix[column..].iter().step_by(n).sum::<f32>() + eps).recip();
                matrix[column..].iter_mut().step_by(n).for_each(|value| *value *= share);
            }
        };
        columns(matrix);
        for _ in 1..self.options.sinkhorn_iters {
            rows(matrix);
            columns(matrix);
        }
    }
}

/// The streams `[N, n, d]` after a block with the output `[N, d]`.
fn mixed(streams: Tensor<3>, output: Tensor<2>, post: &[f32], comb: &[f32]) -> Tensor<3> {
    let ([tokens, n, width], dtype, device) = (streams.dims(), streams.dtype(), streams.device());
    let (x, output) = (values(streams), values(output));
    let mut out = vec![0.0; x.len()];
    let work = tokens * n * (n + 1) * width;
    let piece = piece_len(tokens, work);
    let pieces = out.chunks_mut(piece * n * width).enumerate().collect();
    map_independent(&device, work, pieces, |(i, out): (usize, &mut [f32])| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let (token, to) = (i * piece + row / n, row % n);
            let weights = [post[token * n + to]].into_iter().chain((0..n).map(|k| comb[(token * n + k) * n + to]));
            let x = x[token * n * width..][..n * width].chunks_exact(width);
            for (weight, values) in weights.zip([&output[token * width..][..width]].into_iter().chain(x)) {
                out.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
            }
        }
    });
    Tensor::from_data(TensorData::new(out, [tokens, n, width]), (&device, dtype))
}

/// The sum of products of two rows.
fn product(x: &[f32], y: &[f32]) -> f32 {
    // Several sums, which the CPU adds up side by side.
    let mut sums = [0.0; 16];
    for (x, y) in x.chunks(sums.len()).zip(y.chunks(sums.len())) {
        sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum += x * y);
    }
    sums.iter().sum()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(FloatDType::F32).try_into_vec_as().expect("computed on the CPU")
}
