//! Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices (DeepSeek-V4).

use burn::tensor::{FloatDType, Tensor, activation};
use mla_ops::{Determinism, Weight, matmul};

use super::config::DeepseekV4Config;
use crate::Result;
use crate::parallel::Cut;
use crate::weights::WeightLoader;

/// How one block reads from the residual streams and writes to them; in f32.
#[derive(Debug, Clone)]
pub(crate) struct HyperConnection {
    /// f32 `[(2 + n) · n, n · D]`: rows for `pre`, `post` and the rows of `comb`.
    weight: Weight,
    /// f32 `[1, (2 + n) · n]`.
    scale: Tensor<2>,
    /// f32 `[1, (2 + n) · n]`.
    base: Tensor<2>,
    norm_eps: f64,
    eps: f64,
    sinkhorn_iters: usize,
}

/// What [`HyperConnection::read`] found for each token.
#[derive(Debug)]
pub(crate) struct Mixing {
    /// f32 `[N, n, 1]`: how much of the block's output goes into each stream.
    post: Tensor<3>,
    /// f32 `[N, n, n]`: what each stream (first index) gives to each stream.
    comb: Tensor<3>,
}

impl HyperConnection {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config) -> Self {
        let n = config.hc_mult;
        let columns = (2 + n) * n;
        let scale: Tensor<1> = loader.tensor_f32(&format!("{name}_scale"), [3], Cut::Whole);
        let parts = [n, n, n * n].into_iter().enumerate().map(|(i, len)| scale.clone().narrow(0, i, 1).expand([len]));
        Self {
            weight: loader.weight_f32(&format!("{name}_fn"), [columns, n * config.hidden_size], Cut::Whole),
            scale: Tensor::cat(parts.collect(), 0).unsqueeze(),
            base: loader.tensor_f32(&format!("{name}_base"), [columns], Cut::Whole).unsqueeze(),
            norm_eps: config.rms_norm_eps,
            eps: config.hc_eps,
            sinkhorn_iters: config.hc_sinkhorn_iters,
        }
    }

    /// The block's input `[N, D]` from the streams `[N, n, D]`, and how its output will be mixed in.
    pub(crate) fn read(&self, streams: &Tensor<3>, determinism: Determinism) -> Result<(Tensor<2>, Mixing)> {
        let dtype = FloatDType::from(streams.dtype());
        let [tokens, n, _] = streams.dims();
        let x = streams.clone().cast(FloatDType::F32);
        let z = matmul(flat_norm(&x, self.norm_eps), self.weight.dense().transpose(), determinism)?;
        let z = z * self.scale.clone() + self.base.clone();
        let pre = activation::sigmoid(z.clone().narrow(1, 0, n)) + self.eps;
        let post = activation::sigmoid(z.clone().narrow(1, n, n)) * 2.0;
        let comb = self.doubly_stochastic(z.narrow(1, 2 * n, n * n).reshape([tokens, n, n]));
        Ok((collapse(x, pre).cast(dtype), Mixing { post: post.reshape([tokens, n, 1]), comb }))
    }

    /// Sinkhorn-Knopp: rows and columns are normalised alternately. The softmax is the first of the rows, columns come last.
    fn doubly_stochastic(&self, logits: Tensor<3>) -> Tensor<3> {
        let mut comb = activation::softmax(logits, 2) + self.eps;
        comb = comb.clone() / (comb.sum_dim(1) + self.eps);
        for _ in 1..self.sinkhorn_iters {
            comb = comb.clone() / (comb.sum_dim(2) + self.eps);
            comb = comb.clone() / (comb.sum_dim(1) + self.eps);
        }
        comb
    }
}

impl Mixing {
    /// The streams `[N, n, D]` after a block with the output `[N, D]`.
    pub(crate) fn write(self, streams: Tensor<3>, output: Tensor<2>, determinism: Determinism) -> Result<Tensor<3>> {
        let dtype = FloatDType::from(streams.dtype());
        let kept = matmul(self.comb.swap_dims(1, 2), streams.cast(FloatDType::F32), determinism)?;
        let added = self.post * output.cast(FloatDType::F32).unsqueeze_dim::<3>(1);
        Ok((kept + added).cast(dtype))
    }
}

/// The end of the streams: their weighted sum.
#[derive(Debug, Clone)]
pub(crate) struct HyperHead {
    /// f32 `[n, n · D]`.
    weight: Weight,
    /// f32 `[1, 1]`.
    scale: Tensor<2>,
    /// f32 `[1, n]`.
    base: Tensor<2>,
    norm_eps: f64,
    eps: f64,
}

impl HyperHead {
    /// Loads `{name}_fn`, `{name}_base` and `{name}_scale`.
    pub(crate) fn load(loader: &mut WeightLoader, name: &str, config: &DeepseekV4Config) -> Self {
        let n = config.hc_mult;
        Self {
            weight: loader.weight_f32(&format!("{name}_fn"), [n, n * config.hidden_size], Cut::Whole),
            scale: loader.tensor_f32(&format!("{name}_scale"), [1], Cut::Whole).unsqueeze(),
            base: loader.tensor_f32(&format!("{name}_base"), [n], Cut::Whole).unsqueeze(),
            norm_eps: config.rms_norm_eps,
            eps: config.hc_eps,
        }
    }

