//! CUDA C++ to machine code.

use std::ffi::CString;
use std::path::PathBuf;

use cudarc::nvrtc::{result, sys};

/// The environment variable that says what compilers give: `ptx` for PTX, which a driver compiles once more; anything else, or
/// nothing, for machine code. A simulated driver reads PTX; so does who has CubeCL write down what it loads.
pub const CODE: &str = "BURN_MLA_KERNEL_CODE";

/// Whether compilers give PTX.
pub(crate) fn is_ptx() -> bool {
    std::env::var(CODE).is_ok_and(|code| code == "ptx")
}

/// The compiler's version.
///
/// # Errors
/// There is no compiler.
pub(crate) fn version() -> Result<(i32, i32), String> {
    // SAFETY: it looks for a library, and loads it.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no NVRTC (libnvrtc.so) where the dynamic loader looks".into());
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are places for a number.
    let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    status.result().map(|()| (major, minor)).map_err(|error| format!("NVRTC does not tell its version: {error}"))
}

/// What the compiler is told, beside the source.
pub(crate) fn options(arch: &str) -> Vec<String> {
    let include = toolkit().join("include");
    let folders = [include.clone(), include.join("cccl")].into_iter().filter(|folder| folder.exists());
    let folders = folders.map(|folder| format!("--include-path={}", folder.display()));
    // PTX is for who reads it.
    let lines = is_ptx().then(|| "-lineinfo".to_string());
    std::iter::once(format!("--gpu-architecture={arch}")).chain(folders).chain(lines).collect()
}

/// Where CUDA is installed: `CUDA_PATH`, or where it usually is.
fn toolkit() -> PathBuf {
    let usual = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
    let set = std::env::var_os("CUDA_PATH").map(PathBuf::from);
    set.or_else(|| usual.into_iter().find(|path| path.exists())).unwrap_or_else(|| "/usr".into())
}

/// Compiles a source with these options.
///
/// # Errors
/// What the compiler says of it, and the source.
pub(crate) fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = CString::new(source).map_err(|_| "the source has a zero byte".to_string())?;
    let told = |error: result::NvrtcError| format!("NVRTC: {error}");
    let program = Program(result::create_program(&text, None).map_err(told)?);
    // SAFETY: the program was created above and is destroyed when it is dropped.
    let compiled = unsafe { result::compile_program(program.0, options) };
    if compiled.is_err() {
        return Err(format!("[Compilation Error]\n{}\n[Source]\n{source}", program.log()));
    }
    if is_ptx() {
        // SAFETY: as above, and it was compiled.
        let ptx = unsafe { result::get_ptx(program.0) }.map_err(told)?;
        return Ok(ptx.into_iter().map(|char| char as u8).collect());
    }
    let mut size = 0;
    // SAFETY: as above; the code has the size that the compiler told.
    unsafe {
        sys::nvrtcGetCUBINSize(program.0, &mut size).result().map_err(told)?;
        let mut code = vec![0_u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result().map_err(told)?;
        Ok(code)
    }
}

/// Destroyed when it is dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    /// What the compiler said.
    fn log(&self) -> String {
        // SAFETY: the program exists.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|char| char as u8).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created by the compiler, and nothing uses it any more. An error would say that it is gone already.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
