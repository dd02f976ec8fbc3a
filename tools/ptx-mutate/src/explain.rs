//! Survivors that have an explanation, in a TOML file beside the kernel.
//!
//! Explanations match by operator and by patterns of PTX and CUDA text, never by line: they hold when the compiler
//! numbers registers and lines anew.
use crate::mutant::Mutant;
use regex::Regex;
use serde::Deserialize;
use std::path::Path;

/// A file that is no list of explanations.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The file cannot be read.
    #[error("{file}: {error}")]
    Read {
        /// The file.
        file: String,
        /// Why.
        error: std::io::Error,
    },
    /// It is no TOML of this form.
    #[error("{file}: {error}")]
    Form {
        /// The file.
        file: String,
        /// Why.
        error: Box<toml::de::Error>,
    },
    /// A pattern is no regular expression.
    #[error("{file}: {error}")]
    Pattern {
        /// The file.
        file: String,
        /// Why.
        error: Box<regex::Error>,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    survivor: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default)]
    kernel: String,
    operator: String,
    #[serde(default)]
    change: String,
    #[serde(default)]
    ptx: String,
    #[serde(default)]
    above: String,
    #[serde(default)]
    below: String,
    #[serde(default)]
    cuda: String,
    most: usize,
    why: String,
}

/// Why mutants of a kind survive.
#[derive(Debug)]
pub struct Explanation {
    kernel: Regex,
    operator: String,
    change: Regex,
    ptx: Regex,
    above: Regex,
    below: Regex,
    cuda: Regex,
    /// How many survivors it explains at most.
    pub most: usize,
    /// The explanation.
    pub why: String,
}

/// What patterns are compared with.
pub struct Context<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// The instructions before, one a line, registers without numbers.
    pub above: String,
    /// The instructions after.
    pub below: String,
    /// The line of CUDA source, if there is any.
    pub cuda: &'a str,
}

/// PTX text without the numbers of registers and labels.
pub fn without_numbers(ptx: &str) -> String {
    let numbers = Regex::new(r"(%(?:rd|rs|p|r|f|fd|h|b))\d+|(\$L__BB)\d+_\d+").expect("a constant pattern");
    numbers.replace_all(ptx, "$1$2").into_owned()
}

impl Explanation {
    fn new(entry: Entry) -> Result<Self, regex::Error> {
        Ok(Self {
            kernel: Regex::new(&entry.kernel)?,
            operator: entry.operator,
            change: Regex::new(&entry.change)?,
            ptx: Regex::new(&entry.ptx)?,
            above: Regex::new(&entry.above)?,
            below: Regex::new(&entry.below)?,
            cuda: Regex::new(&entry.cuda)?,
            most: entry.most,
            why: entry.why,
        })
    }

    /// Whether it is about this kernel.
    pub fn is_about(&self, kernel: &str) -> bool {
        self.kernel.is_match(kernel)
    }

    /// Whether it is about this mutant.
    pub fn matches(&self, mutant: &Mutant, context: &Context) -> bool {
        self.operator == mutant.operator
            && self.is_about(context.kernel)
            && self.change.is_match(&mutant.change)
            && self.ptx.is_match(&without_numbers(&mutant.ptx))
            && self.above.is_match(&context.above)
            && self.below.is_match(&context.below)
            && self.cuda.is_match(context.cuda)
    }
}

impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}: {}", self.operator, self.ptx.as_str(), self.why)
    }
}

/// Reads a list of explanations.
///
/// # Errors
/// [`ExplainError`] with the file's name.
pub fn read(path: &Path) -> Result<Vec<Explanation>, ExplainError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| ExplainError::Read { file: file.clone(), error })?;
    let parsed: File =
        toml::from_str(&text).map_err(|error| ExplainError::Form { file: file.clone(), error: Box::new(error) })?;
    let pattern = |error| ExplainError::Pattern { file: file.clone(), error: Box::new(error) };
    parsed.survivor.into_iter().map(|entry| Explanation::new(entry).map_err(pattern)).collect()
}
