//! Kernels that are compiled before they are needed: a program does not wait for compilers at its first token.

use std::collections::BTreeMap;

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
///
/// ```
/// use burn::tensor::Device;
/// use mla_ops::compile_ahead;
///
/// // The CPU has no kernels to compile.
/// assert_eq!(compile_ahead(&Device::flex(), || "launches what a first step will launch"), None);
/// ```
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

/// The same for a pass of steps whose sizes stand for others: beside the kernels that it would launch, those that an operation's
/// table has for fewer rows and keys, and those of Burn's operations in both forms, which write in place or not. So `pass` is called
/// twice. `None` where [`compile_ahead`] gives none.
///
/// # Errors
/// The first that `pass` gives.
pub fn compile_all_ahead<E: Send + 'static>(
    device: &Device,
    pass: impl Fn() -> Result<(), E> + Send + Sync,
) -> Option<Result<(), E>> {
    #[cfg(feature = "_gpu")]
    let _all_sizes = mla_kernels::compiler::AllSizes::new();
    compile_ahead(device, || {
        pass()?;
        on_device_thread(device, &pass).unwrap_or(Ok(()))
    })
}

/// Runs `pass` on the device's thread, while other threads that use the device wait; `None` where there is none, or that thread has
/// failed. A buffer has a second handle until that thread has made it, and Burn writes in place where there is one alone: so which of
/// its kernels are launched elsewhere depends on how far the thread is, as does how early a buffer is free again. On the thread
/// itself it is never behind. `pass` must not wait for another thread that uses the device.
#[doc(hidden)]
pub fn on_device_thread<T: Send + 'static>(device: &Device, pass: impl FnOnce() -> T + Send) -> Option<T> {
    #[cfg(feature = "_gpu")]
    if let burn::backend::DispatchDevice::Cube(cube) = device.as_dispatch() {
        return cube.client().exclusive(pass).ok();
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

/// The kernels that `pass` launches, and other threads meanwhile: the name of each under a hash of what its code depends on. On the
/// CPU there are none.
pub fn launched_kernels<T>(pass: impl FnOnce() -> T) -> (T, BTreeMap<u128, String>) {
    #[cfg(feature = "_gpu")]
    return mla_kernels::compiler::launched(pass);
    #[cfg(not(feature = "_gpu"))]
    (pass(), BTreeMap::new())
}
