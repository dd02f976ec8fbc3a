//! Comparison of a loaded model with the results that are stored beside its checkpoint (`expected.safetensors`).

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::tensor::{FloatDType, Tensor};
use mla_ops::cache::RequestId;
use safetensors::{Dtype, SafeTensors};

use crate::cache::{CacheSize, ModelCache};
use crate::model::DeepseekModel;
use crate::models::Hidden;
use crate::ranks::ModelRef;
use crate::step::Chunk;
use crate::{ModelError, Result, files};
use mla_ops::Determinism;

/// What is compared, and with which sizes.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// Tokens in a cache page.
    pub page_size: usize,
    /// Prompt tokens per forward pass, for the chunked prefills.
    pub prefill_chunks: Vec<usize>,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        Self { page_size: 64, prefill_chunks: vec![1, 3, 16] }
    }
}

/// A line of the comparison.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// What was computed.
    pub what: String,
    /// The largest absolute difference to the stored values; infinite if one is not a number.
    pub max_error: f64,
    /// The largest that is allowed.
    pub tolerance: f64,
    /// Greedy tokens that agree, of how many; where tokens were generated.
    pub greedy: Option<(usize, usize)>,
}

impl Comparison {
    /// Whether the difference is allowed and all greedy tokens agree.
    pub fn passed(&self) -> bool {
        self.max_error <= self.tolerance && self.greedy.is_none_or(|(agree, of)| agree == of)
    }
}

/// Runs full forward, cached decode, chunked prefill and the ragged batch against the stored results in `dir`.
///
/// Tolerances are those stored with the checkpoint (`meta.json` or `expected.json`); they hold for f32.
///
/// # Errors
/// Files that are missing or damaged, or a forward pass that fails. A difference is no error but a [`Comparison`].
pub fn verify<'a>(model: impl Into<ModelRef<'a>>, dir: &Path, options: &VerifyOptions) -> Result<Vec<Comparison>> {
    match model.into() {
        ModelRef::One(model) => verify_rank(model, dir, options),
        ModelRef::Ranks(ranks) => ranks.on_each(|rank| verify_rank(rank, dir, options)),
    }
}

/// All ranks take the stored tokens, so that they take the same steps.
fn verify_rank(model: &DeepseekModel, dir: &Path, options: &VerifyOptions) -> Result<Vec<Comparison>> {
    let expected = Expected::read(dir)?;
    expected.check_ids(model.vocab_size())?;
    let run = Run { model, expected: &expected, page_size: options.page_size };
    let mut rows = run.full_forward()?;
    for &chunk in &options.prefill_chunks {
        rows.push(run.chunked_prefill(chunk)?);
    }
    rows.push(run.greedy("cached decode", &[""])?);
    let ragged: Vec<String> = (0..).map(|i| format!("ragged.{i}.")).take_while(|p| expected.has(p)).collect();
    if !ragged.is_empty() {
        let prefixes: Vec<&str> = ragged.iter().map(String::as_str).collect();
        rows.push(run.greedy(&format!("ragged batch of {}", ragged.len()), &prefixes)?);
    }
    Ok(rows)
}

/// The model and what it should compute.
struct Run<'a> {
    model: &'a DeepseekModel,
    expected: &'a Expected,
    page_size: usize,
}

