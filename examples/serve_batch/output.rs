//! Where completions go: whole lines, each written before the next is computed.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

/// Refuses an output file that is the input: it would be emptied before it is read.
pub fn differs(output: Option<&Path>, input: &Path) -> Result<(), String> {
    // A file that is not there yet, or stdin, is not the other one.
    let same = output.and_then(|output| Some(output.canonicalize().ok()? == input.canonicalize().ok()?));
    match (output, same) {
        (Some(output), Some(true)) => Err(format!("--output {} is the input, expected another file", output.display())),
        _ => Ok(()),
    }
}

/// A file or stdout.
#[derive(Debug)]
pub enum Output {
    /// The file, and how many bytes of whole lines it has.
    File {
        path: PathBuf,
        file: File,
        whole: u64,
    },
    Stdout,
}

impl Output {
    /// Opens the file, or stdout where there is none. A file that exists is emptied.
    pub fn open(path: Option<&Path>) -> Result<Self, String> {
        let Some(path) = path else {
            return Ok(Self::Stdout);
        };
        let file = File::create(path).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(Self::File { path: path.to_path_buf(), file, whole: 0 })
    }

    /// Writes one line, to the end: if that fails, the file has only whole lines.
    pub fn line(&mut self, mut line: String) -> Result<(), String> {
        line.push('\n');
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                let written = out.write_all(line.as_bytes()).and_then(|()| out.flush());
                written.map_err(|error| format!("cannot write to stdout: {error}"))
            }
            Self::File { path, file, whole } => match file.write_all(line.as_bytes()) {
                Ok(()) => {
                    *whole += line.len() as u64;
                    Ok(())
                }
                Err(error) => {
                    // A device has no length to cut: then there is no half line either.
                    let _ = file.set_len(*whole).and_then(|()| file.seek(io::SeekFrom::Start(*whole)));
                    Err(format!("cannot write to {}: {error}", path.display()))
                }
            },
        }
    }

    /// All lines are on the disk, as far as the system says.
    pub fn close(self) -> Result<(), String> {
        let Self::File { path, file, .. } = self else {
            return Ok(());
        };
        match file.sync_all() {
            // What is no regular file cannot be synchronised.
            Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
                Err(format!("cannot write to {}: {error}", path.display()))
            }
            _ => Ok(()),
        }
    }
}
