//! From a kernel to its machine code and what can be read from that.

use std::path::Path;
use std::sync::Arc;

use cubecl::ir::{DeviceIdentity, HardwareProperties, MemoryDeviceProperties, OpaqueType, features};
use cubecl::prelude::*;
use cubecl_common::profile::TimingMethod;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use cubecl_cpp::target::Cuda;
use cubecl_cpp::{ComputeKernel, register_supported_types};
use cubecl_runtime::compiler::Compiler;
use cubecl_runtime::runtime::Runtime;

use super::sass::Program;
use super::{Report, Toolchain, ToolchainError, convergence, masks};

/// A GPU architecture, with the instructions of that generation alone where there are any (`a`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arch {
    /// Turing.
    Sm75,
    /// Ampere.
    Sm80,
    /// Hopper.
    Sm90a,
    /// Blackwell, data center.
    Sm100a,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 4] = [Arch::Sm75, Arch::Sm80, Arch::Sm90a, Arch::Sm100a];

    /// As the compilers call it.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm75 => "sm_75",
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100a => "sm_100a",
        }
    }

    fn version(self) -> u32 {
        match self {
            Arch::Sm75 => 75,
            Arch::Sm80 => 80,
            Arch::Sm90a => 90,
            Arch::Sm100a => 100,
        }
    }

    /// Shared memory that a cube may take, in bytes.
    pub fn shared_memory(self) -> usize {
        match self {
            Arch::Sm75 => 64 << 10,
            Arch::Sm80 => 163 << 10,
            Arch::Sm90a | Arch::Sm100a => 227 << 10,
        }
    }

    /// What CubeCL's CUDA runtime sets on such a device.
    fn options(self) -> CompilationOptions {
        let version = self.version();
        CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                fast_math: true,
                dp4a: true,
                grid_constants: true,
                fast_tanh: true,
                clusters: version >= 90,
                elect_sync: version >= 90,
            },
            ..Default::default()
        }
    }

    /// The properties of such a device, as far as kernels are built by them.
    pub(crate) fn properties(self) -> Arc<DeviceProperties> {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: self.shared_memory(),
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(132),
            num_cpu_cores: None,
            last_level_cache_size: None,
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        // Kernels see by it that they become PTX (`common/plane.rs`).
        let fingerprint = format!("ptx_sm{}", self.version());
        let identity = DeviceIdentity { name: "offline".into(), fingerprint, physical: None };
        let memory = MemoryDeviceProperties::new(1 << 35, 512);
        let mut properties =
            DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::Device, identity);
        register_supported_types(&mut properties);
        properties.register_opaque_type(OpaqueType::Barrier);
        properties.features.plane.insert(features::Plane::Sync);
        properties.features.plane.insert(features::Plane::Ops);
        properties.features.plane.insert(features::Plane::NonUniformControlFlow);
        properties.features.memory_reinterpret = true;
        properties.features.alignment = true;
        properties.features.copy_async = self >= Arch::Sm80;
        if self >= Arch::Sm90a {
            properties.register_opaque_type(OpaqueType::TensorMap);
            properties.features.cube_cluster = true;
            properties.features.tma.insert(features::Tma::Base);
        }
        Arc::new(properties)
    }
}

/// The properties of the compiler's target.
pub(super) fn target_properties() -> Arc<TargetProperties> {
    Arc::new(<cubecl_cuda::CudaRuntime as Runtime>::target_properties())
}

/// A kernel as CUDA C++.
pub(super) struct Lowered {
    kernel: ComputeKernel,
    /// Units of a plane differ in the first dimension of the cube alone, in its lowest five bits.
    rows_are_planes: bool,
}

/// Lowers a kernel to CUDA C++.
pub(super) fn to_cuda<K: CubeKernel>(kernel: &K, arch: Arch, mode: ExecutionMode) -> Result<Lowered, ToolchainError> {
    let lower = || -> Result<Lowered, String> {
        let mut definition = cubecl_core::define_kernel(kernel).map_err(|error| format!("{error:?}"))?;
        // A kernel made without a client is always a checked one.
        definition.settings.execution_mode = mode;
        let dim = definition.settings.cube_dim;
        let rows_are_planes = dim.x % 32 == 0 || dim.y * dim.z == 1;
        let compiled = CppCompiler::<Cuda>::default().compile(definition, &arch.options());
        compiled.map(|kernel| Lowered { kernel, rows_are_planes }).map_err(|error| format!("{error:?}"))
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(lower));
    caught.unwrap_or_else(|_| Err("the compiler panicked".into())).map_err(ToolchainError::Lower)
}

/// Compiles and assembles a kernel; its text in each form stays in `folder`, named `stem`.
pub(super) fn compile(
    Lowered { kernel, rows_are_planes }: &Lowered,
    arch: Arch,
    toolchain: &Toolchain,
    folder: &Path,
    stem: &str,
) -> Result<Report, ToolchainError> {
    let path = |extension: &str| folder.join(format!("{stem}.{}.{extension}", arch.name()));
    std::fs::create_dir_all(folder)?;
    let pretty = cubecl_cpp::formatter::format_cpp(&kernel.source).unwrap_or_else(|_| kernel.source.clone());
    std::fs::write(path("cu"), pretty)?;
    let ptx = toolchain.nvrtc(&kernel.source, arch)?;
    std::fs::write(path("ptx"), &ptx)?;
    let log = toolchain.ptxas(&path("ptx"), &path("cubin"), arch)?;
    let text = toolchain.disassemble(&path("cubin"))?;
    std::fs::write(path("sass"), &text)?;
    let mut report = Report::read(&log, &text);
    // CubeCL's shared memory is given at launch; ptxas knows nothing of it.
    report.shared_bytes += kernel.shared_memory_size;
    report.warnings.extend(masks::partial(&ptx));
    let convergence = convergence::check(&Program::read(&text), *rows_are_planes);
    (report.exchanges, report.parted) = (convergence.exchanges, convergence.violations);
    Ok(report)
}
