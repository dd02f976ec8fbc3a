//! What one forward pass of DeepSeek-V4 works on: new tokens of some sequences, their positions and windows.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor};
use mla_ops::cache::RequestId;

use crate::Result;
use crate::cache::V4Cache;
use crate::layers::{PartialRotary, PartialRotation, index_rows};
use crate::step::{Chunk, ints};

/// The inputs of a forward pass, on the device.
#[derive(Debug)]
pub(crate) struct V4Step {
    /// i32 `[N]`.
    pub(crate) input_ids: Tensor<1, Int>,
    /// Of the layers without compression.
    pub(crate) rotation: PartialRotation,
    /// Of the layers with compression.
    pub(crate) compress_rotation: PartialRotation,
    /// Turns the entries, whose positions depend on the layer.
    pub(crate) compress_rotary: PartialRotary,
    pub(crate) sequences: Vec<SequenceStep>,
}

/// The new tokens of one sequence.
#[derive(Debug)]
pub(crate) struct SequenceStep {
    pub(crate) request: RequestId,
    /// Among those of the step.
    pub(crate) tokens: Range<usize>,
    /// Position of the first.
    start: usize,
    /// What each sees of the window's rows, which are those that the state kept and then the new ones: i32 `[n, K]`.
    pub(crate) window: Tensor<2, Int>,
}

impl V4Step {
    pub(crate) fn new(
        chunks: &[Chunk],
        cache: &mut V4Cache,
        rotary: &PartialRotary,
        compress_rotary: &PartialRotary,
        sliding_window: usize,
        device: &Device,
    ) -> Result<Self> {
        let mut positions = Vec::new();
        let mut sequences = Vec::new();
        for chunk in chunks {
            let start = cache.begin(chunk.request, chunk.tokens.len())?;
            let first = positions.len();
            positions.extend(start..start + chunk.tokens.len());
            sequences.push(SequenceStep {
                request: chunk.request,
                tokens: first..positions.len(),
                start,
                window: window_indices(start, chunk.tokens.len(), sliding_window, device),
            });
        }
        let ids = chunks.iter().flat_map(|chunk| chunk.tokens.iter().map(|&id| id as i32)).collect();
        Ok(Self {
            input_ids: ints(ids, device),
            rotation: rotary.at(&positions, device),
            compress_rotation: compress_rotary.at(&positions, device),
            compress_rotary: compress_rotary.clone(),
            sequences,
        })
    }
}

impl SequenceStep {
    /// How many entries of `rate` tokens each new token sees: those of windows that it or an earlier token closes.
    pub(crate) fn visible_entries(&self, rate: usize) -> impl Iterator<Item = usize> {
        let start = self.start;
        (0..self.tokens.len()).map(move |token| (start + token + 1) / rate)
    }
}

/// Row numbers of the `window` last tokens up to each of `len` new ones from position `start` on.
fn window_indices(start: usize, len: usize, window: usize, device: &Device) -> Tensor<2, Int> {
    let kept = start.min(window - 1);
    let rows = (kept..kept + len).map(|own| (own + 1).saturating_sub(window)..own + 1);
    index_rows(rows, window.min(kept + len), device)
}
