//! The folder of a checkpoint that is written: all of it, or nothing.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::{ModelError, Result, files};

/// Files under temporary names. They get their own when all are whole; until then dropping this removes them, and the folders that
/// were made for them.
#[derive(Debug)]
pub(super) struct Folder {
    to: PathBuf,
    needed_bytes: u64,
    /// Outermost first.
    made: Vec<PathBuf>,
    /// Where each file is, and where it will be.
    waiting: Vec<[PathBuf; 2]>,
    /// Files that have their names, and were not there before.
    named: Vec<PathBuf>,
}

impl Folder {
    /// Makes the folder `to`, which must have no weights yet, for files of so many bytes.
    ///
    /// # Errors
    /// [`ModelError::Request`] for a folder with weights or too little space, [`ModelError::WrongKind`], [`ModelError::Write`].
    pub(super) fn prepare(to: &Path, needed_bytes: u64) -> Result<Self> {
        let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        let mut made: Vec<PathBuf> = to.ancestors().take_while(missing).map(Path::to_path_buf).collect();
        made.reverse();
        match made.first() {
            None => check_empty(to)?,
            Some(first) => check_space(first.parent().unwrap_or(first), needed_bytes)?,
        }
        if made.is_empty() {
            check_space(to, needed_bytes)?;
        }
        let folder = Self { to: to.into(), needed_bytes, made, waiting: Vec::new(), named: Vec::new() };
        std::fs::create_dir_all(to).map_err(|source| folder.unwritable(to, source))?;
        Ok(folder)
    }

    /// The error of a file that cannot be written.
    pub(super) fn unwritable(&self, path: &Path, source: io::Error) -> ModelError {
        ModelError::Write { path: path.into(), source, needed_bytes: self.needed_bytes }
    }

    /// A new file, which will have this name, and the path for its errors.
    pub(super) fn create(&mut self, name: &str) -> Result<(File, PathBuf)> {
        let path = self.to.join(name);
        let waiting = self.to.join(format!(".{name}.{}.partial", std::process::id()));
        let file = File::create_new(&waiting).map_err(|source| self.unwritable(&path, source))?;
        self.waiting.push([waiting, path.clone()]);
        Ok((file, path))
    }

    /// A file with this text.
    pub(super) fn write(&mut self, name: &str, text: &[u8]) -> Result<()> {
        let (mut file, path) = self.create(name)?;
        file.write_all(text).and_then(|()| file.sync_all()).map_err(|source| self.unwritable(&path, source))
    }

    /// Gives the files their names.
    pub(super) fn finish(mut self) -> Result<()> {
        for [from, to] in &self.waiting {
            let is_new = !to.exists();
            std::fs::rename(from, to).map_err(|source| self.unwritable(to, source))?;
            if is_new {
                self.named.push(to.clone());
            }
        }
        self.waiting.clear();
        self.named.clear();
        self.made.clear();
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is there is of no use, and may be what fills the disk.
        let partial = self.waiting.iter().map(|[from, _]| from);
        partial.chain(&self.named).for_each(|path| drop(std::fs::remove_file(path)));
        self.made.iter().rev().for_each(|path| drop(std::fs::remove_dir(path)));
    }
}

/// Refuses what is no folder, or has weights.
fn check_empty(to: &Path) -> Result<()> {
    files::check_folder(to, "the checkpoint is written there")?;
    let unreadable = |source| ModelError::Io { path: to.into(), source };
    for entry in std::fs::read_dir(to).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            return Err(ModelError::request("to", format!("a folder with {}", path.display()), "one without weights"));
        }
    }
    Ok(())
}

/// Refuses a place with too little space, where that is known.
fn check_space(folder: &Path, needed_bytes: u64) -> Result<()> {
    #[cfg(unix)]
    {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let Ok(space) = rustix::fs::statvfs(folder) else { return Ok(()) };
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        // Some file systems say nothing.
        if space.f_blocks > 0 && needed_bytes > free {
            let actual = format!("in a file system with {free} bytes free");
            let expected = format!("one with {needed_bytes}, which the weights take");
            return Err(ModelError::request("to", actual, expected));
        }
    }
    let _ = (folder, needed_bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("a file").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn nothing_is_left_of_what_is_not_finished() {
        let dir = tempfile::tempdir().expect("a folder");
        let to = dir.path().join("a/b");
        let mut folder = Folder::prepare(&to, 3).expect("a folder");
        folder.write("config.json", b"{}").expect("written");
        assert_eq!(names(&to).len(), 1);
        drop(folder);
        assert_eq!(names(dir.path()), Vec::<String>::new());
        let mut folder = Folder::prepare(&to, 3).expect("a folder");
        folder.write("config.json", b"{}").expect("written");
        folder.finish().expect("named");
        assert_eq!(names(&to), ["config.json"]);
    }

    /// What was there stays, also where a file cannot have its name.
    #[test]
    fn what_was_there_before_stays() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("config.json"), "old").expect("written");
        std::fs::create_dir(dir.path().join("tokenizer.json")).expect("a folder with the name of a file");
        let mut folder = Folder::prepare(dir.path(), 3).expect("a folder");
        for name in ["model.safetensors", "tokenizer.json", "config.json"] {
            folder.write(name, b"new").expect("written");
        }
        assert!(matches!(folder.finish(), Err(ModelError::Write { .. })));
        assert_eq!(names(dir.path()), ["config.json", "tokenizer.json"]);
        assert_eq!(std::fs::read(dir.path().join("config.json")).expect("a file"), b"old");
    }

    #[cfg(unix)]
    #[test]
    fn too_little_space_is_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().expect("a folder");
        let error = Folder::prepare(&dir.path().join("a"), u64::MAX).expect_err("no disk has as much");
        assert!(error.to_string().contains("bytes free") && error.to_string().contains(&u64::MAX.to_string()));
        assert_eq!(names(dir.path()), Vec::<String>::new());
    }
}
