use std::ops::Range;

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::activation::softmax;
use burn::tensor::{DType, FloatDType, Tensor};

use super::CompressKvOptions;
use super::backend::{
    BackendCompressed, BackendCompressor, BackendEntryCache, BackendStep, BackendTokens, BackendWrittenCache,
    CompressKvBackend,
};
use crate::independent::map_independent;
use crate::ops::norm_rope::reference::{Norm, Rope, norm_rope};
use crate::ops::write_latent::reference::write_latent;
use crate::reference::{IntoFlex, host, tensor};

impl CompressKvBackend for Flex {
    fn compress_kv(tokens: BackendTokens<Self>, compressor: BackendCompressor<Self>) -> FloatTensor<Self> {
        Compressor::new(compressor).entries(&Tokens::new(tokens)).into_flex()
    }

    fn compress_and_write(step: BackendStep<Self>) -> BackendCompressed<Self> {
        let BackendStep { tokens, state_slots, cache, compressor } = step;
        let tokens = Tokens::new(tokens);
        let entries = Compressor::new(compressor).entries(&tokens);
        let Tokens { new, state, .. } = tokens;
        let state = write_latent(state.into(), tensor(state_slots), &[new]).dense();
        let cache = match cache {
            BackendEntryCache::None => BackendWrittenCache::None,
            BackendEntryCache::Slots(cache, slots) => {
                let rows = entries.clone().squeeze_dim::<2>(1);
                let cache = tensor::<Tensor<3>>(cache).into();
                BackendWrittenCache::Cache(write_latent(cache, tensor(slots), &[rows]).dense().into_flex())
            }
        };
        BackendCompressed { entries: entries.into_flex(), state: state.into_flex(), cache }
    }
}

/// Rows of tokens: their keys and their gates.
struct Tokens {
    /// The new ones, f32 `[N, 2 C]`.
    new: Tensor<2>,
    /// Those before them, `[R, L, 2 C]`.
    state: Tensor<3>,
    sequences: Vec<Sequence>,
}

/// Where the tokens of a sequence are.
#[derive(Clone)]
struct Sequence {
    /// The block of the state.
    block: usize,
    /// The rows of the new tokens.
    rows: Range<usize>,
    /// The position of the first new token.
    start: usize,
}

impl Tokens {
    fn new(tokens: BackendTokens<Flex>) -> Self {
        let BackendTokens { kv_gates, state, state_rows, cu_seqlens, starts } = tokens;
        let [blocks, ends, starts] = [state_rows, cu_seqlens, starts].map(|list| host::<1>(tensor(list)));
        let sequence = |((&block, ends), &start): ((&i32, &[i32]), &i32)| Sequence {
            block: block as usize,
            rows: ends[0] as usize..ends[1] as usize,
            start: start as usize,
        };
        let sequences = blocks.iter().zip(ends.windows(2)).zip(&starts).map(sequence).collect();
        let new: Tensor<2> = tensor(kv_gates);
        Self { new: new.cast(FloatDType::F32), state: tensor(state), sequences }
    }

    /// The rows of the positions `first .. end` of a sequence: of the state those before its new tokens.
    fn rows(&self, sequence: &Sequence, first: usize, end: usize) -> Tensor<2> {
        let [_, carried, width] = self.state.dims();
        let mut parts = Vec::new();
        let mut position = first;
        while position < sequence.start {
            let place = position % carried;
            let len = (sequence.start - position).min(carried - place);
            let rows = self.state.clone().slice([sequence.block..sequence.block + 1, place..place + len, 0..width]);
            parts.push(rows.reshape([len, width]));
            position += len;
        }
        let first_new = sequence.rows.start + position - sequence.start;
        parts.push(self.new.clone().narrow(0, first_new, end - position));
        Tensor::cat(parts, 0)
    }
}

/// What makes entries of windows; see [`CompressKvArgs`](super::CompressKvArgs).
struct Compressor {
    position_bias: Tensor<2>,
    norm_weight: Tensor<1>,
    cos: Tensor<3>,
    sin: Tensor<3>,
    options: CompressKvOptions,
}

impl Compressor {
    fn new(compressor: BackendCompressor<Flex>) -> Self {
        let BackendCompressor { position_bias, norm_weight, cos, sin, options } = compressor;
        let (position_bias, norm_weight) = (tensor(position_bias), tensor(norm_weight));
        Self { position_bias, norm_weight, cos: tensor(cos), sin: tensor(sin), options }
    }

