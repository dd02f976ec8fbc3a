//! Field-wise reading of a JSON object, so that every refusal names its field.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::sizes::MOST;
use crate::{ModelError, Result, files};

/// The object in a JSON file. A field that is `null` counts as absent, as it does in transformers.
pub(crate) struct Fields {
    pub(crate) path: PathBuf,
    object: Map<String, Value>,
}

impl Fields {
    /// Reads the object in the file `path`; `hint` says what to do when there is no such file.
    pub(crate) fn read(path: &Path, hint: &str) -> Result<Self> {
        Ok(Self { path: path.into(), object: files::json(path, hint)? })
    }

    /// The object in the field `name`, or `None` if it is absent.
    pub(crate) fn object(&self, name: &str) -> Result<Option<Self>> {
        let object = self.optional::<Map<String, Value>>(name, "an object")?;
        Ok(object.map(|object| Self { path: self.path.clone(), object }))
    }

    /// The value of the field `name`, or `None` if it is absent; `expected` describes its type.
    pub(crate) fn optional<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<Option<T>> {
        match self.object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                T::deserialize(value).map(Some).map_err(|_| self.error(name, short(value), expected.to_string()))
            }
        }
    }

    /// The value of the field `name`, which must be there.
    pub(crate) fn required<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<T> {
        self.optional(name, expected)?.ok_or_else(|| self.error(name, "missing".into(), expected.to_string()))
    }

    /// A count that must be there.
    pub(crate) fn count(&self, name: &str) -> Result<usize> {
        self.optional_count(name)?.ok_or_else(|| self.error(name, "missing".into(), "a whole number".into()))
    }

    /// A count, or `default` if it is absent.
    pub(crate) fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.optional_count(name)?.unwrap_or(default))
    }

    /// A count, or `None` if it is absent. No tensor has a larger size, and the sum of two does not overflow.
    pub(crate) fn optional_count(&self, name: &str) -> Result<Option<usize>> {
        let count = self.optional::<usize>(name, "a whole number")?;
        match count.filter(|&count| count > MOST) {
            None => Ok(count),
            Some(count) => Err(self.error(name, count.to_string(), format!("a whole number of at most {MOST}"))),
        }
    }

    /// A number, or `default` if it is absent.
    pub(crate) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.optional(name, "a number")?.unwrap_or(default))
    }

    /// A flag, or `default` if it is absent.
    pub(crate) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.optional(name, "true or false")?.unwrap_or(default))
    }

    /// A word, or `default` if it is absent.
    pub(crate) fn word_or(&self, name: &str, default: &str) -> Result<String> {
        Ok(self.optional(name, "a string")?.unwrap_or_else(|| default.to_string()))
    }

    /// Token ids, published as one number or as a list; empty if absent.
    pub(crate) fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        match self.object.get(name) {
            Some(Value::Number(_)) => Ok(vec![self.required(name, "a token id")?]),
            _ => Ok(self.optional(name, "a token id or a list of token ids")?.unwrap_or_default()),
        }
    }

    /// Refuses a list of layer kinds that is there and differs from the only one that is implemented.
    pub(crate) fn schedule<'a>(&self, name: &str, kinds: impl ExactSizeIterator<Item = &'a str>) -> Result<()> {
        let Some(found) = self.optional::<Vec<String>>(name, "a list of layer kinds")? else {
            return Ok(());
        };
        if found.len() != kinds.len() {
            let expected = format!("one for each of the {} layers", kinds.len());
            return Err(self.error(name, format!("a list of {}", found.len()), expected));
        }
        for (layer, (found, kind)) in found.iter().zip(kinds).enumerate() {
            if found != kind {
                return Err(self.error(&format!("{name}[{layer}]"), format!("\"{found}\""), format!("\"{kind}\"")));
            }
        }
        Ok(())
    }

    /// Refuses a field that has another value than the only one that is implemented.
    pub(crate) fn only<T>(&self, name: &str, actual: T, implemented: T) -> Result<()>
    where
        T: PartialEq + std::fmt::Display,
    {
        match actual == implemented {
            true => Ok(()),
            false => Err(self.error(name, actual.to_string(), format!("{implemented} (nothing else is implemented)"))),
        }
    }

    /// The refusal of the field `name`.
    pub(crate) fn error(&self, name: &str, actual: String, expected: String) -> ModelError {
        ModelError::Config { path: Some(self.path.clone()), field: name.to_string(), actual, expected }
    }
}

/// The beginning of a value that may be long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
