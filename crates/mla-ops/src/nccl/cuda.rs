//! Sums over several NVIDIA GPUs by NCCL, which Burn calls for collectives, and where it is found.

use std::path::Path;

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor};
use cudarc::nccl::sys;
use libloading::Library;

use crate::MlaError;

/// What cudarc looks for first.
const WANTED: &str = "libnccl.so";
/// What NCCL's packages for programs install; `libnccl.so` is in those for developers.
const INSTALLED: &str = "libnccl.so.2";

/// Looks for NCCL, and has it loaded where it is.
///
/// # Errors
/// [`MlaError::UnsupportedDevice`] where it is not, with the names of packages that have it.
pub fn find_nccl() -> Result<(), MlaError> {
    // SAFETY: these load the library and call nothing in it.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    let failed = match load_as(INSTALLED, WANTED) {
        // SAFETY: as above.
        Ok(()) if unsafe { sys::is_culib_present() } => return Ok(()),
        Ok(()) => format!("{INSTALLED} is there, but not under the name {WANTED}"),
        Err(error) => error,
    };
    let reason = format!(
        "several GPUs need NCCL ({failed}); it is in the packages libnccl2 (Debian, Ubuntu), libnccl (Fedora, RHEL) and \
         nvidia-nccl-cu13 (Python), whose folder has to be in LD_LIBRARY_PATH"
    );
    Err(MlaError::UnsupportedDevice { op: "all_reduce", device: "cuda".into(), reason })
}

/// The sum over all `devices` of their `x`, f32, f16 or bf16, of one shape, on each of them: the same bits. NCCL decides in which
/// order it adds. Every device needs its call, with the same devices in the same order; none waits on the host. It can be part of
/// a captured step once the devices have summed something before.
///
/// What goes wrong is an error of whoever reads the result, or what follows from it.
pub fn nccl_all_reduce<const D: usize>(x: Tensor<D>, devices: &[Device]) -> Tensor<D> {
    all_reduce(x, ReduceOperation::Sum, devices.to_vec()).resolve()
}

/// Loads the library `installed`, for those who look for `wanted` to find it: the loader takes a library that is loaded for any
/// that has its name, and a small one of that name has this one's functions, because it needs it.
fn load_as(installed: &str, wanted: &str) -> Result<(), String> {
    // SAFETY: NCCL's initialisers do nothing that a program could notice.
    let library = unsafe { Library::new(installed) }.map_err(|error| error.to_string())?;
    let failed = |error: std::io::Error| format!("{installed} is there, but not {wanted}: {error}");
    let folder = std::env::temp_dir().join(format!("burn-mla-{}", std::process::id()));
    std::fs::create_dir(&folder).map_err(failed)?;
    let path = folder.join(wanted);
    let alias = std::fs::write(&path, named_library(wanted, installed)).map_err(failed).and_then(|()| open(&path));
    // Loaded, it is there without its file.
    let _ = std::fs::remove_dir_all(&folder);
    // Both stay loaded, as a library does that cudarc loads.
    std::mem::forget((library, alias?));
    Ok(())
}

fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the library has no code.
    unsafe { Library::new(path) }.map_err(|error| error.to_string())
}

/// An ELF shared library (64 bits, of this machine) that is called `name`, needs the library `needed`, and has nothing of its own.
fn named_library(name: &str, needed: &str) -> Vec<u8> {
    const HEADER: u64 = 64;
    const SEGMENT: u64 = 56;
    const SYMBOL: u64 = 24;
    let machine: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let strings = [b"\0", name.as_bytes(), b"\0", needed.as_bytes(), b"\0"].concat();
    let symbols = HEADER + 3 * SEGMENT;
    let dynamic = symbols + SYMBOL;
    // DT_SONAME, DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_SYMTAB, DT_SYMENT, DT_NULL.
    let text = dynamic + 7 * 16;
    let len = strings.len() as u64;
    let entries = [[14, 1], [1, 2 + name.len() as u64], [5, text], [10, len], [6, symbols], [11, SYMBOL], [0, 0]];
    let mut out = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let short = |out: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|value| out.extend(value.to_le_bytes()));
    let word = |out: &mut Vec<u8>, values: &[u32]| values.iter().for_each(|value| out.extend(value.to_le_bytes()));
    let long = |out: &mut Vec<u8>, values: &[u64]| values.iter().for_each(|value| out.extend(value.to_le_bytes()));
    // A shared object (3) with three segments behind the header, and no sections.
    short(&mut out, &[3, machine]);
    word(&mut out, &[1]);
    long(&mut out, &[0, HEADER, 0]);
    word(&mut out, &[0]);
    short(&mut out, &[HEADER as u16, SEGMENT as u16, 3, 64, 0, 0]);
    // PT_LOAD, PT_DYNAMIC, and PT_GNU_STACK: without it the loader would want a stack that can be executed.
    let (all, table) = (text + len, dynamic..text);
    let segments = [(1, 0..all, 0x1000), (2, table, 8), (0x6474_e551, 0..0, 16)];
    for (kind, range, align) in segments {
        // Readable and writable: the loader puts addresses into the table.
        word(&mut out, &[kind, 6]);
        let size = range.end - range.start;
        long(&mut out, &[range.start, range.start, range.start, size, size, align]);
    }
    // The symbol that every table begins with.
    out.resize(dynamic as usize, 0);
    long(&mut out, entries.as_flattened());
    out.extend(strings);
    out
}

#[cfg(all(test, target_os = "linux", target_pointer_width = "64"))]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_under_another_name() {
        let name = "libburn_mla_has_no_such_library.so";
        // SAFETY: the C library is loaded already.
        assert!(unsafe { Library::new(name) }.is_err());
        load_as("libm.so.6", name).unwrap();
        // SAFETY: it has the functions of the C library, with this signature.
        let cosine = unsafe {
            let library = Library::new(name).expect("it is loaded");
            let cosine = library.get::<unsafe extern "C" fn(f64) -> f64>(b"cos").expect("it has this function");
            cosine(0.0)
        };
        assert_eq!(cosine, 1.0);
    }

    #[test]
    fn a_library_that_is_missing_is_named() {
        let refused = load_as("libburn_mla_is_not_there.so.2", "libburn_mla_is_not_there.so").unwrap_err();
        assert!(refused.contains("libburn_mla_is_not_there.so.2"), "{refused}");
    }
}