impl Run<'_> {
    /// The whole prompt at once: logits of every token, and hidden states where they are stored.
    fn full_forward(&self) -> Result<Vec<Comparison>> {
        let prompt = self.expected.ids("input_ids")?;
        let (mut cache, requests) = self.admit(&[prompt.len()])?;
        let mut hidden = Vec::new();
        let chunk = cache.append(requests[0], &prompt)?;
        let logits = self.model.forward(&[chunk], &mut cache, Determinism::Fast, &mut |point, states| {
            let name = match point {
                Hidden::Embedding => "hidden.embed".to_string(),
                Hidden::Layer(layer) => format!("hidden.layer.{layer}"),
                Hidden::HyperHead => "hidden.hc_head".to_string(),
                Hidden::FinalNorm => "hidden.final_norm".to_string(),
            };
            hidden.push((name, states.clone()));
        })?;
        let logits = to_host(logits)?;
        let mut rows = vec![self.row("full forward", self.error_of_rows(&logits, "logits")?, None)];
        let mut worst: Option<f64> = None;
        for (name, states) in hidden {
            if self.expected.has_floats(&name) {
                let error = max_error(&to_host(states)?, self.expected.floats(&name)?);
                worst = Some(worst.unwrap_or(0.0).max(error));
            }
        }
        if let (Some(max_error), Some(tolerance)) = (worst, self.expected.hidden_tolerance) {
            rows.push(Comparison { what: "hidden states".into(), max_error, tolerance, greedy: None });
        }
        Ok(rows)
    }

    /// The prompt in chunks: logits of every token.
    fn chunked_prefill(&self, size: usize) -> Result<Comparison> {
        let prompt = self.expected.ids("input_ids")?;
        let (mut cache, requests) = self.admit(&[prompt.len()])?;
        let mut logits = Vec::new();
        for tokens in prompt.chunks(size.max(1)) {
            let chunk = cache.append(requests[0], tokens)?;
            logits.extend(to_host(self.model.forward(&[chunk], &mut cache, Determinism::Fast, &mut |_, _| {})?)?);
        }
        Ok(self.row(&format!("prefill by {size}"), self.error_of_rows(&logits, "logits")?, None))
    }

    /// All prompts with these prefixes in one batch, continued greedily: logits of prompts and steps, and the tokens.
    fn greedy(&self, what: &str, prefixes: &[&str]) -> Result<Comparison> {
        let named = |prefix: &str, name: &str| format!("{prefix}{name}");
        let prompts: Vec<Vec<u32>> =
            prefixes.iter().map(|p| self.expected.ids(&named(p, "input_ids"))).collect::<Result<_>>()?;
        let wanted: Vec<Vec<u32>> =
            prefixes.iter().map(|p| self.expected.ids(&named(p, "greedy_ids"))).collect::<Result<_>>()?;
        let lengths: Vec<usize> = prompts.iter().zip(&wanted).map(|(p, w)| p.len() + w.len()).collect();
        let (mut cache, requests) = self.admit(&lengths)?;

        let mut error = 0.0_f64;
        let mut next = Vec::new();
        let chunks = new_chunks(&mut cache, requests.iter().copied().zip(prompts.iter().map(Vec::as_slice)))?;
        let vocab = self.model.vocab_size();
        let logits = to_host(self.model.forward(&chunks, &mut cache, Determinism::Fast, &mut |_, _| {})?)?;
        let mut rows = logits.chunks_exact(vocab);
        for (prefix, prompt) in prefixes.iter().zip(&prompts) {
            let own: Vec<f32> = rows.by_ref().take(prompt.len()).flatten().copied().collect();
            error = error.max(self.error_of_rows(&own, &named(prefix, "logits"))?);
            next.push(own[own.len() - vocab..].to_vec());
        }

        let steps = wanted.iter().map(Vec::len).max().unwrap_or(0);
        let mut agree = 0;
        for step in 0..steps {
            let mut taken = Vec::new();
            for (s, prefix) in prefixes.iter().enumerate().filter(|(s, _)| step < wanted[*s].len()) {
                // Of a long continuation the logits of the first steps may be stored only; the tokens are, all of them.
                let stored = self.expected.floats(&named(prefix, "greedy_logits"))?;
                match stored.chunks(vocab).nth(step) {
                    Some(stored) => error = error.max(max_error(&next[s], stored)),
                    None if step == 0 => error = f64::INFINITY,
                    None => {}
                }
                let id = argmax(&next[s]);
                agree += usize::from(id == wanted[s][step]);
                // The stored logits are those after the stored tokens.
                taken.push((s, [wanted[s][step]]));
            }
            if step + 1 == steps {
                break;
            }
            let chunks = new_chunks(&mut cache, taken.iter().map(|(s, id)| (requests[*s], id.as_slice())))?;
            let logits = to_host(self.model.next_token_logits(&chunks, &mut cache, Determinism::Fast)?)?;
            for ((s, _), row) in taken.iter().zip(logits.chunks_exact(vocab)) {
                next[*s] = row.to_vec();
            }
        }
        Ok(self.row(what, error, Some((agree, wanted.iter().map(Vec::len).sum()))))
    }

    fn row(&self, what: &str, max_error: f64, greedy: Option<(usize, usize)>) -> Comparison {
        Comparison { what: what.into(), max_error, tolerance: self.expected.logits_tolerance, greedy }
    }

    /// The largest difference of a prompt's logits. Of a long prompt those of the last tokens may be stored only.
    fn error_of_rows(&self, actual: &[f32], name: &str) -> Result<f64> {
        let stored = self.expected.floats(name)?;
        let are_rows = !stored.is_empty() && stored.len().is_multiple_of(self.model.vocab_size());
        let last = actual.len().checked_sub(stored.len()).filter(|_| are_rows);
        Ok(last.map_or(f64::INFINITY, |first| max_error(&actual[first..], stored)))
    }

    /// A cache with a request for each of these lengths.
    fn admit(&self, lengths: &[usize]) -> Result<(ModelCache, Vec<RequestId>)> {
        let page_size = self.page_size.max(1);
        let mut cache = self.model.new_cache(CacheSize {
            num_pages: lengths.iter().map(|len| len.div_ceil(page_size)).sum(),
            page_size: self.page_size,
            max_requests: lengths.len(),
            max_tokens: lengths.iter().copied().max().unwrap_or(1),
        })?;
        let requests = lengths.iter().map(|_| cache.admit()).collect::<std::result::Result<_, _>>()?;
        Ok((cache, requests))
    }
}

