//! Where completions go: whole lines, each written before the next is computed.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use crate::common;
use crate::file_id::FileId;

/// Refuses an output that is the input, by whichever name: it would be emptied before it is read, or read while it grows. `None`
/// is stdout.
pub fn differs(output: Option<&Path>, input: Option<FileId>) -> Result<(), String> {
    let id = output.map_or_else(FileId::of_stdout, |path| FileId::of(std::fs::metadata(path)));
    match (id == input && input.is_some(), output) {
        (false, _) => Ok(()),
        (true, Some(path)) => Err(format!("--output {} is the input, expected another file", path.display())),
        (true, None) => Err("stdout is the input, expected another file".into()),
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
    /// Opens the file, or stdout where there is none. A file that exists is emptied, but for the input.
    pub fn open(path: Option<&Path>, input: Option<FileId>) -> Result<Self, String> {
        let Some(path) = path else {
            return Ok(Self::Stdout);
        };
        let failed = |error: &dyn std::fmt::Display| format!("cannot write {}: {error}", path.display());
        let _probe = pipe_with_reader(path).map_err(|error| failed(&error))?;
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path).map_err(|error| failed(&error))?;
        // It may have come into being, or become a link, while the model was loaded.
        differs(Some(path), input)?;
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            file.set_len(0).map_err(|error| failed(&error))?;
        }
        Ok(Self::File { path: path.to_path_buf(), file, whole: 0 })
    }

    /// Writes one line, to the end: if that fails, the file has only whole lines.
    pub fn line(&mut self, mut line: String) -> Result<(), String> {
        line.push('\n');
        match self {
            Self::Stdout => common::print(line),
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

/// Refuses a pipe that nobody reads: to open it would wait for ever. The handle keeps the reader there until there is another.
fn pipe_with_reader(path: &Path) -> io::Result<Option<File>> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
        if std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
            let at_once = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            let probe = OpenOptions::new().write(true).custom_flags(at_once).open(path);
            return probe.map(Some).map_err(|_| io::Error::other("nobody reads this pipe"));
        }
    }
    let _ = path;
    Ok(None)
}
