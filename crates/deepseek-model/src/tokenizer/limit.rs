//! Texts that are too long for a model, found out before they take minutes and gigabytes.

use super::Tokenizer;
use crate::{ModelError, Result};

/// Bytes that are looked at together.
const PIECE: usize = 64 << 10;
/// Tokens that a text may have less than two pieces of it, which words and merges are cut by.
const SLACK: usize = 256;

impl Tokenizer {
    /// [`Self::encode`] for a model with so many positions. A text that has more tokens in any case is refused without encoding the
    /// whole of it; others may still have more.
    ///
    /// # Errors
    /// [`ModelError::Request`] for a text that is too long, and those of [`Self::encode`].
    pub fn encode_at_most(&self, text: &str, add_special_tokens: bool, max_tokens: usize) -> Result<Vec<u32>> {
        let too_long = |actual: String| {
            let expected = format!("at most {max_tokens} tokens, the model's positions; shorten the prompt");
            Err(ModelError::request("prompt", actual, expected))
        };
        if self.longest_token.is_some_and(|bytes| text.len() > max_tokens.saturating_mul(bytes)) {
            return too_long(format!("{} bytes long, more than {max_tokens} tokens", text.len()));
        }
        let (mut rest, mut most) = (text, max_tokens);
        while rest.len() > PIECE {
            let (piece, other) = rest.split_at(end_of_piece(rest));
            (rest, most) = (other, most.saturating_add(SLACK));
            let tokens = self.encode(piece, false)?.len();
            if tokens > most {
                return too_long(format!("more than {max_tokens} tokens long"));
            }
            most -= tokens;
        }
        self.encode(text, add_special_tokens)
    }
}

/// Where the first piece of a long text ends: before a space, so that words stay whole, or somewhere in a word that is long.
fn end_of_piece(text: &str) -> usize {
    let end = text.floor_char_boundary(PIECE);
    let space = text[..end].char_indices().rev().take(PIECE / 16).find(|(_, character)| character.is_whitespace());
    space.map(|(at, _)| at).filter(|&at| at > 0).unwrap_or(end)
}

/// The bytes of the longest token, where no text becomes shorter before it is divided into tokens.
pub(super) fn longest_token(inner: &tokenizers::Tokenizer) -> Option<usize> {
    let added = inner.get_added_tokens_decoder();
    if inner.get_normalizer().is_some() || added.values().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    // A character of the vocabulary is a byte of the text; added tokens are their own text, of at most four bytes each.
    let characters = |token: &String| token.chars().count();
    let vocabulary = inner.get_vocab(false).keys().map(characters).max().unwrap_or(1);
    let longest_added = added.values().map(|token| token.content.len()).max().unwrap_or(1);
    Some(vocabulary.max(longest_added).max(1))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::tests::fixture;
    use super::*;

    #[test]
    fn long_texts_are_refused_before_they_are_encoded() {
        let tokenizer = fixture();
        let start = Instant::now();
        // By its length alone, and by its first pieces.
        for (text, positions) in [("word ".repeat(4 << 20), 4096), ("a1 ".repeat(4 << 20), 1 << 20)] {
            let message = tokenizer.encode_at_most(&text, true, positions).unwrap_err().to_string();
            assert!(
                message.starts_with("`prompt` is") && message.contains(&format!("{positions} tokens")),
                "{message}"
            );
        }
        assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
    }

    #[test]
    fn texts_that_fit_are_encoded_whole() {
        let tokenizer = fixture();
        let word = "a".repeat(3 * PIECE);
        for text in ["", "naïve 漢字", &"word ".repeat(PIECE), &"漢".repeat(PIECE), &word] {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.encode_at_most(text, true, ids.len()).unwrap(), ids);
        }
    }

    #[test]
    fn pieces_end_before_a_space_and_never_in_a_character() {
        let text = "漢字 ".repeat(PIECE);
        let end = end_of_piece(&text);
        assert!(end > 0 && end <= PIECE && text[end..].starts_with(' '));
        let word = "漢".repeat(PIECE);
        assert!(word.is_char_boundary(end_of_piece(&word)) && end_of_piece(&word) > PIECE - 4);
    }
}
