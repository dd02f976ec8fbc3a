//! What the library for tokenizers makes of a file. Some of its readers panic at a file that is damaged, where others return errors.

use std::panic::catch_unwind;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::{ModelError, files};

/// The sections whose readers panic at what is no JSON.
#[derive(Deserialize)]
struct Sections {
    #[serde(default, rename = "normalizer")]
    _normalizer: Value,
    #[serde(default, rename = "pre_tokenizer")]
    _pre_tokenizer: Value,
    #[serde(default, rename = "post_processor")]
    _post_processor: Value,
    #[serde(default, rename = "decoder")]
    _decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    /// What tokens within words begin with; longer than one of them, it is a panic.
    #[serde(default)]
    continuing_subword_prefix: Option<Value>,
}

/// The tokenizer in a text; otherwise what is wrong with it.
pub(super) fn tokenizer(path: &Path, text: Vec<u8>) -> Result<Tokenizer, String> {
    let sections: Sections = files::parse(path, &text).map_err(|error| match error {
        ModelError::Json { reason, .. } => format!("not a tokenizer that can be read: {reason}"),
        other => other.to_string(),
    })?;
    let prefix = sections.model.continuing_subword_prefix.filter(|prefix| !prefix.is_null() && prefix != "");
    if let Some(prefix) = prefix {
        let expected = "none, as in every DeepSeek tokenizer";
        return Err(format!("its `model.continuing_subword_prefix` is {prefix}, expected {expected}"));
    }
    match catch_unwind(|| Tokenizer::from_bytes(text)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(error)) => Err(format!("not a tokenizer that can be read: {error}")),
        Err(_) => Err("not a tokenizer that can be read: its reader has panicked".into()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(text: impl ToString) -> String {
        tokenizer(Path::new("tokenizer.json"), text.to_string().into_bytes()).expect_err("it is damaged")
    }

    /// Each of these is a panic of the library.
    #[test]
    fn damaged_files_are_errors() {
        let file = |decoder: &str, model| json!({"version": "1.0", "decoder": {"type": decoder}, "model": model});
        let bpe = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []});
        let escaped = file("?", bpe.clone()).to_string().replace('?', "\\ud800");
        assert!(refused(escaped).contains("not a tokenizer"));
        let prefixed = json!({"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0}, "merges": ["a a"]});
        assert!(refused(file("ByteLevel", prefixed)).contains("continuing_subword_prefix"));
        let merged = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]});
        assert!(refused(file("ByteLevel", merged)).contains("not a tokenizer"));
        assert!(refused("{").contains("not a tokenizer") && refused("\u{FEFF}{}").contains("byte order mark"));
    }
}
