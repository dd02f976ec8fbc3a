//! What can go wrong between a checkpoint folder and a generated text.

use std::fmt;
use std::path::PathBuf;

use mla_ops::MlaError;
use mla_ops::cache::CacheError;
use thiserror::Error;

/// Why a checkpoint cannot be loaded, or a request cannot be carried out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused to read a file.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file or folder that the checkpoint needs is not there.
    #[error("{} does not exist; {hint}", path.display())]
    MissingFile {
        /// The file or folder.
        path: PathBuf,
        /// Who needs it, and what to do.
        hint: String,
    },
    /// Something else is where a file or a folder should be.
    #[error("{} is {found}, expected {expected}", path.display())]
    WrongKind {
        /// Where.
        path: PathBuf,
        /// What is there: a folder, a pipe, a file that is too large, ...
        found: String,
        /// What should be there.
        expected: String,
    },
    /// There is less memory than would be taken. Where it is known before, nothing has been allocated; otherwise it is one buffer that
    /// could not be, of weights, of a KV cache or of a step. The device can be used further.
    #[error("no room for {what} of {needed_bytes} bytes in the memory of {device}, which has {free_bytes} bytes free")]
    OutOfMemory {
        /// What needs it.
        what: &'static str,
        /// The device.
        device: String,
        /// Bytes that it takes, or that buffer.
        needed_bytes: u128,
        /// Bytes that the device has free, as it says; they may be in parts. 0 where it does not say.
        free_bytes: u64,
    },
    /// A JSON file cannot be parsed.
    #[error("{} is not valid JSON of the expected form: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The `model_type` of a `config.json` is none that this crate implements.
    #[error("{}: `model_type` is \"{found}\", but only {known} are implemented", path.display())]
    UnknownModelType {
        /// The configuration file.
        path: PathBuf,
        /// The model type it names.
        found: String,
        /// The implemented ones, in words.
        known: String,
    },
    /// A field of a configuration is missing, out of range, or contradicts another one.
    #[error("{}`{field}` is {actual}, expected {expected}", prefix(path.as_ref()))]
    Config {
        /// The configuration file, or `None` for a configuration made in code.
        path: Option<PathBuf>,
        /// The field, by its name in the file.
        field: String,
        /// Its value.
        actual: String,
        /// The values it may have.
        expected: String,
    },
    /// The operating system refused to write a file.
    #[error("cannot write {}: {source}; the checkpoint needs {needed_bytes} bytes in all", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the operating system said, for instance that no space is left on the device.
        source: std::io::Error,
        /// Bytes of all files of the checkpoint together.
        needed_bytes: u64,
    },
    /// The checkpoint is quantised in a form that is not read.
    #[error(
        "{}: {what}; weights in this form cannot be loaded, convert the checkpoint to bfloat16 first", path.display()
    )]
    UnsupportedQuantization {
        /// The file.
        path: PathBuf,
        /// The field or tensor that says so.
        what: String,
    },
    /// A safetensors file is truncated or corrupt.
    #[error("{} is not a complete safetensors file: {reason}; download it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tensors of a checkpoint do not fit the model its `config.json` describes.
    #[error("{0}")]
    Weights(Box<WeightReport>),
    /// The tokenizer cannot be read, or refused a text.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The tokenizer file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A folder has no chat template, or it cannot be parsed, or it does not render a conversation.
    #[error("{}: {reason}", path.display())]
    ChatTemplate {
        /// The file that has or should have the template.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A prompt or an option of a request is unusable.
    #[error("`{argument}` is {actual}, expected {expected}")]
    Request {
        /// The option.
        argument: &'static str,
        /// Its value.
        actual: String,
        /// The values it may have.
        expected: String,
    },
    /// A result could not be read back from the device.
    #[error("reading back from the device failed: {reason}")]
    Device {
        /// What the backend said.
        reason: String,
    },
    /// A step of an [`Engine`](crate::Engine) has failed. What its requests have in the cache is not known since, so that it takes
    /// no more steps and requests.
    #[error("the engine has failed and takes no more steps: {reason}")]
    EngineFailed {
        /// The error of that step.
        reason: String,
    },
    /// A [`Communicator`](crate::Communicator) could not bring the parts of the ranks together.
    #[error("the ranks cannot exchange values: {reason}")]
    Communicator {
        /// What it said.
        reason: String,
    },
    /// An operation refused its inputs.
    #[error(transparent)]
    Ops(#[from] MlaError),
    /// The paged cache refused a call, for instance because no page is free.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

impl ModelError {
    /// An unusable option of a request.
    pub(crate) fn request(argument: &'static str, actual: impl fmt::Display, expected: impl Into<String>) -> Self {
        Self::Request { argument, actual: actual.to_string(), expected: expected.into() }
    }

    /// A result that could not be read back.
    pub(crate) fn device(error: impl fmt::Display) -> Self {
        Self::Device { reason: error.to_string() }
    }

    /// What has another kind than the file or folder that is read there.
    pub(crate) fn wrong_kind(path: impl Into<PathBuf>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::WrongKind { path: path.into(), found: found.into(), expected: expected.into() }
    }

    /// A file that could not be read: missing with `hint`, or refused by the operating system.
    pub(crate) fn unreadable(path: impl Into<PathBuf>, source: std::io::Error, hint: impl Into<String>) -> Self {
        let path = path.into();
        match source.kind() {
            std::io::ErrorKind::NotFound => Self::MissingFile { path, hint: hint.into() },
            _ => Self::Io { path, source },
        }
    }
}

fn prefix(path: Option<&PathBuf>) -> String {
    path.map_or_else(String::new, |path| format!("{}: ", path.display()))
}

/// Every tensor of a checkpoint that does not fit the model, found in one pass over all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightReport {
    /// The checkpoint folder; empty for a model without one.
    pub checkpoint: PathBuf,
    /// Tensors that the model needs and no file holds.
    pub missing: Vec<String>,
    /// Tensors that no part of the model asked for.
    pub unexpected: Vec<String>,
    /// Tensors of another shape than the configuration asks for.
    pub wrong_shape: Vec<WrongShape>,
    /// Tensors of another element type than they may have.
    pub wrong_dtype: Vec<WrongDType>,
    /// Tensors with a number that their table may not hold, in words.
    pub out_of_range: Vec<String>,
    /// Tensors of 8 bits or fewer that cannot be dequantised.
    pub wrong_quantization: Vec<WrongQuantization>,
    /// Tensors that cannot be divided among the ranks.
    pub wrong_cut: Vec<WrongCut>,
}

/// A tensor whose shape contradicts the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongShape {
    /// The tensor's name.
    pub name: String,
    /// Its shape in the file.
    pub actual: Vec<usize>,
    /// The shape that the configuration asks for.
    pub expected: Vec<usize>,
}

