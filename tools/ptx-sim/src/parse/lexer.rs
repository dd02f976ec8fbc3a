//! Words, numbers and punctuation of PTX text (PTX ISA 4.2 to 4.5).
use crate::error::ParseError;
use std::fmt;

/// One token. An opcode with its modifiers is a single word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tok<'a> {
    Word(&'a str),
    Number(&'a str),
    Text(&'a str),
    Punct(char),
}

impl fmt::Display for Tok<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(s) | Self::Number(s) => write!(f, "{s}"),
            Self::Text(s) => write!(f, "\"{s}\""),
            Self::Punct(c) => write!(f, "{c}"),
        }
    }
}

/// A token and its line, from 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub tok: Tok<'a>,
    pub line: u32,
}

/// All tokens of a text, without comments.
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    let bytes = text.as_bytes();
    let (mut at, mut line, mut found) = (0, 1, Vec::new());
    while at < bytes.len() {
        let rest = &text[at..];
        let c = bytes[at];
        let length = if c.is_ascii_whitespace() {
            1
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |i| i + 2)
        } else if c == b'"' {
            let end = rest[1..].find('"').ok_or_else(|| unexpected(line, "a closing quote", rest))?;
            found.push(Token { tok: Tok::Text(&rest[1..=end]), line });
            end + 2
        } else if c.is_ascii_digit() {
            // `9.0` of `.version` is one number, too.
            let n = run(rest, |b| b.is_ascii_alphanumeric() || b == b'.');
            found.push(Token { tok: Tok::Number(&rest[..n]), line });
            n
        } else if is_word(c) {
            let n = word(rest);
            found.push(Token { tok: Tok::Word(&rest[..n]), line });
            n
        } else if b"{}()[],;:@!+-|=<>".contains(&c) {
            found.push(Token { tok: Tok::Punct(c as char), line });
            1
        } else {
            return Err(unexpected(line, "PTX", rest));
        };
        line += bytes[at..at + length].iter().filter(|&&b| b == b'\n').count() as u32;
        at += length;
    }
    Ok(found)
}

fn unexpected(line: u32, expected: &str, rest: &str) -> ParseError {
    ParseError { line, expected: expected.into(), found: rest.chars().take(20).collect() }
}

fn is_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn run(text: &str, belongs: impl Fn(u8) -> bool) -> usize {
    text.bytes().position(|b| !belongs(b)).unwrap_or(text.len())
}

/// Length of a word: `shared::cta` belongs together, the colon of a label does not.
fn word(text: &str) -> usize {
    let mut n = run(text, is_word);
    while text[n..].starts_with("::") {
        n += 2 + run(&text[n + 2..], is_word);
    }
    n
}
