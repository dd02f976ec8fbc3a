//! Machine code on the disk, under a hash of what it depends on: the source, the compiler's version, what the compiler was told
//! (the architecture, the folders of headers; not what is in them), and the form of the code. A file that is damaged is as good as none. Two
//! processes may write the same file: it appears whole, or not at all.

use std::path::{Path, PathBuf};

use cubecl_common::hash::StableHasher;

use crate::nvrtc;

/// The environment variable that names the folder; `off` for none.
pub const FOLDER: &str = "BURN_MLA_KERNEL_CACHE";

/// What files begin with: another layout has another one.
const MAGIC: &[u8; 8] = b"BMLAK001";
/// Bytes before the code: the magic, and a hash of the code.
const HEADER: usize = MAGIC.len() + size_of::<u128>();

/// The folder: that of [`FOLDER`], otherwise `burn-mla/kernels` in the user's cache folder; none if there is none, or it is off.
pub fn folder() -> Option<PathBuf> {
    match std::env::var_os(FOLDER) {
        Some(folder) if folder == "off" => None,
        Some(folder) => Some(folder.into()),
        None => {
            let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
            Some(cache.join("burn-mla").join("kernels"))
        }
    }
}

/// The name of what a source becomes.
pub(crate) fn key(source: &str, options: &[String], version: (i32, i32)) -> u128 {
    StableHasher::hash_one(&(MAGIC, version, options, nvrtc::is_ptx(), source))
}

/// The code of this name, if there is some.
pub(crate) fn read(folder: &Path, key: u128) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path(folder, key)).ok()?;
    let whole = bytes.len() > HEADER
        && &bytes[..MAGIC.len()] == MAGIC
        && bytes[MAGIC.len()..HEADER] == StableHasher::hash_one(&&bytes[HEADER..]).to_le_bytes();
    whole.then(|| bytes.split_off(HEADER))
}

/// Keeps code under this name. Where that does not go, it is compiled again next time.
pub(crate) fn write(folder: &Path, key: u128, code: &[u8]) {
    let hash = StableHasher::hash_one(&code).to_le_bytes();
    let bytes = [MAGIC.as_slice(), &hash, code].concat();
    let own = folder.join(format!("{key:032x}.{}", std::process::id()));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&own, bytes))
        .and_then(|()| std::fs::rename(&own, path(folder, key)));
    if written.is_err() {
        let _ = std::fs::remove_file(own);
    }
}

fn path(folder: &Path, key: u128) -> PathBuf {
    folder.join(format!("{key:032x}.bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("burn-mla-kernels-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn code_comes_back() {
        let folder = scratch("back");
        assert_eq!(read(&folder, 7), None);
        write(&folder, 7, b"code");
        assert_eq!(read(&folder, 7).as_deref(), Some(b"code".as_slice()));
        assert_eq!(read(&folder, 8), None);
        std::fs::remove_dir_all(folder).expect("it was written");
    }

    /// Cut short, changed in the middle, of another layout, empty: none of it is code.
    #[test]
    fn damaged_files_are_none() {
        let folder = scratch("damaged");
        write(&folder, 1, b"some code");
        let whole = std::fs::read(path(&folder, 1)).expect("it was written");
        let mut changed = whole.clone();
        *changed.last_mut().expect("it has bytes") ^= 1;
        let mut old = whole.clone();
        old[0] ^= 1;
        for bytes in [&whole[..whole.len() - 1], &whole[..HEADER], &changed, &old, &[]] {
            std::fs::write(path(&folder, 1), bytes).expect("the folder is there");
            assert_eq!(read(&folder, 1), None);
        }
        std::fs::remove_dir_all(folder).expect("it was written");
    }

    /// Whatever changes the code changes its name.
    #[test]
    fn a_name_depends_on_everything() {
        let options = |arch: &str| vec![format!("--gpu-architecture={arch}")];
        let names = [
            key("a", &options("sm_90a"), (13, 0)),
            key("b", &options("sm_90a"), (13, 0)),
            key("a", &options("sm_80"), (13, 0)),
            key("a", &options("sm_90a"), (12, 9)),
            key("a", &[], (13, 0)),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{at}");
        }
    }
}
