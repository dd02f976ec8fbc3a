//! In the place of NVRTC: kernels that have their names and do nothing. For programs that ask for kernels and launch none.
#![allow(non_snake_case, reason = "names of NVRTC")]
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// `NVRTC_ERROR_INTERNAL_ERROR`.
pub(crate) const FAILED: c_int = 11;

/// Options, or names of headers.
pub(crate) type Texts = *const *const c_char;

/// Whether `SIM_CUDA_KERNELS` is `empty`.
pub fn is_asked_for() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| std::env::var("SIM_CUDA_KERNELS").is_ok_and(|kernels| kernels == "empty"))
}

/// PTX by program.
fn programs() -> MutexGuard<'static, HashMap<usize, Vec<u8>>> {
    static PROGRAMS: OnceLock<Mutex<HashMap<usize, Vec<u8>>>> = OnceLock::new();
    PROGRAMS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// PTX of the kernels in a source, with the zero at its end.
fn ptx(source: &str) -> Vec<u8> {
    let mut ptx = String::from(".version 8.0\n.target sm_80\n.address_size 64\n");
    for after in source.split("__global__").skip(1) {
        if let Some(name) = kernel_name(after) {
            ptx.push_str(&format!(".visible .entry {name}()\n{{\nret;\n}}\n"));
        }
    }
    ptx.push('\0');
    ptx.into_bytes()
}

/// The first name before a parenthesis that is no attribute.
fn kernel_name(after: &str) -> Option<&str> {
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
    let mut names = after.match_indices('(').map(|(at, _)| {
        let before = after[..at].trim_end();
        &before[before.rfind(|char| !is_name(char)).map_or(0, |end| end + 1)..]
    });
    names.find(|name| !name.is_empty() && !name.starts_with("__"))
}

pub(crate) unsafe fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: the caller's places for a number.
    unsafe { (*major, *minor) = (13, 0) };
    0
}

pub(crate) unsafe fn nvrtcCreateProgram(
    program: *mut usize,
    source: *const c_char,
    _name: *const c_char,
    _count: c_int,
    _headers: Texts,
    _names: Texts,
) -> c_int {
    // SAFETY: the caller's text.
    let ptx = ptx(&unsafe { CStr::from_ptr(source) }.to_string_lossy());
    let mut programs = programs();
    let number = programs.keys().max().map_or(1, |last| last + 1);
    programs.insert(number, ptx);
    // SAFETY: the caller's place for it.
    unsafe { *program = number };
    0
}

pub(crate) unsafe fn nvrtcCompileProgram(_program: usize, _count: c_int, _options: Texts) -> c_int {
    0
}

pub(crate) unsafe fn nvrtcDestroyProgram(program: *mut usize) -> c_int {
    // SAFETY: the caller's handle.
    programs().remove(unsafe { &*program });
    0
}

pub(crate) unsafe fn nvrtcGetProgramLogSize(_program: usize, size: *mut usize) -> c_int {
    // SAFETY: the caller's place for a number.
    unsafe { *size = 1 };
    0
}

pub(crate) unsafe fn nvrtcGetProgramLog(_program: usize, log: *mut c_char) -> c_int {
    // SAFETY: the caller's place for as many characters as it was told.
    unsafe { *log = 0 };
    0
}

pub(crate) unsafe fn nvrtcGetPTXSize(program: usize, size: *mut usize) -> c_int {
    let Some(len) = programs().get(&program).map(Vec::len) else { return FAILED };
    // SAFETY: the caller's place for a number.
    unsafe { *size = len };
    0
}

pub(crate) unsafe fn nvrtcGetPTX(program: usize, to: *mut c_char) -> c_int {
    let programs = programs();
    let Some(ptx) = programs.get(&program) else { return FAILED };
    // SAFETY: the caller's place for as many characters as it was told.
    unsafe { std::ptr::copy_nonoverlapping(ptx.as_ptr().cast(), to, ptx.len()) };
    0
}

pub(crate) unsafe fn nvrtcGetCUBINSize(_program: usize, _size: *mut usize) -> c_int {
    FAILED
}

pub(crate) unsafe fn nvrtcGetCUBIN(_program: usize, _cubin: *mut c_char) -> c_int {
    FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_keep_their_names() {
        let source = r#"struct a { int b; }; extern "C" __global__ void __launch_bounds__(256) one_f32(float* x) { f(x); }
            extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) two () {}"#;
        let ptx = String::from_utf8(ptx(source)).expect("text");
        assert!(ptx.contains(".entry one_f32()") && ptx.contains(".entry two()"), "{ptx}");
        assert_eq!(ptx.matches(".entry").count(), 2);
        assert!(ptx_sim::parse(ptx.trim_end_matches('\0')).is_ok());
    }
}
