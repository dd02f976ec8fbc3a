//! Kernels that are compiled before they are needed.

use cubecl::dry_run::DryRun;

/// While there is one, launches do not reach a device; their kernels are compiled. On CUDA that is left to a pool of threads, and
/// may last longer than the guard.
///
/// Buffers keep what they have, so what is read meanwhile means nothing, and memory that is allocated is not taken from the device
/// until something needs it. It is true of **all threads of the program**, and all devices. A device takes launches from a queue:
/// wait for it before this ends.
#[derive(Debug)]
pub struct CompileOnly {
    // The first to end: a launch that reaches a device must get its kernel.
    #[cfg(feature = "cuda")]
    _collecting: cubecl_llvm::ahead::Collecting,
    _dry_run: DryRun,
}

impl CompileOnly {
    /// Begins.
    #[allow(clippy::new_without_default, reason = "a guard is no value")]
    pub fn new() -> Self {
        Self {
            #[cfg(feature = "cuda")]
            _collecting: cubecl_llvm::ahead::Collecting::new(),
            _dry_run: DryRun::new(),
        }
    }
}

/// Waits until the pool has compiled all that it was given.
pub fn wait() {
    #[cfg(feature = "cuda")]
    cubecl_llvm::ahead::wait();
}

/// What this process has compiled for CUDA so far: how often the compiler ran, and how many kernels were on the disk.
pub fn compiled() -> [usize; 2] {
    #[cfg(feature = "cuda")]
    {
        let all = cubecl_llvm::ahead::compiled();
        [all.compiled, all.from_disk]
    }
    #[cfg(not(feature = "cuda"))]
    [0; 2]
}
