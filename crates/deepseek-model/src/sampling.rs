//! How the next token of a request is chosen.

use mla_ops::{MlaError, SampleParams};

use crate::{ModelError, Result};

/// How the next token is chosen.
///
/// The steps come in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one of the tokens left is
/// drawn ([`mla_ops::sample()`] says more). `temperature` 0 is greedy: the most probable token after the penalty.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. At least 0.
    pub temperature: f32,
    /// Keeps this many of the most probable tokens, and those that are as probable as the last of them; `None` keeps all. At least 1.
    pub top_k: Option<usize>,
    /// Keeps the fewest most probable tokens whose probabilities reach this sum, and those that are as probable as the last of them;
    /// 1 keeps all. In (0, 1].
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the largest one; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Divides logits that are not negative, and multiplies negative ones, of tokens of the prompt and of the text so far (CTRL, arXiv
    /// 1909.05858, 4.1); 1 is off. Above 0.
    pub repetition_penalty: f32,
    /// Seed of the random numbers, of which each position of the text has one: equal seeds and logits give equal tokens, whatever
    /// else is in the batch.
    pub seed: u64,
    /// Whether the [`Completion`](crate::Completion) has the logarithms of the probabilities of its tokens, and of how many of the most
    /// probable ones beside each, at most [`MAX_LOGPROBS`]. They are the model's own, before penalty, temperature and filters.
    pub logprobs: Option<usize>,
}

/// The most probable tokens that [`SamplingParams::logprobs`] may ask for.
pub const MAX_LOGPROBS: usize = 20;

impl SamplingParams {
    /// Greedy: always the most probable token, no penalty.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0, logprobs: None }
    }

    /// Whether every option is in its range.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming the first option that is not.
    pub fn validate(&self) -> Result<()> {
        if self.top_k == Some(0) {
            return Err(ModelError::request("top_k", 0, "at least 1, or none at all to keep every token"));
        }
        if let Some(top) = self.logprobs.filter(|&top| top > MAX_LOGPROBS) {
            return Err(ModelError::request("logprobs", top, format!("at most {MAX_LOGPROBS}")));
        }
        self.at(0).validate().map_err(|error| match error {
            MlaError::Value { argument, actual, expected, .. } => ModelError::request(argument, actual, expected),
            error => error.into(),
        })
    }

    /// The parameters of the operation, for the token of this number in its text.
    pub(crate) fn at(&self, position: usize) -> SampleParams {
        let &Self { temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs: _ } = self;
        // No vocabulary has more tokens, and no model more positions.
        let top_k = top_k.map_or(0, |top_k| u32::try_from(top_k).unwrap_or(0));
        let position = position as u32;
        SampleParams { temperature, top_k, top_p, min_p, repetition_penalty, seed, position, seen_row: None }
    }
}

pub(crate) fn no_finite_logit(vocab: usize) -> ModelError {
    ModelError::request(
        "logits",
        format!("{vocab} values, all NaN or -inf"),
        "at least one finite logit; the model's weights or cache hold NaN, or every token is masked",
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("temperature", SamplingParams { temperature: -0.1, ..SamplingParams::greedy() })]
    #[case("temperature", SamplingParams { temperature: f32::NAN, ..SamplingParams::greedy() })]
    #[case("top_k", SamplingParams { top_k: Some(0), ..SamplingParams::greedy() })]
    #[case("top_p", SamplingParams { top_p: 0.0, ..SamplingParams::greedy() })]
    #[case("top_p", SamplingParams { top_p: f32::NAN, ..SamplingParams::greedy() })]
    #[case("min_p", SamplingParams { min_p: 1.5, ..SamplingParams::greedy() })]
    #[case("logprobs", SamplingParams { logprobs: Some(21), ..SamplingParams::greedy() })]
    #[case("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..SamplingParams::greedy() })]
    fn an_option_out_of_range_is_refused_by_name(#[case] option: &str, #[case] params: SamplingParams) {
        let message = params.validate().unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{option}` is ")), "{message}");
    }

    /// More than any vocabulary has keeps all.
    #[test]
    fn a_top_k_beyond_32_bits_keeps_every_token() {
        let params = SamplingParams { top_k: Some(usize::MAX), ..SamplingParams::greedy() };
        params.validate().unwrap();
        assert_eq!((params.at(7).top_k, params.at(7).position), (0, 7));
    }
}
