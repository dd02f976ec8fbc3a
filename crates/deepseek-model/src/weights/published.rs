//! How DeepSeek publishes the weights of a model.

use safetensors::Dtype;

use super::Checkpoint;

/// Names of tensors, which of them are quantised, and how their scales are stored; each model has one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Published {
    /// What the name of a layer's tensor begins with, before its number.
    pub(crate) layers: &'static str,
    /// Ends of the names of the modules whose weights are quantised.
    pub(crate) projections: &'static [&'static str],
    /// Whether routed experts are E2M1 numbers, two in a byte.
    pub(crate) fp4_experts: bool,
    /// Whether scales are powers of two.
    pub(crate) power_of_two_scales: bool,
    /// What the name of a tensor with scales ends with.
    pub(crate) scale_suffix: &'static str,
    /// What scales are stored in.
    pub(crate) scale_dtype: Dtype,
    /// Other names that files may have in the place of the published ones.
    pub(crate) renaming: Option<Renaming>,
}

/// From published names to those of another layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Renaming {
    /// A tensor that every file set has: under its other name, all have theirs.
    pub(crate) probe: &'static str,
    /// The other name of a tensor.
    pub(crate) rename: fn(&str) -> String,
}

impl Published {
    /// Whether a tensor is quantised in the published files.
    pub(crate) fn is_projection(&self, name: &str) -> bool {
        let Some(module) = name.strip_suffix(".weight").filter(|_| name.starts_with(self.layers)) else { return false };
        self.projections
            .iter()
            .any(|projection| module.strip_suffix(projection).is_some_and(|rest| rest.ends_with('.')))
    }
}

impl Renaming {
    /// Whether a checkpoint has the other names.
    pub(super) fn is_of(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.tensors.contains_key(&(self.rename)(self.probe))
    }
}
