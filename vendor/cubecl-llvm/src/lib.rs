//! Stand-in for `cubecl-llvm`.
//!
//! The published crate downloads a prebuilt LLVM in its build script. `cubecl-cuda` links it even when its feature `cpp`
//! selects the CUDA C++ / NVRTC compiler, which needs none of it. This crate has the types that `cubecl-cuda` names, and
//! its compiler refuses to compile. It is patched in for this workspace only.

use cubecl_environment::backtrace::BackTrace;
use cubecl_server::{compiler::CompilationError, kernel::BufferIOAttr};

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

/// The compiler that refuses.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct PlironCompiler {
    pub target: LlvmTarget,
}

impl PlironCompiler {
    /// Always an error.
    pub fn compile(
        &mut self,
        _kernel: cubecl_core::prelude::KernelDefinition,
        _options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has no LLVM; cubecl-cuda/cpp selects the NVRTC compiler".into(),
            backtrace: BackTrace::capture(),
        })
    }

    /// The name of the code it would produce.
    pub fn lang_tag(&self) -> &'static str {
        "llvm-stand-in"
    }
}
