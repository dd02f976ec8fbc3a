//! Text out of tokens as they come, never half a character.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::Tokenizer;

/// Decodes one token at a time. All pieces together are [`Tokenizer::decode`] of all ids.
///
/// A token of a byte-level vocabulary may end inside a UTF-8 character. Its at most three bytes wait for the next token, so
/// that a token costs time by its own length only.
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl TextStream {
    /// A stream at the beginning of a text; with `skip_special_tokens`, special tokens leave no trace in it.
    pub fn new(tokenizer: &Tokenizer, skip_special_tokens: bool) -> Self {
        Self { tokenizer: tokenizer.clone(), skip_special_tokens, pending: Vec::new() }
    }

    /// The characters that the token `id` completes, or `None` if there are none.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let token = self.tokenizer.inner.id_to_token(id)?;
        let special = || self.tokenizer.inner.get_added_vocabulary().is_special_token(&token);
        if self.skip_special_tokens && special() {
            return None;
        }
        append_bytes(&mut self.pending, &token);
        let rest = incomplete_tail(&self.pending);
        let tail = self.pending.split_off(self.pending.len() - rest);
        let whole = std::mem::replace(&mut self.pending, tail);
        nonempty(&whole)
    }

    /// Ends the text: U+FFFD if the last character was never completed, otherwise `None`.
    pub fn finish(self) -> Option<String> {
        nonempty(&self.pending)
    }
}

fn nonempty(bytes: &[u8]) -> Option<String> {
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}

/// Length of the longest end of `bytes` that further bytes could complete to a character.
fn incomplete_tail(bytes: &[u8]) -> usize {
    // The decoder's own rule of what an unfinished sequence is decides, so that replacement characters come out alike.
    let unfinished = |&n: &usize| {
        std::str::from_utf8(&bytes[bytes.len() - n..]).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    };
    (1..=bytes.len().min(3)).rev().find(unfinished).unwrap_or(0)
}

/// Appends the bytes that the byte-level token `token` stands for: one per character, if all its characters are of the
/// byte-level alphabet, otherwise (added tokens) its own UTF-8.
fn append_bytes(bytes: &mut Vec<u8>, token: &str) {
    let start = bytes.len();
    for character in token.chars() {
        match BYTE_OF.get(&character) {
            Some(&byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// The alphabet of byte-level BPE (GPT-2's `bytes_to_unicode`): printable Latin-1 stands for itself, the other bytes take the
/// code points from 256 on, in order.
static BYTE_OF: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let mut next = 256;
    let mut character_of = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    (0..=u8::MAX).map(|byte| (character_of(byte), byte)).collect()
});

/// The same alphabet, by byte.
pub(super) fn byte_alphabet() -> impl Iterator<Item = (u8, char)> {
    BYTE_OF.iter().map(|(&character, &byte)| (byte, character))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::super::tests::fixture;
    use super::*;

    fn pieces(tokenizer: &Tokenizer, ids: &[u32], skip_special_tokens: bool) -> Vec<String> {
        let mut stream = TextStream::new(tokenizer, skip_special_tokens);
        let mut pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id)).collect();
        pieces.extend(stream.finish());
        pieces
    }

    #[test]
    fn the_alphabet_is_the_tokenizers_own() {
        assert_eq!(
            BYTE_OF.keys().copied().collect::<std::collections::HashSet<_>>(),
            ByteLevel::alphabet().into_iter().collect()
        );
        assert_eq!((BYTE_OF[&'Ġ'], BYTE_OF[&'Ċ'], BYTE_OF[&'a'], BYTE_OF[&'Ń']), (b' ', b'\n', b'a', 0xAD));
    }

    #[test]
    fn characters_are_never_split() {
        let tokenizer = fixture();
        let text = "naïve 漢字 🙂!";
        let pieces = pieces(&tokenizer, &tokenizer.encode(text, false).unwrap(), true);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.is_empty() && !piece.contains('\u{FFFD}')), "{pieces:?}");
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_decoded_text(ids in proptest::collection::vec(0u32..520, 0..60), skip: bool) {
            let tokenizer = fixture();
            prop_assert_eq!(pieces(&tokenizer, &ids, skip).concat(), tokenizer.decode(&ids, skip).unwrap());
        }

        #[test]
        fn any_text_survives(text: String) {
            let tokenizer = fixture();
            let ids = tokenizer.encode(&text, false).unwrap();
            let pieces = pieces(&tokenizer, &ids, true);
            prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
        }
    }
}
