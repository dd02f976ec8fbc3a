//! The states of DeepSeek-V4: what a request has of a fixed size, whatever its length.

use burn::tensor::{Device, FloatDType, Int, Tensor, s};
use mla_ops::cache::new_pool;
use mla_ops::{WriteLatentArgs, write_latent};

use super::config::DeepseekV4Config;
use crate::step::ints;
use crate::{ModelError, Result};

/// A row of each of these tensors belongs to a request, or to a snapshot of one.
#[derive(Debug)]
pub(super) struct States {
    /// Of each layer the last tokens' keys, `[R, W, d]`: the key of position `p` at `p % W`. `None` while it is taken.
    windows: Vec<Option<Tensor<3>>>,
    /// Of each compressor the last tokens' keys and gates, f32 `[R, L, 2 C]`: those of position `p` at `p % L`.
    carried: Vec<Option<Tensor<3>>>,
}

/// A part of the states.
#[derive(Debug, Clone, Copy)]
pub(crate) enum State {
    /// The window of a layer.
    Window(usize),
    /// What a compressor carries.
    Carried(usize),
}

/// Rows of the tokens of a forward pass that snapshots take, for all states that are rings of as many tokens.
#[derive(Debug)]
pub(crate) struct MarkedRows {
    /// Which of the new tokens, i32 `[M]`.
    pub(crate) tokens: Tensor<1, Int>,
    /// Where they go, i32 `[M]`: `row * L + p % L` for the token of position `p`.
    pub(crate) slots: Tensor<1, Int>,
}

impl States {
    /// Rows of zeros, with windows of `dtype`.
    ///
    /// # Errors
    /// As [`new_pool`].
    pub(super) fn new(config: &DeepseekV4Config, rows: usize, dtype: FloatDType, device: &Device) -> Result<Self> {
        let window = [rows, config.sliding_window, config.head_dim];
        let windows = config.layers.iter().map(|_| state(window, dtype, device));
        let carried = config.compressors().into_iter();
        let carried = carried.map(|spec| [rows, spec.carried_tokens(), 2 * spec.channels()]);
        let carried = carried.map(|shape| state(shape, FloatDType::F32, device));
        Ok(Self { windows: windows.collect::<Result<_>>()?, carried: carried.collect::<Result<_>>()? })
    }

    /// States of the same layers with another number of rows.
    ///
    /// # Errors
    /// As [`Self::new`], and a state that is taken.
    pub(super) fn like(&self, rows: usize, device: &Device) -> Result<Self> {
        let like = |of: &Option<Tensor<3>>| {
            let of = of.as_ref().ok_or_else(taken)?;
            let [_, tokens, width] = of.dims();
            state([rows, tokens, width], of.dtype().into(), device)
        };
        let all = |of: &[Option<Tensor<3>>]| of.iter().map(like).collect::<Result<_>>();
        Ok(Self { windows: all(&self.windows)?, carried: all(&self.carried)? })
    }

    /// Moves a state out, so that the caller owns the only handle and can write in place; [`Self::put`] gives it back.
    pub(super) fn take(&mut self, state: State) -> Result<Tensor<3>> {
        self.entry(state).take().ok_or_else(taken)
    }

    /// Gives back what [`Self::take`] handed out.
    pub(super) fn put(&mut self, state: State, tensor: Tensor<3>) {
        *self.entry(state) = Some(tensor);
    }

    /// A row, `[1, ..]` of every state. It may be a view of everything, with no launch: before these states are written, it has to go.
    ///
    /// # Errors
    /// A state that is taken: an operation that could not give it back has lost it, and with it the cache.
    pub(super) fn row(&self, row: usize) -> Result<Vec<Tensor<3>>> {
        let slice = |state: &Option<Tensor<3>>| Ok(state.clone().ok_or_else(taken)?.slice(s![row..row + 1, .., ..]));
        self.windows.iter().chain(&self.carried).map(slice).collect()
    }

    /// A copy of a row, which a selection always is.
    ///
    /// # Errors
    /// As [`Self::row`].
    pub(super) fn copied_row(&self, row: usize, device: &Device) -> Result<Vec<Tensor<3>>> {
        let row = ints(vec![row as i32], device);
        let copy = |state: &Option<Tensor<3>>| Ok(state.clone().ok_or_else(taken)?.select(0, row.clone()));
        self.windows.iter().chain(&self.carried).map(copy).collect()
    }

    /// Writes a row: one of other states, or a copy.
    pub(super) fn set_row(&mut self, row: usize, values: Vec<Tensor<3>>) {
        for (entry, values) in self.windows.iter_mut().chain(&mut self.carried).zip(values) {
            // Moved out, so that the write has the only handle and stays in place.
            *entry = entry.take().map(|state| state.slice_assign(s![row..row + 1, .., ..], values));
        }
    }

    /// Writes `rows` `[M, C]` of tokens to slots `[M]` of a state.
    pub(super) fn write(&mut self, state: State, rows: Tensor<2>, slots: Tensor<1, Int>) -> Result<()> {
        let cache = self.take(state)?;
        let latent = rows.cast(FloatDType::from(cache.dtype()));
        let (cache, outcome) = match write_latent(WriteLatentArgs { cache: cache.into(), slots, latent, rope: None }) {
            Ok(written) => (written, Ok(())),
            Err(refused) => (refused.cache, Err(refused.error.into())),
        };
        self.put(state, cache.dense());
        outcome
    }

    fn entry(&mut self, state: State) -> &mut Option<Tensor<3>> {
        match state {
            State::Window(layer) => &mut self.windows[layer],
            State::Carried(compressor) => &mut self.carried[compressor],
        }
    }
}

fn state(shape: [usize; 3], dtype: FloatDType, device: &Device) -> Result<Option<Tensor<3>>> {
    Ok(Some(new_pool(shape, dtype, device)?))
}

fn taken() -> ModelError {
    ModelError::request("cache", "one with a state that is taken", "one with all its states")
}
