//! Verdicts kept in a file, one JSON object a line, so that a long run can go on where it stopped.
use crate::run::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

#[derive(Serialize, Deserialize)]
struct Line {
    /// Fingerprint of module and cases.
    of: u64,
    id: String,
    #[serde(flatten)]
    verdict: Verdict,
}

/// Verdicts so far, and the file that new ones go to.
#[derive(Default)]
pub struct Verdicts {
    known: HashMap<(u64, String), Verdict>,
    file: Option<Mutex<File>>,
}

impl Verdicts {
    /// Reads a file, if there is one, and appends to it from now on.
    ///
    /// # Errors
    /// The file cannot be read or made. A line that was cut off is passed over.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let mut known = HashMap::new();
        if path.exists() {
            for line in BufReader::new(File::open(path)?).lines() {
                if let Ok(line) = serde_json::from_str::<Line>(&line?) {
                    known.insert((line.of, line.id), line.verdict);
                }
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { known, file: Some(Mutex::new(file)) })
    }

    /// The verdict of an earlier run.
    pub fn known(&self, of: u64, id: &str) -> Option<Verdict> {
        self.known.get(&(of, id.to_string())).cloned()
    }

    /// Keeps a verdict.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&self, of: u64, id: &str, verdict: &Verdict) -> std::io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let mut line = serde_json::to_vec(&Line { of, id: id.to_string(), verdict: verdict.clone() })?;
        line.push(b'\n');
        file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
    }
}
