//! NVIDIA's compilers, wherever they are installed.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::{Library, Symbol};
use thiserror::Error;

use super::Arch;

/// Why a kernel could not be compiled.
#[derive(Debug, Error)]
pub enum ToolchainError {
    /// A part of the toolkit is not there.
    #[error("no {0}, expected in a CUDA toolkit named by CUDA_PATH")]
    Missing(PathBuf),
    /// The library of NVRTC cannot be used.
    #[error("NVRTC: {0}")]
    Library(#[from] libloading::Error),
    /// CubeCL could not lower the kernel.
    #[error("lowering to CUDA C++: {0}")]
    Lower(String),
    /// NVRTC refused the source.
    #[error("NVRTC: {0}")]
    Nvrtc(String),
    /// A program failed.
    #[error("{program}: {output}")]
    Program {
        /// Which one.
        program: &'static str,
        /// What it wrote.
        output: String,
    },
    /// A file could not be written, or a program not started.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The toolkit.
#[derive(Debug)]
pub struct Toolchain {
    root: PathBuf,
    nvrtc: Library,
}

type Program = *mut c_void;

impl Toolchain {
    /// The toolkit in a folder with `bin`, `lib` (or `lib64`) and `include`.
    ///
    /// # Errors
    /// A part is missing.
    pub fn open(root: &Path) -> Result<Self, ToolchainError> {
        for program in ["bin/ptxas", "bin/nvdisasm", "include"] {
            let path = root.join(program);
            if !path.exists() {
                return Err(ToolchainError::Missing(path));
            }
        }
        // Loaded first, NVRTC finds it without a search path.
        if let Some(builtins) = find_library(root, "libnvrtc-builtins.so") {
            // SAFETY: a library of the toolkit, without initialisers of consequence.
            std::mem::forget(unsafe { Library::new(builtins) }?);
        }
        let path =
            find_library(root, "libnvrtc.so").ok_or_else(|| ToolchainError::Missing(root.join("lib/libnvrtc.so")))?;
        // SAFETY: as above.
        let nvrtc = unsafe { Library::new(path) }?;
        Ok(Self { root: root.into(), nvrtc })
    }

    /// Compiles CUDA C++ to PTX, with the options that CubeCL's CUDA runtime uses.
    pub(super) fn nvrtc(&self, source: &str, arch: Arch) -> Result<String, ToolchainError> {
        let include = self.root.join("include");
        let options = [
            format!("--gpu-architecture={}", arch.name()),
            format!("--include-path={}", include.display()),
            "-lineinfo".into(),
            format!("--include-path={}", include.join("cccl").display()),
        ];
        let text = |text: &str| CString::new(text).map_err(|error| ToolchainError::Nvrtc(error.to_string()));
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let source = text(source)?;
        // SAFETY: the signatures are those of nvrtc.h; all pointers outlive the calls.
        unsafe {
            type Names = *const *const c_char;
            let create: Symbol<
                unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Names, Names) -> c_int,
            > = self.nvrtc.get(b"nvrtcCreateProgram")?;
            let compile: Symbol<unsafe extern "C" fn(Program, c_int, Names) -> c_int> =
                self.nvrtc.get(b"nvrtcCompileProgram")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.nvrtc.get(b"nvrtcDestroyProgram")?;
            let mut program: Program = std::ptr::null_mut();
            let none = std::ptr::null();
            if create(&mut program, source.as_ptr(), none, 0, std::ptr::null(), std::ptr::null()) != 0 {
                return Err(ToolchainError::Nvrtc("cannot create a program".into()));
            }
            let result = match compile(program, options.len() as c_int, options.as_ptr()) {
                0 => self.output(program, b"nvrtcGetPTXSize", b"nvrtcGetPTX"),
                _ => Err(ToolchainError::Nvrtc(self.output(
                    program,
                    b"nvrtcGetProgramLogSize",
                    b"nvrtcGetProgramLog",
                )?)),
            };
            destroy(&mut program);
            result
        }
    }

    /// A text that a program has produced.
    fn output(&self, program: Program, size: &[u8], text: &[u8]) -> Result<String, ToolchainError> {
        // SAFETY: the signatures are those of nvrtc.h; the buffer has the size that NVRTC asks for, with the final zero.
        unsafe {
            let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> = self.nvrtc.get(size)?;
            let text: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> = self.nvrtc.get(text)?;
            let mut len = 0;
            size(program, &mut len);
            let mut bytes = vec![0u8; len + 1];
            text(program, bytes.as_mut_ptr().cast());
            Ok(CStr::from_ptr(bytes.as_ptr().cast()).to_string_lossy().into_owned())
        }
    }

    /// Assembles PTX. Returns what ptxas says about it.
    pub(super) fn ptxas(&self, ptx: &Path, cubin: &Path, arch: Arch) -> Result<String, ToolchainError> {
        let mut command = Command::new(self.root.join("bin/ptxas"));
        command.arg(format!("-arch={}", arch.name())).arg("-v").arg("-o").arg(cubin).arg(ptx);
        let (out, err) = run("ptxas", command)?;
        Ok(err + &out)
    }

    /// The machine code as text.
    pub(super) fn disassemble(&self, cubin: &Path) -> Result<String, ToolchainError> {
        let mut command = Command::new(self.root.join("bin/nvdisasm"));
        command.arg("-c").arg(cubin);
        Ok(run("nvdisasm", command)?.0)
    }
}

/// Runs a program to its end. Returns what it wrote, and what it wrote about errors.
fn run(program: &'static str, mut command: Command) -> Result<(String, String), ToolchainError> {
    let output = command.output()?;
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    match output.status.success() {
        true => Ok((out, err)),
        false => Err(ToolchainError::Program { program, output: err + &out }),
    }
}

/// A library of the toolkit, in whatever version it has.
fn find_library(root: &Path, prefix: &str) -> Option<PathBuf> {
    ["lib64", "lib"].iter().find_map(|folder| {
        let mut found: Vec<_> = std::fs::read_dir(root.join(folder)).ok()?.flatten().map(|file| file.path()).collect();
        found.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
        found.sort();
        found.into_iter().next()
    })
}
