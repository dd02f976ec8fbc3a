//! Compression of windows of tokens into single entries (DeepSeek-V4), in any chunking.

use burn::tensor::{DType, Device, FloatDType, Tensor, activation};

use super::{Linear, PartialRotary, RmsNorm};
use crate::config::DeepseekV4Config;
use crate::weights::WeightLoader;

/// Pools each window of `rate` tokens into an entry, by a softmax over its tokens for every channel.
#[derive(Debug, Clone)]
pub(crate) struct Compressor {
    wkv: Linear,
    wgate: Linear,
    /// f32 `[1, rate, C]`: added to the gates by the place in the window (`ape`).
    position_bias: Tensor<3>,
    norm: RmsNorm,
    rate: usize,
    /// Channels of an entry. With overlap `C = 2 · width`: the first half serves the next window, the second its own.
    width: usize,
    overlap: bool,
}

/// Keys and gates of some tokens before they are pooled, f32 `[n, C]`.
#[derive(Debug, Clone)]
pub(crate) struct Gated {
    kv: Tensor<2>,
    gate: Tensor<2>,
}

/// What a compressor remembers of one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct CompressorState {
    /// The tokens of the window that is not full yet; `None` if it has none.
    open: Option<Gated>,
    /// With overlap, the last full window's first halves, keys and gates with their bias: f32 `[1, rate, width]`.
    overlap: Option<(Tensor<3>, Tensor<3>)>,
    /// `[T, width]`, one for each full window; `None` before the first.
    entries: Option<Tensor<2>>,
}

impl Compressor {
    /// Loads `{name}.wkv`, `wgate`, `ape` and `norm`.
    pub(crate) fn load(
        loader: &mut WeightLoader,
        name: &str,
        config: &DeepseekV4Config,
        rate: usize,
        width: usize,
        overlap: bool,
    ) -> Self {
        let channels = if overlap { 2 * width } else { width };
        Self {
            wkv: Linear::load(loader, &format!("{name}.wkv"), channels, config.hidden_size),
            wgate: Linear::load(loader, &format!("{name}.wgate"), channels, config.hidden_size),
            position_bias: loader.tensor_f32(&format!("{name}.ape"), [rate, channels]).unsqueeze(),
            norm: RmsNorm::load(loader, &format!("{name}.norm"), width, config.rms_norm_eps),
            rate,
            width,
            overlap,
        }
    }

    /// Tokens per entry.
    pub(crate) fn rate(&self) -> usize {
        self.rate
    }

    /// x `[N, hidden]`, tokens of any sequences.
    pub(crate) fn project(&self, x: &Tensor<2>) -> Gated {
        let f32s = |linear: &Linear| linear.forward(x.clone()).cast(FloatDType::F32);
        Gated { kv: f32s(&self.wkv), gate: f32s(&self.wgate) }
    }

    /// Takes the next tokens of a sequence into its state; the windows that they fill become entries of `dtype`.
    pub(crate) fn advance(&self, state: &mut CompressorState, new: Gated, rotary: &PartialRotary, dtype: FloatDType) {
        let rows = match state.open.take() {
            Some(open) => open.followed_by(new),
            None => new,
        };
        let windows = rows.len() / self.rate;
        let closed = windows * self.rate;
        if closed < rows.len() {
            state.open = Some(rows.rows(closed, rows.len() - closed));
        }
        if windows == 0 {
            return;
        }
        let pooled = self.pool(&rows.rows(0, closed), windows, state);
        let first = state.len();
        let positions: Vec<usize> = (first..first + windows).map(|window| window * self.rate).collect();
        let rotation = rotary.at(&positions, &pooled.device());
        let normed = self.norm.forward(pooled).reshape([windows, 1, self.width]);
        let entries = rotation.apply(normed).reshape([windows, self.width]).cast(dtype);
        state.entries = Some(match state.entries.take() {
            Some(before) => Tensor::cat(vec![before, entries], 0),
            None => entries,
        });
    }

