//! The kernels, in every form that is launched.

use std::path::Path;
use std::sync::Arc;

use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::server::Handle;

use super::compile::{Lowered, compile, target_properties, to_cuda};
use super::{Arch, Report, Toolchain, ToolchainError};

/// All kernels that are compiled.
pub fn entries() -> Vec<Entry> {
    crate::offline_entries()
}

/// The element types of the operations.
pub(crate) const FLOATS: [FloatKind; 3] = [FloatKind::F32, FloatKind::F16, FloatKind::BF16];

type Lower = dyn Fn(Arch, ExecutionMode) -> Result<Lowered, ToolchainError> + Send + Sync;

/// A kernel in one of its forms.
pub struct Entry {
    name: String,
    archs: Vec<Arch>,
    mode: ExecutionMode,
    lower: Box<Lower>,
}

impl Entry {
    /// A kernel for all architectures, made by `form!`. The name has no spaces: operation, variant and sizes.
    pub(crate) fn new<K: CubeKernel>(
        name: impl Into<String>,
        form: impl Fn(Arc<DeviceProperties>, Arc<TargetProperties>) -> K + Send + Sync + 'static,
    ) -> Self {
        let lower = move |arch: Arch, mode| to_cuda(&form(arch.properties(), target_properties()), arch, mode);
        Self { name: name.into(), archs: Arch::ALL.into(), mode: ExecutionMode::Checked, lower: Box::new(lower) }
    }

    /// The same for a kernel with elements of this type, which becomes a part of the name. bf16 needs sm_80.
    pub(crate) fn of<K: CubeKernel>(
        elem: FloatKind,
        name: &str,
        form: impl Fn(Arc<DeviceProperties>, Arc<TargetProperties>) -> K + Send + Sync + 'static,
    ) -> Self {
        let entry = Self::new(format!("{name}.{elem:?}").to_lowercase(), form);
        if elem == FloatKind::BF16 { entry.on(|arch| arch >= Arch::Sm80) } else { entry }
    }

    /// Only for these of its architectures.
    pub(crate) fn on(mut self, with: impl Fn(Arch) -> bool) -> Self {
        self.archs.retain(|&arch| with(arch));
        self
    }

    /// For a kernel that is launched without checks of bounds.
    pub(crate) fn unchecked(mut self) -> Self {
        self.mode = ExecutionMode::Unchecked;
        self
    }

    /// Operation, variant, element type and sizes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it runs.
    pub fn archs(&self) -> &[Arch] {
        &self.archs
    }

    /// Compiles it for an architecture, and leaves all texts in `folder`.
    ///
    /// # Errors
    /// A compiler refuses it.
    pub fn compile(&self, arch: Arch, toolchain: &Toolchain, folder: &Path) -> Result<Report, ToolchainError> {
        compile(&(self.lower)(arch, self.mode)?, arch, toolchain, folder, &self.name)
    }
}

/// A kernel as a launch would make it: its cube, and its arguments from the address type on (where it has a dynamic one).
/// `_` is a buffer, and any number does for a scalar.
macro_rules! form {
    ($kernel:ident, $dim:expr, [$($args:tt)*]) => {{
        let dim: cubecl::prelude::CubeDim = $dim;
        move |device, target| {
            let count = cubecl::prelude::CubeCount::Static(1, 1, 1);
            crate::offline::form!(@call $kernel [device, target, count, dim,] $($args)*)
        }
    }};
    (@call $kernel:ident [$($done:expr,)*]) => { $kernel::create_dummy_kernel($($done),*) };
    (@call $kernel:ident [$($done:expr,)*] _ $(, $($rest:tt)*)?) => {
        crate::offline::form!(@call $kernel [$($done,)* crate::offline::buffer(),] $($($rest)*)?)
    };
    (@call $kernel:ident [$($done:expr,)*] $arg:expr $(, $($rest:tt)*)?) => {
        crate::offline::form!(@call $kernel [$($done,)* $arg,] $($($rest)*)?)
    };
}
pub(crate) use form;

/// A handle that names no memory.
pub(crate) fn handle(bytes: usize) -> Handle {
    let service =
        cubecl_common::device::ServiceId::of::<()>(cubecl_common::device::DeviceId { type_id: 0, index_id: 0 });
    let stream = cubecl_core::environment::stream::StreamId::current();
    Handle::from_memory(ManagedMemoryHandle::new(), service, stream, bytes as u64)
}

/// A buffer that names no memory: nothing is launched with it.
pub(crate) fn buffer() -> BufferArg {
    // SAFETY: nothing is launched with it.
    unsafe { BufferArg::from_raw_parts(handle(16), 1) }
}