fn new_chunks<'a>(cache: &mut ModelCache, tokens: impl Iterator<Item = (RequestId, &'a [u32])>) -> Result<Vec<Chunk>> {
    tokens.map(|(request, tokens)| Ok(cache.append(request, tokens)?)).collect()
}

/// The largest difference; infinite where lengths differ or a value is not a number.
fn max_error(actual: &[f32], expected: &[f32]) -> f64 {
    if actual.len() != expected.len() {
        return f64::INFINITY;
    }
    let differences = actual.iter().zip(expected).map(|(a, e)| (f64::from(*a) - f64::from(*e)).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id as u32)
}

fn to_host(tensor: Tensor<2>) -> Result<Vec<f32>> {
    tensor.cast(FloatDType::F32).try_into_vec_as::<f32>().map_err(ModelError::device)
}

/// The stored results.
struct Expected {
    path: PathBuf,
    floats: HashMap<String, Vec<f32>>,
    ids: HashMap<String, Vec<u32>>,
    logits_tolerance: f64,
    hidden_tolerance: Option<f64>,
}

impl Expected {
    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("expected.safetensors");
        let hint = "`verify` needs a checkpoint folder with stored results";
        let mut bytes = Vec::new();
        let read = files::open(&path, hint)?.read_to_end(&mut bytes);
        read.map_err(|error| ModelError::unreadable(&path, error, hint))?;
        let damaged = |reason: String| ModelError::Safetensors { path: path.clone(), reason };
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| damaged(error.to_string()))?;
        let (mut floats, mut ids) = (HashMap::new(), HashMap::new());
        for (name, view) in tensors.iter() {
            match view.dtype() {
                Dtype::F32 => {
                    let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                    floats.insert(name.to_string(), values.collect());
                }
                Dtype::I64 => {
                    let (numbers, _) = view.data().as_chunks::<8>();
                    let values = numbers.iter().map(|&bytes| i64::from_le_bytes(bytes));
                    let values = values.map(|value| {
                        u32::try_from(value)
                            .map_err(|_| damaged(format!("tensor `{name}` holds {value}, expected token ids")))
                    });
                    ids.insert(name.to_string(), values.collect::<Result<_>>()?);
                }
                other => {
                    return Err(damaged(format!("tensor `{name}` has dtype {other:?}, expected F32 or I64")));
                }
            }
        }
        let (logits_tolerance, hidden_tolerance) = read_tolerances(dir)?;
        Ok(Self { path, floats, ids, logits_tolerance, hidden_tolerance })
    }

    fn has(&self, prefix: &str) -> bool {
        self.ids.contains_key(&format!("{prefix}input_ids"))
    }

    fn has_floats(&self, name: &str) -> bool {
        self.floats.contains_key(name)
    }

    fn floats(&self, name: &str) -> Result<&[f32]> {
        self.floats.get(name).map(Vec::as_slice).ok_or_else(|| self.missing(name))
    }

    fn ids(&self, name: &str) -> Result<Vec<u32>> {
        self.ids.get(name).cloned().ok_or_else(|| self.missing(name))
    }

    /// Whether a model with such a vocabulary can be asked for what is stored: prompts have tokens, all of them its own.
    fn check_ids(&self, vocab_size: usize) -> Result<()> {
        let damaged = |reason| Err(ModelError::Safetensors { path: self.path.clone(), reason });
        for (name, ids) in &self.ids {
            if ids.is_empty() && name.ends_with("input_ids") {
                return damaged(format!("tensor `{name}` is empty, expected the tokens of a prompt"));
            }
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return damaged(format!("tensor `{name}` holds {id}, expected token ids below {vocab_size}"));
            }
        }
        Ok(())
    }

    fn missing(&self, name: &str) -> ModelError {
        let reason = format!("it has no tensor `{name}` of the expected dtype");
        ModelError::Safetensors { path: self.path.clone(), reason }
    }
}

/// The allowed differences of logits and hidden states: `tolerance` in `meta.json`, or in `expected.json`.
fn read_tolerances(dir: &Path) -> Result<(f64, Option<f64>)> {
    let path = ["meta.json", "expected.json"].map(|name| dir.join(name)).into_iter().find(|path| path.is_file());
    let path = path.ok_or_else(|| ModelError::MissingFile {
        path: dir.join("meta.json"),
        hint: "the tolerances are stored there, or in expected.json".into(),
    })?;
    let json = |reason: String| ModelError::Json { path: path.clone(), reason };
    let text = String::from_utf8(files::read(&path, "")?).map_err(|error| json(error.to_string()))?;
    // Python writes an infinite margin as `Infinity`, which JSON does not have.
    let value: serde_json::Value = files::parse(&path, text.replace(": Infinity", ": null").as_bytes())?;
    let tolerance = |name: &str| value["tolerance"][name].as_f64();
    let logits = tolerance("logits").ok_or_else(|| json("it has no number `tolerance.logits`".into()))?;
    Ok((logits, tolerance("hidden")))
}