/// A tensor whose element type is not one that it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongDType {
    /// The tensor's name.
    pub name: String,
    /// Its element type in the file, by its safetensors name.
    pub actual: String,
    /// Those it may have.
    pub expected: String,
}

/// A quantised weight, or its scales, that holds or lacks something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongQuantization {
    /// The tensor's name.
    pub name: String,
    /// What is wrong with it.
    pub actual: String,
    /// What it should have.
    pub expected: String,
}

/// A tensor that cannot be divided among the ranks as the model asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongCut {
    /// The tensor's name.
    pub name: String,
    /// What would be divided.
    pub actual: String,
    /// What can be.
    pub expected: String,
}

impl WeightReport {
    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.wrong_shape.is_empty()
            && self.wrong_dtype.is_empty()
            && self.out_of_range.is_empty()
            && self.wrong_quantization.is_empty()
            && self.wrong_cut.is_empty()
    }
}

/// Tensors named per kind in a message; a wrong `config.json` otherwise fills the screen with thousands.
const LISTED: usize = 12;

impl fmt::Display for WeightReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.checkpoint.as_os_str().is_empty() {
            true => write!(f, "the tensors of the configuration do not fit")?,
            false => write!(f, "the tensors of {} do not fit its config.json", self.checkpoint.display())?,
        }
        list(f, "missing", &self.missing, |f, name| write!(f, "{name}"))?;
        list(f, "unexpected", &self.unexpected, |f, name| write!(f, "{name}"))?;
        list(f, "wrong shape", &self.wrong_shape, |f, wrong| {
            write!(f, "{} is {:?}, expected {:?}", wrong.name, wrong.actual, wrong.expected)
        })?;
        list(f, "wrong dtype", &self.wrong_dtype, |f, wrong| {
            write!(f, "{} is {}, expected {}", wrong.name, wrong.actual, wrong.expected)
        })?;
        list(f, "out of range", &self.out_of_range, |f, what| write!(f, "{what}"))?;
        list(f, "wrong quantisation", &self.wrong_quantization, |f, wrong| {
            write!(f, "{} {}, expected {}", wrong.name, wrong.actual, wrong.expected)
        })?;
        list(f, "not divisible among the ranks", &self.wrong_cut, |f, wrong| {
            write!(f, "{} {}, expected {}", wrong.name, wrong.actual, wrong.expected)
        })
    }
}

fn list<T>(
    f: &mut fmt::Formatter<'_>,
    kind: &str,
    items: &[T],
    write_item: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n{} {kind}:", items.len())?;
    for item in items.iter().take(LISTED) {
        write!(f, "\n  ")?;
        write_item(f, item)?;
    }
    match items.len().saturating_sub(LISTED) {
        0 => Ok(()),
        more => write!(f, "\n  ... and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_twelve_of_each_kind_and_counts_the_rest() {
        let report = WeightReport {
            checkpoint: "/models/v3".into(),
            missing: (0..15).map(|i| format!("layer.{i}")).collect(),
            wrong_shape: vec![WrongShape { name: "norm".into(), actual: vec![3], expected: vec![4] }],
            ..WeightReport::default()
        };
        let text = report.to_string();
        assert!(text.contains("/models/v3") && text.contains("15 missing:"), "{text}");
        assert!(text.contains("layer.11\n  ... and 3 more") && !text.contains("layer.12"), "{text}");
        assert!(text.contains("norm is [3], expected [4]"), "{text}");
        assert!(!text.contains("unexpected") && !report.is_empty(), "{text}");
    }

    #[test]
    fn a_config_error_names_the_file_only_if_there_is_one() {
        let error = |path| ModelError::Config {
            path,
            field: "n_group".into(),
            actual: "3".into(),
            expected: "a divisor of `n_routed_experts` = 16".into(),
        };
        let tail = "`n_group` is 3, expected a divisor of `n_routed_experts` = 16";
        assert_eq!(error(None).to_string(), tail);
        assert_eq!(error(Some("a/config.json".into())).to_string(), format!("a/config.json: {tail}"));
    }
}
