//! The next tokens of a step, chosen on the device: the logits of a large batch would take longer to the host than a step takes.

use burn::tensor::{DType, Int, Tensor, TensorData, s};
use mla_ops::{LogProbs, SampleArgs, SampleParams, SampleRows, Sampled, argmax, log_probs, sample};

use super::scheduler::Job;
use super::stream::TokenLogprobs;
use crate::{ModelError, Result};

/// The tokens that requests with a repetition penalty have seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// i32 `[max_batch, ceil(vocab / 32)]`, a bit for each token; made for the first such request.
    bits: Option<Tensor<2, Int>>,
    /// The request of each row. It may wait meanwhile: its tokens stay.
    owners: Vec<Option<u64>>,
}

/// Tokens on the device.
#[derive(Debug)]
pub(super) struct Chosen {
    /// i32 `[chunks]`, negative where there is none.
    pub(super) tokens: Tensor<1, Int>,
    /// What the model says of them, if a request wants that.
    pub(super) logprobs: Option<LogProbs>,
}

impl Seen {
    /// The tokens of rows of logits.
    pub(super) fn choose(&mut self, logits: Tensor<2>, rows: &[SampleParams]) -> Result<Tensor<1, Int>> {
        // Of logits alone the most probable token.
        if rows.iter().all(|row| row.temperature == 0.0 && row.seen_row.is_none()) {
            return Ok(argmax(logits)?);
        }
        let rows = SampleRows::new(rows, &logits.device())?;
        let Sampled { tokens, seen } = sample(SampleArgs { logits, rows: &rows, seen: self.bits.take() })?;
        self.bits = seen;
        Ok(tokens)
    }

    /// The row of a request, which has its tokens; where it has none yet, one that no request needs which runs.
    pub(super) fn row_of(
        &mut self,
        job: &Job,
        is_running: impl Fn(u64) -> bool,
        logits: &Tensor<2>,
        max_batch: usize,
    ) -> Result<u32> {
        if let Some(row) = self.owners.iter().position(|owner| *owner == Some(job.id)) {
            return Ok(row as u32);
        }
        let ([_, vocab], device) = (logits.dims(), logits.device());
        let words = vocab.div_ceil(32);
        self.owners.resize(max_batch, None);
        let free = self.owners.iter().position(|owner| owner.is_none_or(|id| !is_running(id)));
        let row = free.ok_or_else(|| ModelError::device("more requests run than a batch has"))?;
        let mut bits = vec![0u32; words];
        for token in job.tokens.iter().map(|&token| token as usize).filter(|&token| token < vocab) {
            bits[token / 32] |= 1 << (token % 32);
        }
        let bits: Vec<i32> = bits.into_iter().map(u32::cast_signed).collect();
        let bits = Tensor::<2, Int>::from_data(TensorData::new(bits, [1, words]), (&device, DType::I32));
        let all = self.bits.take().unwrap_or_else(|| Tensor::zeros([max_batch, words], (&device, DType::I32)));
        self.bits = Some(all.slice_assign(s![row..row + 1, ..], bits));
        self.owners[row] = Some(job.id);
        Ok(row as u32)
    }
}

/// [`LogProbs`] on the host.
#[derive(Debug)]
pub(super) struct HostLogprobs {
    chosen: Vec<f32>,
    ids: Vec<i32>,
    values: Vec<f32>,
}

impl HostLogprobs {
    pub(super) fn read(LogProbs { chosen, ids, values }: LogProbs) -> Result<Self> {
        let floats = |values: Tensor<1>| values.try_into_vec_as::<f32>().map_err(ModelError::device);
        let ids = ids.try_into_vec_as::<i32>().map_err(ModelError::device)?;
        Ok(Self { chosen: floats(chosen)?, ids, values: floats(values.flatten(0, 1))? })
    }

    /// Of a row's token, and of so many of the most probable ones.
    pub(super) fn of_row(&self, row: usize, top: usize) -> TokenLogprobs {
        let columns = self.ids.len() / self.chosen.len();
        let ids = self.ids[row * columns..][..columns].iter().map(|&id| u32::try_from(id));
        let all = ids.zip(&self.values[row * columns..]).take(top);
        let top = all.filter_map(|(id, &value)| Some((id.ok()?, value))).collect();
        TokenLogprobs { logprob: self.chosen[row], top }
    }
}

/// Has the kernels compiled that choose tokens of such logits.
pub(super) fn warm_up(logits: Tensor<2>) -> Result<()> {
    let [batch, _] = logits.dims();
    let warm = SampleParams { temperature: 1.0, ..SampleParams::GREEDY };
    let greedy = argmax(logits.clone())?;
    log_probs(logits.clone(), greedy, 1)?;
    Seen::default().choose(logits, &vec![warm; batch])?;
    Ok(())
}