    /// `[B, n, d]`.
    fn entries(&self, tokens: &Tokens) -> Tensor<3> {
        let ([batch, entries, _], width) = (self.cos.dims(), self.width());
        let device = self.cos.device();
        let full = |sequence: &Sequence| self.full_windows(sequence).len().min(entries);
        let pieces: Vec<usize> = (0..batch).filter(|&b| full(&tokens.sequences[b]) > 0).collect();
        let work = tokens.new.shape().num_elements();
        let computed = map_independent(&device, work, pieces, |b| {
            let sequence = &tokens.sequences[b];
            let first = self.full_windows(sequence).start;
            let pooled = self.pool(tokens, sequence, first..first + full(sequence));
            (b, self.norm_and_rope(pooled, b).cast(self.options.dtype))
        });
        let zeros = Tensor::<3>::zeros([batch, entries, width], (&device, DType::from(self.options.dtype)));
        computed.into_iter().fold(zeros, |all, (b, own)| {
            let [count, _] = own.dims();
            all.slice_assign([b..b + 1, 0..count, 0..width], own.unsqueeze())
        })
    }

    /// d.
    fn width(&self) -> usize {
        self.norm_weight.dims()[0]
    }

    /// The windows that the new tokens of a sequence fill.
    fn full_windows(&self, sequence: &Sequence) -> Range<usize> {
        let [window, _] = self.position_bias.dims();
        sequence.start / window..(sequence.start + sequence.rows.len()) / window
    }

    /// f32 `[windows, d]`.
    fn pool(&self, tokens: &Tokens, sequence: &Sequence, windows: Range<usize>) -> Tensor<2> {
        let [window, channels] = self.position_bias.dims();
        // With overlap the window before the first one, too, where there is one.
        let first = windows.start - usize::from(self.options.overlap && windows.start > 0);
        let rows = tokens.rows(sequence, first * window, windows.end * window);
        let by_window = |rows: Tensor<2>| -> Tensor<3> { rows.reshape([windows.end - first, window, channels]) };
        let kv = by_window(rows.clone().narrow(1, 0, channels));
        let gates = by_window(rows.narrow(1, channels, channels)) + self.position_bias.clone().unsqueeze();
        let [kv, gates] = match self.options.overlap {
            true => [(kv, 0.0), (gates, f32::NEG_INFINITY)]
                .map(|(x, absent)| self.with_window_before(x, windows.len(), absent)),
            false => [kv, gates],
        };
        (softmax(gates, 1) * kv).sum_dim(1).squeeze_dim(1)
    }

    /// `[windows, m, 2 d]`, or one window more, before them -> `[windows, 2 m, d]`: the first channels of the window before, then
    /// the last channels of the window itself. `absent` stands for the window before window 0.
    fn with_window_before(&self, x: Tensor<3>, windows: usize, absent: f32) -> Tensor<3> {
        let ([given, window, _], width) = (x.dims(), self.width());
        let mut before = Vec::new();
        if given == windows {
            before.push(Tensor::full([1, window, width], absent, (&x.device(), DType::F32)));
        }
        if given > 1 {
            before.push(x.clone().slice([0..given - 1, 0..window, 0..width]));
        }
        let own = x.slice([given - windows..given, 0..window, width..2 * width]);
        Tensor::cat(vec![Tensor::cat(before, 0), own], 1)
    }

    /// The entries of sequence `b`, `[windows, d]`, normed, with RoPE applied to their last channels.
    fn norm_and_rope(&self, x: Tensor<2>, b: usize) -> Tensor<2> {
        let ([windows, _], [_, _, pairs]) = (x.dims(), self.cos.dims());
        let of_entries = |angles: &Tensor<3>| match pairs {
            // Burn reshapes no tensor without elements.
            0 => Tensor::empty([windows, 0], (&x.device(), DType::F32)),
            _ => angles.clone().slice([b..b + 1, 0..windows, 0..pairs]).reshape([windows, pairs]),
        };
        let tables = [of_entries(&self.cos), of_entries(&self.sin)];
        let norm = Norm::Weighted(self.norm_weight.clone(), self.options.norm_eps);
        norm_rope(x.unsqueeze_dim(1), norm, Rope::Tables(tables, false), true).squeeze_dim(1)
    }
}
