//! Choosing the next token from a row of logits.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{ModelError, Result};

/// How the next token is chosen.
///
/// The steps come in the order of transformers and vLLM: repetition penalty, temperature, top-k, top-p, min-p, then one
/// of the tokens left is sampled. `temperature` 0 is greedy: the most probable token after the penalty.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. At least 0.
    pub temperature: f32,
    /// Keeps this many of the most probable tokens (ties go to the lower id); `None` keeps all. At least 1.
    pub top_k: Option<usize>,
    /// Keeps the fewest most probable tokens whose probabilities reach this sum; 1 keeps all. In (0, 1].
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the largest one; 0 keeps all. In [0, 1].
    pub min_p: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens already seen (CTRL, arXiv 1909.05858, 4.1); 1 is
    /// off. Above 0.
    pub repetition_penalty: f32,
    /// Seed of the sampling: equal seeds and logits give equal tokens.
    pub seed: u64,
}

impl SamplingParams {
    /// Greedy: always the most probable token, no penalty.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }

    /// Whether every option is in its range.
    ///
    /// # Errors
    /// [`ModelError::Request`] naming the first option that is not.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, argument, actual: String, expected: &str| match ok {
            true => Ok(()),
            false => Err(ModelError::request(argument, actual, expected)),
        };
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, seed: _ } = self;
        check(
            temperature.is_finite() && *temperature >= 0.0,
            "temperature",
            temperature.to_string(),
            "a finite number of at least 0 (0 is greedy)",
        )?;
        check(*top_k != Some(0), "top_k", "0".into(), "at least 1, or none at all to keep every token")?;
        check(
            *top_p > 0.0 && *top_p <= 1.0,
            "top_p",
            top_p.to_string(),
            "a number above 0 and up to 1 (1 keeps every token)",
        )?;
        check((0.0..=1.0).contains(min_p), "min_p", min_p.to_string(), "a number from 0 (keeps every token) to 1")?;
        check(
            repetition_penalty.is_finite() && *repetition_penalty > 0.0,
            "repetition_penalty",
            repetition_penalty.to_string(),
            "a finite number above 0 (1 is off)",
        )
    }

    /// Whether the next token is the argmax of the model's logits.
    pub(crate) fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }
}

/// Samples the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler seeded with `params.seed`.
    ///
    /// # Errors
    /// Those of [`SamplingParams::validate`].
    pub fn new(params: SamplingParams) -> Result<Self> {
        params.validate()?;
        let rng = ChaCha8Rng::seed_from_u64(params.seed);
        Ok(Self { params, rng })
    }

    /// The sampling parameters.
    pub(crate) fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The next token for `logits` (one per token id), which are overwritten. `history` holds the prompt and the tokens
    /// generated so far, for the repetition penalty; ids outside the vocabulary are passed over.
    ///
    /// A NaN logit counts as minus infinity, plus infinity as the largest finite number.
    ///
    /// # Errors
    /// [`ModelError::Request`] if no token has a finite logit.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32> {
        penalize_repetition(logits, history, self.params.repetition_penalty);
        for logit in logits.iter_mut() {
            *logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
        }
        let (best, max) = argmax(logits)?;
        if self.params.temperature == 0.0 {
            return Ok(best);
        }
        let kept = kept_tokens(&self.params, logits, max);
        let mut left = self.rng.random::<f64>() * kept.iter().map(|&(_, weight)| weight).sum::<f64>();
        for &(id, weight) in &kept {
            if left < weight {
                return Ok(id);
            }
            left -= weight;
        }
        // Rounding can leave a remainder after the last token.
        Ok(kept.last().map_or(best, |&(id, _)| id))
    }
}

fn penalize_repetition(logits: &mut [f32], history: &[u32], penalty: f32) {
    if penalty == 1.0 {
        return;
    }
    let mut seen = vec![false; logits.len()];
    for &id in history {
        let id = id as usize;
        if id < logits.len() && !std::mem::replace(&mut seen[id], true) {
            logits[id] = if logits[id] > 0.0 { logits[id] / penalty } else { logits[id] * penalty };
        }
    }
}

