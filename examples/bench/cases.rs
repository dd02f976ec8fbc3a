//! What the sections share: where they run, which shapes, and what becomes of an error.

use std::fmt::Debug;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{DType, Device};
use burn_mla::model::SamplingParams;
use burn_mla::ops::Path;

use crate::codes::BlocksArg;
use crate::common::{KvCacheArg, WeightsArg};
use crate::report::Report;
use crate::timing::{Timer, caught};

/// Which shapes of a section to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    Full,
    Quick,
    Smoke,
}

/// What the sections share.
pub struct Bench {
    pub device: Device,
    /// Those that whole models are divided among; the one above is the first.
    pub devices: Vec<Device>,
    pub dtype: DType,
    /// What runs `mla_decode`, where that is not left to the operation.
    pub path: Option<Path>,
    pub weights_seed: u64,
    /// In blocks or dense, where that is not left to the configuration.
    pub weights: Option<WeightsArg>,
    /// Of `linear` and `experts`: in blocks of such codes.
    pub blocks: Option<BlocksArg>,
    pub kv_cache: Option<KvCacheArg>,
    /// Whether engines of whole models are.
    pub deterministic: bool,
    /// Steps of whole models are captured ones alone.
    pub captured: bool,
    /// How whole models choose tokens; each request has another seed.
    pub sampling: SamplingParams,
    /// Tokens of the prompts before whole models decode.
    pub context: usize,
    /// Batches of whole models in e2e, rows of linear and tokens of experts; their own if there are none.
    pub batches: Vec<usize>,
    pub size: Size,
    /// What the description of a shape contains that is to run.
    pub shape: Option<String>,
    /// Whether tokens draw their experts.
    pub random_experts: bool,
    pub timer: Timer,
    pub report: Report,
    /// Where inputs and results are written to.
    pub save: Option<PathBuf>,
    /// After this no case starts.
    pub end: Option<Instant>,
    /// What a copy of memory reached, where the ceilings were measured.
    pub copy_gbps: Option<f64>,
}

impl Bench {
    /// Runs one case. What goes wrong in it, a panic included, is noted, and the next case runs.
    pub fn case(&mut self, name: &str, run: impl FnOnce(&mut Self) -> Result<(), String>) {
        if self.end.is_some_and(|end| Instant::now() > end) {
            self.report.skip(name);
            return;
        }
        if let Err(error) = caught(|| run(self)) {
            self.report.error(name, &error);
        }
        // Sizes vary from case to case: what one leaves in the pool, the next cannot use.
        self.device.memory_cleanup();
    }

    /// The shapes to run: all, every `step`-th, or the tiny ones; of these the ones that were asked for.
    pub fn pick<T: Clone + Debug>(&self, full: &[T], step: usize, smoke: &[T]) -> Vec<T> {
        let mut shapes = match self.size {
            Size::Full => full.to_vec(),
            Size::Quick => full.iter().step_by(step).cloned().collect(),
            Size::Smoke => smoke.to_vec(),
        };
        shapes.retain(|shape| self.shape.as_ref().is_none_or(|text| format!("{shape:?}").contains(text)));
        shapes
    }

    /// Rows of products: these, or those that `--batches` names.
    pub fn rows(&self, rows: &[usize]) -> Vec<usize> {
        if self.batches.is_empty() { self.pick(rows, 2, &[5]) } else { self.batches.clone() }
    }
}
