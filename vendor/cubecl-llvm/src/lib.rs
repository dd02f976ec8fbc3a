//! Stands in the place of `cubecl-llvm`, by a patch: the compiler that `cubecl-cuda` calls, with NVRTC behind it.
//!
//! The published crate downloads a prebuilt LLVM in its build script. This one has the types that `cubecl-cuda` names, and
//! compiles what it is given as CubeCL's own C++ backend does: to CUDA C++, and that with NVRTC. Beyond that backend:
//!
//! - it gives machine code, which a driver loads as it is, where PTX would be compiled once more ([`CODE`]);
//! - machine code stays on the disk, under the source, the compiler and the architecture that it is from ([`disk`]);
//! - kernels that are known beforehand are compiled on all cores ([`ahead`]).
//!
//! It cannot load kernels that are given as CUDA C++ text; `cubecl-cuda`'s feature `cpp` can, and does without all of this.

pub mod ahead;
pub mod disk;
mod nvrtc;
mod source;

use std::ffi::c_char;

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_environment::backtrace::BackTrace;
use cubecl_server::compiler::{CompilationError, Compiler};
use cubecl_server::kernel::BufferIOAttr;

pub use self::nvrtc::CODE;

/// NVPTX target description.
pub mod nvptx {
    /// PTX versions.
    pub mod ptx_version {
        /// A PTX ISA version; never available here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(u32);

        impl PtxVersion {
            /// The PTX version a driver understands: unknown without LLVM.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl core::fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "ptx{}", self.0)
            }
        }
    }
}

/// Lowering shared by the LLVM targets.
pub mod shared {
    /// Feature restrictions of the LLVM targets.
    pub mod lowered_features {
        /// The GPU targets.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA.
            Nvptx,
        }

        /// Nothing is lowered, so nothing is restricted.
        pub fn restrict_features(_: &mut cubecl_core::ir::DeviceProperties, _: GpuTarget) {}
    }
}

/// What LLVM would compile for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// The host.
    #[default]
    Cpu,
    /// NVIDIA.
    Nvptx,
}

/// Compile options, as `cubecl-cuda` fills them in.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct PlironOptions {
    pub arch: Option<()>,
    pub sm_arch: Option<cubecl_core::ir::nvidia::SmArch>,
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    pub grid_constants: bool,
    pub other: (),
}

/// A compiled module.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct NvptxModule {
    pub ptx: Vec<core::ffi::c_char>,
    pub entrypoint: String,
    pub ir: String,
    pub shared_memory_size: usize,
    pub io: Vec<BufferIOAttr>,
}

/// What a compilation gives.
#[derive(Clone)]
#[allow(missing_docs)]
pub enum PlironArtifact {
    Jit,
    NvptxCode(NvptxModule),
}

/// The compiler.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct PlironCompiler {
    pub target: LlvmTarget,
}

impl PlironCompiler {
    /// A kernel's code.
    ///
    /// # Errors
    /// What the compiler says of the source; a device without an architecture; while [`ahead::Collecting`], a kernel that is being
    /// compiled.
    pub fn compile(
        &mut self,
        kernel: KernelDefinition,
        options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        let arch = options.sm_arch.ok_or_else(|| error("the device has no known architecture".into()))?;
        let entrypoint = kernel.settings.kernel_name.clone();
        let kernel = CppCompiler::<Cuda>::default().compile(kernel, &cpp_options(arch, options.grid_constants))?;
        let source = source::renumbered(&kernel.source);
        let code = ahead::compile(&source, &arch.target_cpu()).map_err(error)?;
        Ok(PlironArtifact::NvptxCode(NvptxModule {
            ptx: code.into_iter().map(|byte| byte as c_char).collect(),
            entrypoint,
            shared_memory_size: kernel.shared_memory_size,
            io: kernel.io,
            ir: source,
        }))
    }

    /// The language of the text that it is made from.
    pub fn lang_tag(&self) -> &'static str {
        "cpp"
    }
}

fn error(reason: String) -> CompilationError {
    CompilationError::Generic { reason, backtrace: BackTrace::capture() }
}

/// What `cubecl-cuda` sets for its own C++ backend on such a device.
fn cpp_options(arch: SmArch, grid_constants: bool) -> CompilationOptions {
    let version = arch.version();
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            fast_math: true,
            dp4a: version >= 61,
            grid_constants,
            fast_tanh: version >= 75 && cudarc::driver::sys::CUDA_VERSION >= 12080,
            clusters: version >= 90,
            elect_sync: version >= 90,
        },
        ..Default::default()
    }
}