    /// `[N, n, D]` -> `[N, D]`.
    pub(crate) fn forward(&self, streams: Tensor<3>, determinism: Determinism) -> Result<Tensor<2>> {
        let dtype = FloatDType::from(streams.dtype());
        let x = streams.cast(FloatDType::F32);
        let z = matmul(flat_norm(&x, self.norm_eps), self.weight.dense().transpose(), determinism)?;
        let z = z * self.scale.clone() + self.base.clone();
        Ok(collapse(x, activation::sigmoid(z) + self.eps).cast(dtype))
    }
}

/// All streams of a token normed together: `[N, n, D]` -> `[N, n · D]`.
fn flat_norm(x: &Tensor<3>, eps: f64) -> Tensor<2> {
    let [tokens, n, width] = x.dims();
    unit_rms(x.clone().reshape([tokens, n * width]), eps)
}

/// f32 `[N, width]` -> `[N, width]`: the norm without weight.
fn unit_rms(x: Tensor<2>, eps: f64) -> Tensor<2> {
    let variance = x.clone().square().mean_dim(1);
    x / variance.add_scalar(eps).sqrt()
}

/// `Σ_k pre_k x_k`: `[N, n, D]`, `[N, n]` -> `[N, D]`.
fn collapse(x: Tensor<3>, pre: Tensor<2>) -> Tensor<2> {
    let [tokens, _, width] = x.dims();
    (x * pre.unsqueeze_dim::<3>(2)).sum_dim(1).reshape([tokens, width])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    const N: usize = 3;
    const WIDTH: usize = 5;
    const COLUMNS: usize = (2 + N) * N;
    const EPS: f64 = 1e-2;

    fn values(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| f64::from(((i as f64 * 0.7368 + seed).sin() * 3.1).sin() as f32)).collect()
    }

    fn tensor<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
        let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    fn close<const D: usize>(actual: Tensor<D>, expected: &[f64]) {
        let actual = actual.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(actual.len(), expected.len());
        for (a, e) in actual.iter().zip(expected) {
            assert!((f64::from(*a) - e).abs() < 2e-6, "{a} is not {e}");
        }
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// One token in plain loops: input of the block, and the streams after it.
    fn oracle(x: &[f64], weight: &[f64], scale: &[f64], base: &[f64], output: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let normed: Vec<f64> = x.iter().map(|v| v / (mean + 1e-6).sqrt()).collect();
        let z: Vec<f64> = (0..COLUMNS)
            .map(|c| {
                let dot: f64 = (0..x.len()).map(|i| weight[c * x.len() + i] * normed[i]).sum();
                let part = if c < N { 0 } else { usize::from(c >= 2 * N) + 1 };
                dot * scale[part] + base[c]
            })
            .collect();
        let mut comb = [0.0; N * N];
        for row in 0..N {
            let logits = &z[2 * N + row * N..][..N];
            let total: f64 = logits.iter().map(|l| l.exp()).sum();
            (0..N).for_each(|k| comb[row * N + k] = logits[k].exp() / total + EPS);
        }
        for round in 0..4 {
            if round > 0 {
                for row in 0..N {
                    let sum: f64 = (0..N).map(|k| comb[row * N + k]).sum();
                    (0..N).for_each(|k| comb[row * N + k] /= sum + EPS);
                }
            }
            for column in 0..N {
                let sum: f64 = (0..N).map(|j| comb[j * N + column]).sum();
                (0..N).for_each(|j| comb[j * N + column] /= sum + EPS);
            }
        }
        let input = (0..WIDTH).map(|d| (0..N).map(|k| (sigmoid(z[k]) + EPS) * x[k * WIDTH + d]).sum()).collect();
        let mut after = vec![0.0; N * WIDTH];
        for k in 0..N {
            for d in 0..WIDTH {
                let kept: f64 = (0..N).map(|j| comb[j * N + k] * x[j * WIDTH + d]).sum();
                after[k * WIDTH + d] = kept + 2.0 * sigmoid(z[N + k]) * output[d];
            }
        }
        (input, after)
    }

    #[test]
    fn streams_are_read_and_written_as_in_plain_loops() {
        let (tokens, flat) = (4, N * WIDTH);
        let (x, output) = (values(tokens * flat, 0.3), values(tokens * WIDTH, 1.7));
        let (weight, base, scale) = (values(COLUMNS * flat, 2.9), values(COLUMNS, 4.1), [0.7, 1.3, 2.1]);
        let spread: Vec<f64> =
            (0..COLUMNS).map(|c| if c < N { scale[0] } else { scale[usize::from(c >= 2 * N) + 1] }).collect();
        let connection = HyperConnection {
            weight: tensor::<2>(&weight, [COLUMNS, flat]).into(),
            scale: tensor(&spread, [1, COLUMNS]),
            base: tensor(&base, [1, COLUMNS]),
            norm_eps: 1e-6,
            eps: EPS,
            sinkhorn_iters: 4,
        };
        let streams = tensor(&x, [tokens, N, WIDTH]);
        let (input, mixing) = connection.read(&streams, Determinism::Fast).unwrap();
        let after = mixing.write(streams, tensor(&output, [tokens, WIDTH]), Determinism::Fast).unwrap();
        let expected: Vec<(Vec<f64>, Vec<f64>)> = (0..tokens)
            .map(|t| oracle(&x[t * flat..][..flat], &weight, &scale, &base, &output[t * WIDTH..][..WIDTH]))
            .collect();
        close(input, &expected.iter().flat_map(|(input, _)| input.clone()).collect::<Vec<_>>());
        close(after, &expected.iter().flat_map(|(_, after)| after.clone()).collect::<Vec<_>>());
    }
}
