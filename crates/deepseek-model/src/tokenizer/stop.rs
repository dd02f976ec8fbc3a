//! Strings that end a generation.

use crate::{ModelError, Result};

/// Stop strings that a text may have, and their bytes.
const MOST: usize = 1024;
const MOST_BYTES: usize = 64 << 10;

/// Searches streamed text for the first string of a set, and holds back text that may be the beginning of one.
///
/// The string that is complete first ends the text, whatever pieces the text comes in; of several that end at the same
/// character, the longest.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may begin a stop string.
    held: String,
    stopped: bool,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that is certain to come before any stop string; may be empty.
    pub emit: String,
    /// Whether a stop string was found; what follows it is dropped.
    pub stopped: bool,
}

impl StopStrings {
    /// A search for `stops`; with none, all text passes through.
    ///
    /// # Errors
    /// [`ModelError::Request`] if one of them is empty, or there are more than 1024, or they have more than 64 KiB: every piece
    /// of a text is compared with all.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        let bytes: usize = stops.iter().map(String::len).sum();
        if stops.len() > MOST || bytes > MOST_BYTES {
            let expected = format!("at most {MOST} strings of {MOST_BYTES} bytes together");
            return Err(ModelError::request("stop", format!("{} strings of {bytes} bytes", stops.len()), expected));
        }
        match stops.iter().any(String::is_empty) {
            true => {
                Err(ModelError::request("stop", "an empty string", "at least one character (leave it out instead)"))
            }
            false => Ok(Self { stops, held: String::new(), stopped: false }),
        }
    }

    /// Takes the next piece of text. After a stop string was found, nothing more is emitted.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.stopped {
            return StopOutcome { emit: String::new(), stopped: true };
        }
        self.held.push_str(text);
        let ends = |stop: &String| self.held.find(stop).map(|start| (start + stop.len(), start));
        if let Some((_, start)) = self.stops.iter().filter_map(ends).min() {
            self.stopped = true;
            self.held.truncate(start);
            return StopOutcome { emit: std::mem::take(&mut self.held), stopped: true };
        }
        let tail = self.held.split_off(self.held.len() - self.undecided());
        let emit = std::mem::replace(&mut self.held, tail);
        StopOutcome { emit, stopped: false }
    }

    /// Ends the text: what was held back, which no stop string completed.
    pub fn finish(self) -> String {
        self.held
    }

    /// Bytes at the end of the held text that begin some stop string.
    fn undecided(&self) -> usize {
        let begins = |stop: &String| {
            let prefixes = stop.char_indices().map(|(n, _)| n).rev();
            prefixes.into_iter().find(|&n| self.held.ends_with(&stop[..n])).unwrap_or(0)
        };
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut search = StopStrings::new(stops.iter().map(|stop| stop.to_string()).collect()).unwrap();
        let (mut text, mut stopped) = (String::new(), false);
        for piece in pieces {
            let outcome = search.push(piece);
            text += &outcome.emit;
            stopped |= outcome.stopped;
        }
        (text + &search.finish(), stopped)
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let message = StopStrings::new(vec!["a".into(), String::new()]).unwrap_err().to_string();
        assert!(message.starts_with("`stop` is an empty string"), "{message}");
    }

    #[test]
    fn stop_strings_without_bounds_are_refused() {
        assert!(StopStrings::new(vec!["a".into(); MOST]).is_ok());
        for stops in [vec!["a".into(); MOST + 1], vec!["a".repeat(MOST_BYTES + 1)]] {
            let message = StopStrings::new(stops).unwrap_err().to_string();
            assert!(message.starts_with("`stop` is") && message.contains("at most 1024 strings"), "{message}");
        }
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_found_and_not_emitted() {
        assert_eq!(run(&["\n\nUser:"], &["Hi.\n", "\nUs", "er", ": more", "!"]), ("Hi.".into(), true));
        assert_eq!(run(&["\n\nUser:"], &["Hi.\n", "\nUs", "A"]), ("Hi.\n\nUsA".into(), false));
        assert_eq!(run(&["漢字"], &["a漢", "漢", "字b"]), ("a漢".into(), true));
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), false));
    }

    #[test]
    fn text_is_held_only_while_it_may_begin_a_stop_string() {
        let mut search = StopStrings::new(vec!["stop".into()]).unwrap();
        let mut emit = |text| search.push(text).emit;
        assert_eq!([emit("a st"), emit("a"), emit("s"), emit("!")], ["a ", "sta", "", "s!"]);
    }

    #[test]
    fn the_string_that_is_complete_first_ends_the_text() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), true));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".into(), true));
    }

    proptest! {
        #[test]
        fn pieces_do_not_change_the_result(
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abé]{0,5}", 0..12),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            let first = (0..=whole.len()).filter(|&end| whole.is_char_boundary(end)).find_map(|end| {
                let ended = stops.iter().filter(|stop| whole[..end].ends_with(**stop)).map(|stop| stop.len()).max()?;
                Some(whole[..end - ended].to_string())
            });
            let expected = (first.clone().unwrap_or(whole.clone()), first.is_some());
            prop_assert_eq!(run(&stops, &pieces), expected.clone());
            prop_assert_eq!(run(&stops, &[&whole]), expected);
        }
    }
}