    /// Full windows -> f32 `[windows, width]`.
    fn pool(&self, rows: &Gated, windows: usize, state: &mut CompressorState) -> Tensor<2> {
        let by_window = |x: &Tensor<2>| x.clone().reshape([windows, self.rate, x.dims()[1]]);
        let (mut kv, mut gate) = (by_window(&rows.kv), by_window(&rows.gate) + self.position_bias.clone());
        if self.overlap {
            (kv, gate) = self.with_window_before(kv, gate, state);
        }
        (activation::softmax(gate, 1) * kv).sum_dim(1).reshape([windows, self.width])
    }

    /// `[windows, rate, 2 · width]` -> `[windows, 2 · rate, width]`: the first halves of the window before, then the second
    /// halves of the window itself.
    fn with_window_before(
        &self,
        kv: Tensor<3>,
        gate: Tensor<3>,
        state: &mut CompressorState,
    ) -> (Tensor<3>, Tensor<3>) {
        let [windows, rate, _] = kv.dims();
        let half = |x: &Tensor<3>, first: usize| x.clone().narrow(2, first * self.width, self.width);
        let (kv_before, gate_before) = state.overlap.take().unwrap_or_else(|| self.no_window(&kv.device()));
        let (kv_given, gate_given) = (half(&kv, 0), half(&gate, 0));
        let last = |x: &Tensor<3>| x.clone().narrow(0, windows - 1, 1);
        state.overlap = Some((last(&kv_given), last(&gate_given)));
        let shifted = |before: Tensor<3>, given: Tensor<3>| match windows {
            1 => before,
            _ => Tensor::cat(vec![before, given.slice([0..windows - 1, 0..rate])], 0),
        };
        let join = |before, own| Tensor::cat(vec![before, own], 1);
        (join(shifted(kv_before, kv_given), half(&kv, 1)), join(shifted(gate_before, gate_given), half(&gate, 1)))
    }

    /// What stands before the first window: gates that no softmax sees.
    fn no_window(&self, device: &Device) -> (Tensor<3>, Tensor<3>) {
        let (shape, options) = ([1, self.rate, self.width], (device, DType::F32));
        (Tensor::zeros(shape, options), Tensor::full(shape, f32::NEG_INFINITY, options))
    }
}

impl Gated {
    /// Tokens.
    fn len(&self) -> usize {
        self.kv.dims()[0]
    }

    /// The tokens `first..first + len`.
    pub(crate) fn rows(&self, first: usize, len: usize) -> Self {
        Self { kv: self.kv.clone().narrow(0, first, len), gate: self.gate.clone().narrow(0, first, len) }
    }

    fn followed_by(self, new: Self) -> Self {
        Self { kv: Tensor::cat(vec![self.kv, new.kv], 0), gate: Tensor::cat(vec![self.gate, new.gate], 0) }
    }
}

impl CompressorState {
    /// The entries `[T, width]`.
    pub(crate) fn entries(&self) -> Option<&Tensor<2>> {
        self.entries.as_ref()
    }

