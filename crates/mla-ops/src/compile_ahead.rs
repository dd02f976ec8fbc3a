//! Kernels that are compiled before they are needed: a program does not wait for compilers at its first token.

use burn::tensor::Device;

/// What this process has compiled for CUDA. Kernels of other runtimes are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CompiledKernels {
    /// How often the compiler ran.
    pub compiled: usize,
    /// Kernels that were on the disk.
    pub from_disk: usize,
}

/// Runs `pass`, none of whose launches reaches the device, and has the kernels compiled that it would launch: on CUDA in the
/// background, on all cores, from the disk where they have been compiled before. Returns what `pass` returns; `None` on a device
/// that has no kernels, for which `pass` is not called.
///
/// What `pass` reads from the device means nothing, and the memory that it allocates there is not taken, unless it writes
/// to it. **Nothing that other threads launch meanwhile reaches a device either**: call it while nobody else uses one, as a
/// program does that is about to load its model.
pub fn compile_ahead<T>(device: &Device, pass: impl FnOnce() -> T) -> Option<T> {
    #[cfg(feature = "_gpu")]
    if let burn::backend::DispatchDevice::Cube(_) = device.as_dispatch() {
        let _compile_only = mla_kernels::compiler::CompileOnly::new();
        let result = pass();
        // The device's thread compiles what it finds in its queue. An error is that of something before, and comes again.
        let _ = device.sync();
        return Some(result);
    }
    let _ = (device, pass);
    None
}

/// Waits until everything is compiled that [`compile_ahead`] has begun.
pub fn wait_for_kernels() {
    #[cfg(feature = "_gpu")]
    mla_kernels::compiler::wait();
}

/// What this process has compiled so far.
pub fn compiled_kernels() -> CompiledKernels {
    #[cfg(feature = "_gpu")]
    {
        let [compiled, from_disk] = mla_kernels::compiler::compiled();
        CompiledKernels { compiled, from_disk }
    }
    #[cfg(not(feature = "_gpu"))]
    CompiledKernels::default()
}
