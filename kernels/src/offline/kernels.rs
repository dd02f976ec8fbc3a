//! The kernels, in every form that is launched.

use std::path::Path;

use cubecl::prelude::*;
use cubecl_cpp::ComputeKernel;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::server::Handle;

use super::compile::{compile, target_properties, to_cuda};
use super::{Arch, Report, Toolchain, ToolchainError};
use crate::portable::mla_decode;

/// A kernel in one of its forms.
pub struct Entry {
    /// Operation, variant and sizes.
    pub name: String,
    /// Where it runs.
    pub archs: &'static [Arch],
    lower: Box<dyn Fn(Arch) -> Result<ComputeKernel, ToolchainError>>,
}

impl Entry {
    /// An entry that lowers what `kernel` makes for an architecture.
    pub(crate) fn new<K: CubeKernel>(
        name: impl Into<String>,
        archs: &'static [Arch],
        kernel: impl Fn(std::sync::Arc<DeviceProperties>, std::sync::Arc<TargetProperties>) -> K + 'static,
    ) -> Self {
        let lower = move |arch: Arch| to_cuda(&kernel(arch.properties(), target_properties()), arch);
        Self { name: name.into(), archs, lower: Box::new(lower) }
    }

    /// Compiles it for an architecture, and leaves all texts in `folder`.
    ///
    /// # Errors
    /// A compiler refuses it.
    pub fn check(&self, arch: Arch, toolchain: &Toolchain, folder: &Path) -> Result<Report, ToolchainError> {
        compile(&(self.lower)(arch)?, arch, toolchain, folder, &self.name)
    }
}

/// All kernels that are compiled.
pub fn entries() -> Vec<Entry> {
    let mut entries = mla_decode::offline();
    entries.extend(crate::sm90::mla_decode::offline());
    entries
}

/// A handle that names no memory.
pub(crate) fn handle(bytes: usize) -> Handle {
    let service =
        cubecl_common::device::ServiceId::of::<()>(cubecl_common::device::DeviceId { type_id: 0, index_id: 0 });
    let stream = cubecl_core::environment::stream::StreamId::current();
    Handle::from_memory(ManagedMemoryHandle::new(), service, stream, bytes as u64)
}

/// A buffer that names no memory: only its length is looked at.
pub(crate) fn buffer(len: usize) -> BufferArg {
    // SAFETY: nothing is launched with it.
    unsafe { BufferArg::from_raw_parts(handle(len * 16), len) }
}
