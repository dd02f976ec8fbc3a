//! Text to token ids and back, by the `tokenizer.json` of a checkpoint.

mod limit;
mod read;
mod stop;
mod stream;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tokenizers::DecoderWrapper;

pub use self::stop::{StopOutcome, StopStrings};
pub use self::stream::TextStream;
use crate::{ModelError, Result, files};

/// A byte-level BPE tokenizer. Clones share the vocabulary.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    path: PathBuf,
    /// In bytes, where that bounds how many tokens a text has at least.
    longest_token: Option<usize>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of the checkpoint folder `dir`.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`], [`ModelError::Io`], or [`ModelError::Tokenizer`] if the file cannot be parsed or is not
    /// byte-level (every DeepSeek tokenizer is; [`TextStream`] depends on it).
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let hint = "text cannot be encoded without it; download it from the model's page, or pass token ids";
        let text = files::read(&path, hint)?;
        let refused = |reason| ModelError::Tokenizer { path: path.clone(), reason };
        let inner = read::tokenizer(&path, text).map_err(refused)?;
        match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Ok(Self::of(inner, path)),
            _ => Err(refused("its `decoder` is not of type \"ByteLevel\", as that of every DeepSeek model is".into())),
        }
    }

    /// A tokenizer for a model without one: the ids 0 to 255 are the bytes of a text, higher ids have no text.
    ///
    /// # Errors
    /// None in practice.
    pub fn bytes() -> Result<Self> {
        let path = PathBuf::from("(bytes)");
        let vocab: Map<String, Value> = stream::byte_alphabet().map(|(byte, c)| (c.to_string(), byte.into())).collect();
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        let inner = tokenizers::Tokenizer::from_bytes(tokenizer.to_string());
        let inner = inner.map_err(|error| ModelError::Tokenizer { path: path.clone(), reason: error.to_string() })?;
        Ok(Self::of(inner, path))
    }

    fn of(inner: tokenizers::Tokenizer, path: PathBuf) -> Self {
        let longest_token = limit::longest_token(&inner);
        Self { inner: Arc::new(inner), path, longest_token }
    }

    /// The id of a special token, which no text that is decoded without special tokens has.
    pub(crate) fn special_id(&self, text: &str) -> Option<u32> {
        let added = self.inner.get_added_vocabulary();
        added.is_special_token(text).then(|| self.inner.token_to_id(text)).flatten()
    }

    /// Whether `text` is an added token.
    pub(crate) fn has_token(&self, text: &str) -> bool {
        self.inner.get_added_vocabulary().get_vocab().contains_key(text)
    }

    /// The ids of `text`; with `add_special_tokens` also those that the tokenizer puts around a text.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if the tokenizer refuses the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special_tokens).map_err(|error| self.refused(&error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`; bytes that are no UTF-8 become U+FFFD, and ids outside the vocabulary vanish.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if the decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner.decode(ids, skip_special_tokens).map_err(|error| self.refused(&error))
    }

    fn refused(&self, reason: &tokenizers::Error) -> ModelError {
        ModelError::Tokenizer { path: self.path.clone(), reason: reason.to_string() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn fixture() -> Tokenizer {
        Tokenizer::load(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/v3-tiny"))).unwrap()
    }

    #[test]
    fn the_cases_of_the_fixture_hold_in_both_directions() {
        let tokenizer = fixture();
        let cases = std::fs::read(tokenizer.path.with_file_name("tokenizer_cases.json")).unwrap();
        for case in serde_json::from_slice::<Vec<Value>>(&cases).unwrap() {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(case["text"].as_str().unwrap(), false).unwrap(), ids, "{case}");
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded"].as_str().unwrap(), "{case}");
        }
    }

    #[test]
    fn bytes_are_tokens_in_both_directions() {
        let tokenizer = Tokenizer::bytes().unwrap();
        let text = "naïve \u{0} text\n";
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!(TextStream::new(&tokenizer, true).push(300), None);
        assert!((0..=255).all(|byte| tokenizer.inner.id_to_token(byte).is_some()));
    }

    #[test]
    fn missing_broken_and_foreign_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let message = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json does not exist") && message.contains("download"), "{message}");
        let file = dir.path().join("tokenizer.json");
        std::fs::write(&file, "{").unwrap();
        assert!(matches!(Tokenizer::load(dir.path()), Err(ModelError::Tokenizer { .. })));
        let mut foreign: Value = serde_json::from_slice(&std::fs::read(&fixture().path).unwrap()).unwrap();
        foreign["decoder"] = Value::Null;
        std::fs::write(&file, foreign.to_string()).unwrap();
        let message = Tokenizer::load(dir.path()).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json") && message.contains("ByteLevel"), "{message}");
    }
}
