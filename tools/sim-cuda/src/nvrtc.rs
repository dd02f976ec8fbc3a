//! NVRTC, passed on to the real one, so that reports can show lines of the CUDA source.
use libloading::Library;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::empty::{self, FAILED, Texts};

/// Names under which the real library is looked for; ours has the one without a version.
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// Sources by program, and by the PTX that was made of them.
#[derive(Default)]
struct Sources {
    programs: HashMap<usize, String>,
    ptx: HashMap<String, String>,
}

fn sources() -> MutexGuard<'static, Sources> {
    static SOURCES: OnceLock<Mutex<Sources>> = OnceLock::new();
    SOURCES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The source that PTX was compiled from, if that was here.
pub fn source(ptx: &str) -> Option<String> {
    sources().ptx.get(ptx).cloned()
}

fn real() -> Option<&'static Library> {
    static REAL: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: NVIDIA's library, without initialisers of consequence.
    let open = || NAMES.iter().find_map(|name| unsafe { Library::new(name) }.ok());
    REAL.get_or_init(|| {
        let found = open();
        if found.is_none() {
            eprintln!("sim-cuda: no {} in the library path", NAMES.join(" or "));
        }
        found
    })
    .as_ref()
}

/// Defines functions that are passed on, with what is done afterwards.
macro_rules! pass_on {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $({ $after:expr })?)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            if empty::is_asked_for() {
                // SAFETY: the arguments are the caller's.
                return unsafe { empty::$name($($arg),*) };
            }
            type Function = unsafe extern "C" fn($($ty),*) -> c_int;
            // SAFETY: the type is that of nvrtc.h.
            let function = real().and_then(|real| unsafe { real.get::<Function>(stringify!($name).as_bytes()) }.ok());
            let Some(function) = function else { return FAILED };
            // SAFETY: the arguments are the caller's.
            let result = unsafe { function($($arg),*) };
            $(if result == 0 {
                // SAFETY: the caller's pointers are what nvrtc.h asks for, and NVRTC was content with them.
                unsafe { $after };
            })?
            result
        }
    )*};
}

pass_on! {
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int)
    fn nvrtcCreateProgram(program: *mut usize, source: *const c_char, name: *const c_char, count: c_int, headers: Texts, names: Texts) {
        sources().programs.insert(*program, CStr::from_ptr(source).to_string_lossy().into_owned())
    }
    fn nvrtcCompileProgram(program: usize, count: c_int, options: Texts)
    fn nvrtcDestroyProgram(program: *mut usize)
    fn nvrtcGetProgramLogSize(program: usize, size: *mut usize)
    fn nvrtcGetProgramLog(program: usize, log: *mut c_char)
    fn nvrtcGetPTXSize(program: usize, size: *mut usize)
    fn nvrtcGetPTX(program: usize, ptx: *mut c_char) {
        {
            let mut sources = sources();
            if let Some(source) = sources.programs.get(&program).cloned() {
                sources.ptx.insert(CStr::from_ptr(ptx).to_string_lossy().into_owned(), source);
            }
        }
    }
    fn nvrtcGetCUBINSize(program: usize, size: *mut usize)
    fn nvrtcGetCUBIN(program: usize, cubin: *mut c_char)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_result: c_int) -> *const c_char {
    c"see the compiler's log".as_ptr()
}
