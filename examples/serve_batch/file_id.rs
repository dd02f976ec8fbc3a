//! Which file something is, whatever it is called.

use std::fs::Metadata;
use std::io;

/// A regular file or a pipe: its device and number. What is written there would be read, and what is there would be lost. Of other
/// systems than Unix nothing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId([u64; 2]);

impl FileId {
    /// The file of this metadata; `None` for a file that is not there, a device, or a folder.
    pub fn of(metadata: io::Result<Metadata>) -> Option<Self> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::{FileTypeExt, MetadataExt};
            let metadata = metadata.ok()?;
            (metadata.is_file() || metadata.file_type().is_fifo()).then(|| Self([metadata.dev(), metadata.ino()]))
        }
        #[cfg(not(unix))]
        {
            let _ = metadata;
            None
        }
    }

    /// What stdin is.
    pub fn of_stdin() -> Option<Self> {
        #[cfg(unix)]
        return of_handle(std::os::fd::AsFd::as_fd(&io::stdin()));
        #[cfg(not(unix))]
        None
    }

    /// What stdout is.
    pub fn of_stdout() -> Option<Self> {
        #[cfg(unix)]
        return of_handle(std::os::fd::AsFd::as_fd(&io::stdout()));
        #[cfg(not(unix))]
        None
    }
}

#[cfg(unix)]
fn of_handle(handle: std::os::fd::BorrowedFd) -> Option<FileId> {
    FileId::of(std::fs::File::from(handle.try_clone_to_owned().ok()?).metadata())
}