    /// Entries.
    fn len(&self) -> usize {
        self.entries.as_ref().map_or(0, |entries| entries.dims()[0])
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> usize {
        let of = |elements: usize, dtype: DType| elements * dtype.size();
        let open = self.open.iter().flat_map(|open| [&open.kv, &open.gate]);
        let flat = open.chain(&self.entries).map(|x| of(x.shape().num_elements(), x.dtype())).sum::<usize>();
        let overlap = self.overlap.iter().flat_map(|(kv, gate)| [kv, gate]);
        flat + overlap.map(|x| of(x.shape().num_elements(), x.dtype())).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use rstest::rstest;

    use super::*;
    use crate::config::RopeConfig;

    const HIDDEN: usize = 3;
    const WIDTH: usize = 6;
    const RATE: usize = 4;
    const TOKENS: usize = 23;
    const THETA: f64 = 50.0;

    fn values(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| f64::from(((i as f64 * 0.7368 + seed).sin() * 3.1).sin() as f32)).collect()
    }

    fn tensor<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
        let values: Vec<f32> = values.iter().map(|&v| v as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    /// Entry `window` in plain loops; `C` channels per token, two pairs of the last four channels turn.
    fn oracle(kv: &[f64], gate: &[f64], bias: &[f64], norm: &[f64], window: usize, overlap: bool) -> Vec<f64> {
        let channels = if overlap { 2 * WIDTH } else { WIDTH };
        let mut pooled = [0.0; WIDTH];
        for (c, pooled) in pooled.iter_mut().enumerate() {
            let mut slots = Vec::new();
            for place in 0..RATE {
                let slot = |token: usize, c: usize| {
                    ((gate[token * channels + c] + bias[place * channels + c]).exp(), kv[token * channels + c])
                };
                if overlap && window > 0 {
                    slots.push(slot((window - 1) * RATE + place, c));
                }
                slots.push(slot(window * RATE + place, if overlap { WIDTH + c } else { c }));
            }
            let total: f64 = slots.iter().map(|(share, _)| share).sum();
            *pooled = slots.iter().map(|(share, value)| share / total * value).sum();
        }
        let mean = pooled.iter().map(|v| v * v).sum::<f64>() / WIDTH as f64;
        let mut entry: Vec<f64> = pooled.iter().zip(norm).map(|(v, w)| v / (mean + 1e-6).sqrt() * w).collect();
        for pair in 0..2 {
            let (sin, cos) = ((window * RATE) as f64 * THETA.powf(-2.0 * pair as f64 / 4.0)).sin_cos();
            let (u, v) = (entry[2 + 2 * pair], entry[3 + 2 * pair]);
            (entry[2 + 2 * pair], entry[3 + 2 * pair]) = (u * cos - v * sin, v * cos + u * sin);
        }
        entry
    }

    #[rstest]
    fn entries_are_those_of_plain_loops_in_any_chunking(
        #[values(false, true)] overlap: bool,
        #[values(1, 2, 3, 4, 5, 9, TOKENS)] chunk: usize,
    ) {
        let channels = if overlap { 2 * WIDTH } else { WIDTH };
        let (x, norm, bias) = (values(TOKENS * HIDDEN, 0.2), values(WIDTH, 1.1), values(RATE * channels, 3.3));
        let (wkv, wgate) = (values(channels * HIDDEN, 5.7), values(channels * HIDDEN, 7.9));
        let compressor = Compressor {
            wkv: Linear::new(tensor(&wkv, [channels, HIDDEN])),
            wgate: Linear::new(tensor(&wgate, [channels, HIDDEN])),
            position_bias: tensor(&bias, [1, RATE, channels]),
            norm: RmsNorm::new(tensor(&norm, [1, WIDTH]), 1e-6),
            rate: RATE,
            width: WIDTH,
            overlap,
        };
        let rotary = PartialRotary::new(&RopeConfig { rope_theta: THETA, yarn: None }, 4);
        let projected = compressor.project(&tensor(&x, [TOKENS, HIDDEN]));
        let mut state = CompressorState::default();
        for first in (0..TOKENS).step_by(chunk) {
            let new = projected.rows(first, chunk.min(TOKENS - first));
            compressor.advance(&mut state, new, &rotary, FloatDType::F32);
            assert_eq!(state.len(), (first + chunk).min(TOKENS) / RATE);
        }

        let project = |weight: &[f64]| -> Vec<f64> {
            let dot = |t: usize, c: usize| (0..HIDDEN).map(|i| x[t * HIDDEN + i] * weight[c * HIDDEN + i]).sum();
            (0..TOKENS * channels).map(|i| dot(i / channels, i % channels)).collect()
        };
        let (kv, gate) = (project(&wkv), project(&wgate));
        let entries = state.entries().unwrap().clone().into_data().try_to_vec::<f32>().unwrap();
        for window in 0..TOKENS / RATE {
            let expected = oracle(&kv, &gate, &bias, &norm, window, overlap);
            for (actual, expected) in entries[window * WIDTH..].iter().zip(expected) {
                assert!((f64::from(*actual) - expected).abs() < 2e-5, "{actual} is not {expected}");
            }
        }
        assert_eq!(entries.len(), TOKENS / RATE * WIDTH);
    }
}
