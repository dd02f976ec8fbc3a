//! Files that a user names: whatever else lies there is refused before it is opened, since a pipe may never end, or never begin.

use std::fs::{File, FileType};
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::{ModelError, Result};

/// Bytes of a file that is read whole. `tokenizer.json` of DeepSeek-V3 has 8 MB, the index of its shards 9 MB.
const MOST: usize = 256 << 20;

/// What Windows editors put before the text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Opens a file; `hint` says what to do when there is none. Links are followed, as those of a hub cache to its blobs.
pub(crate) fn open(path: &Path, hint: &str) -> Result<File> {
    let unreadable = |source| ModelError::unreadable(path, source, hint);
    let kind = std::fs::metadata(path).map_err(unreadable)?.file_type();
    if !kind.is_file() {
        return Err(ModelError::wrong_kind(path, name_of(kind), "a file"));
    }
    File::open(path).map_err(unreadable)
}

/// All of a file that is no larger than such files are.
pub(crate) fn read(path: &Path, hint: &str) -> Result<Vec<u8>> {
    read_at_most(path, hint, MOST)
}

/// All of a file of at most so many bytes.
pub(crate) fn read_at_most(path: &Path, hint: &str, most: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut file = open(path, hint)?.take(most as u64 + 1);
    file.read_to_end(&mut bytes).map_err(|source| ModelError::unreadable(path, source, hint))?;
    match bytes.len() > most {
        true => Err(ModelError::wrong_kind(path, "a larger file", format!("at most {most} bytes"))),
        false => Ok(bytes),
    }
}

/// What a JSON file says.
pub(crate) fn json<T: DeserializeOwned>(path: &Path, hint: &str) -> Result<T> {
    parse(path, &read(path, hint)?)
}

/// What the text of a JSON file says.
pub(crate) fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T> {
    let wrong = |reason| ModelError::Json { path: path.into(), reason };
    if text.starts_with(BYTE_ORDER_MARK) {
        return Err(wrong("it begins with a byte order mark (BOM); save it as UTF-8 without one".into()));
    }
    serde_json::from_slice(text).map_err(|error| wrong(error.to_string()))
}

/// Refuses what is no folder; `hint` says what to do when nothing is there.
pub(crate) fn check_folder(path: &Path, hint: &str) -> Result<()> {
    let kind = std::fs::metadata(path).map_err(|source| ModelError::unreadable(path, source, hint))?.file_type();
    match kind.is_dir() {
        true => Ok(()),
        false => Err(ModelError::wrong_kind(path, name_of(kind), format!("a folder; {hint}"))),
    }
}

/// What lies there, in words.
fn name_of(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        match () {
            _ if kind.is_fifo() => return "a pipe",
            _ if kind.is_socket() => return "a socket",
            _ if kind.is_char_device() || kind.is_block_device() => return "a device",
            _ => {}
        }
    }
    match kind {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_file() => "a file",
        _ => "something else",
    }
}