/// The id and value of the largest logit, ties to the lower id.
fn argmax(logits: &[f32]) -> Result<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in (0u32..).zip(logits) {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    match best.1 == f32::NEG_INFINITY {
        false => Ok(best),
        true => Err(no_finite_logit(logits.len())),
    }
}

pub(crate) fn no_finite_logit(vocab: usize) -> ModelError {
    ModelError::request(
        "logits",
        format!("{vocab} values, all NaN or -inf"),
        "at least one finite logit; the model's weights or cache hold NaN, or every token is masked",
    )
}

/// The tokens that top-k, top-p and min-p leave, most probable first, with weights relative to the first one's 1.
fn kept_tokens(params: &SamplingParams, logits: &[f32], max: f32) -> Vec<(u32, f64)> {
    let temperature = f64::from(params.temperature);
    // The maximum is subtracted before the division: a tiny temperature then underflows to 0 and never overflows.
    let weigh = |logit: f32| ((f64::from(logit) - f64::from(max)) / temperature).exp();
    let mut ids: Vec<u32> = (0u32..).zip(logits).filter(|&(_, &l)| l > f32::NEG_INFINITY).map(|(id, _)| id).collect();
    let likelier = |&a: &u32, &b: &u32| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    if let Some(k) = params.top_k.filter(|&k| k < ids.len()) {
        ids.select_nth_unstable_by(k - 1, likelier);
        ids.truncate(k);
    }
    ids.sort_unstable_by(likelier);
    let mut kept: Vec<(u32, f64)> = ids.into_iter().map(|id| (id, weigh(logits[id as usize]))).collect();
    if params.top_p < 1.0 {
        let enough = f64::from(params.top_p) * kept.iter().map(|&(_, weight)| weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|&(_, weight)| {
            sum += weight;
            sum >= enough
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    }
    let floor = f64::from(params.min_p);
    kept.truncate(kept.partition_point(|&(_, weight)| weight >= floor && weight > 0.0));
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn warm(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, ..SamplingParams::greedy() }
    }

    fn sample(params: SamplingParams, logits: &[f32]) -> u32 {
        Sampler::new(params).unwrap().sample(&mut logits.to_vec(), &[]).unwrap()
    }

    #[rstest]
    #[case("temperature", SamplingParams { temperature: -0.1, ..SamplingParams::greedy() })]
    #[case("temperature", SamplingParams { temperature: f32::NAN, ..SamplingParams::greedy() })]
    #[case("top_k", SamplingParams { top_k: Some(0), ..SamplingParams::greedy() })]
    #[case("top_p", SamplingParams { top_p: 0.0, ..SamplingParams::greedy() })]
    #[case("top_p", SamplingParams { top_p: f32::NAN, ..SamplingParams::greedy() })]
    #[case("min_p", SamplingParams { min_p: 1.5, ..SamplingParams::greedy() })]
    #[case("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..SamplingParams::greedy() })]
    fn an_option_out_of_range_is_refused_by_name(#[case] option: &str, #[case] params: SamplingParams) {
        let message = Sampler::new(params).unwrap_err().to_string();
        assert!(message.starts_with(&format!("`{option}` is ")), "{message}");
    }

    #[test]
    fn nan_and_infinite_logits_do_not_disturb_the_choice() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for temperature in [0.0, 1e-30, 1.0] {
            assert_eq!(sample(warm(temperature), &[nan, -inf, 3.0, nan]), 2);
            assert_eq!(sample(warm(temperature), &[1.0, inf, nan, 3.0]), 1);
            for dead in [&[][..], &[nan, nan], &[-inf]] {
                let mut sampler = Sampler::new(warm(temperature)).unwrap();
                let message = sampler.sample(&mut dead.to_vec(), &[]).unwrap_err().to_string();
                assert!(message.contains("`logits`"), "{message}");
            }
        }
    }

    #[test]
    fn greedy_ties_go_to_the_lower_id() {
        assert_eq!(sample(SamplingParams::greedy(), &[1.0, 5.0, 5.0, 5.0]), 1);
    }

    #[test]
    fn the_penalty_counts_each_seen_token_once_and_ignores_foreign_ids() {
        let mut logits = vec![4.0, 3.0, -1.0];
        penalize_repetition(&mut logits, &[0, 0, 2, 99, 0], 2.0);
        assert_eq!(logits, [2.0, 3.0, -2.0]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        // Probabilities 1/2, 1/4, 1/4; 20000 samples have a standard deviation of at most 0.0036.
        let logits = [2f32.ln(), 0.0, 0.0];
        let mut sampler = Sampler::new(warm(1.0)).unwrap();
        let mut counts = [0u32; 3];
        for _ in 0..20_000 {
            counts[sampler.sample(&mut logits.to_vec(), &[]).unwrap() as usize] += 1;
        }
        for (count, expected) in counts.iter().zip([0.5, 0.25, 0.25]) {
            assert!((f64::from(*count) / 20_000.0 - expected).abs() < 0.02, "{counts:?}");
        }
    }

    fn distinct_logits() -> impl Strategy<Value = Vec<f32>> {
        (2usize..60).prop_flat_map(|n| Just((0..n).map(|i| i as f32 * 0.21 - 5.0).collect::<Vec<_>>()).prop_shuffle())
    }

    /// The kept set from the definitions alone, one condition per token.
    fn twin(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
        let n = logits.len();
        let rank = |i: usize| (0..n).filter(|&j| logits[j] > logits[i]).count();
        let weight = |i: usize| (f64::from(logits[i]) / f64::from(params.temperature)).exp();
        let top_k: Vec<usize> = (0..n).filter(|&i| rank(i) < params.top_k.unwrap_or(n)).collect();
        let total: f64 = top_k.iter().map(|&i| weight(i)).sum();
        let best = top_k.iter().map(|&i| weight(i)).fold(0.0, f64::max);
        let mass_before = |i: usize| top_k.iter().filter(|&&j| rank(j) < rank(i)).map(|&j| weight(j)).sum::<f64>();
        let in_top_p = |i: usize| params.top_p == 1.0 || mass_before(i) < f64::from(params.top_p) * total;
        let in_min_p = |i: usize| weight(i) >= f64::from(params.min_p) * best;
        top_k.iter().copied().filter(|&i| in_top_p(i) && in_min_p(i)).map(|i| i as u32).collect()
    }

    proptest! {
        #[test]
        fn narrow_options_are_greedy(logits in distinct_logits(), seed: u64) {
            let expected = sample(SamplingParams::greedy(), &logits);
            let base = SamplingParams { seed, ..warm(1.3) };
            prop_assert_eq!(sample(SamplingParams { top_k: Some(1), ..base.clone() }, &logits), expected);
            prop_assert_eq!(sample(SamplingParams { min_p: 1.0, ..base.clone() }, &logits), expected);
            prop_assert_eq!(sample(SamplingParams { top_p: 1e-6, ..base }, &logits), expected);
        }

        #[test]
        fn equal_seeds_give_equal_tokens(logits in distinct_logits(), seed: u64) {
            let run = || {
                let mut sampler = Sampler::new(SamplingParams { seed, ..warm(2.0) }).unwrap();
                (0..20).map(|_| sampler.sample(&mut logits.clone(), &[]).unwrap()).collect::<Vec<_>>()
            };
            prop_assert_eq!(run(), run());
        }

        #[test]
        fn kept_tokens_are_those_of_the_definitions(
            logits in distinct_logits(),
            temperature in 0.2f32..3.0,
            top_k in proptest::option::of(1usize..70),
            top_p in prop_oneof![Just(1.0f32), 0.01f32..0.999],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..0.9],
        ) {
            let params = SamplingParams { top_k, top_p, min_p, ..warm(temperature) };
            let max = argmax(&logits).unwrap().1;
            let mut kept: Vec<u32> = kept_tokens(&params, &logits, max).into_iter().map(|(id, _)| id).collect();
            kept.sort_unstable();
            prop_assert_eq!(kept, twin(&params, &logits));
        }
    }
}
