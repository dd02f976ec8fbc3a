//! Kernels that are compiled before they are needed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::dry_run::DryRun;
use cubecl::launched::LaunchedKernels;
use cubecl::logging::{LaunchObservation, LaunchObserver};

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

/// While there is one beside [`CompileOnly`], a launcher whose kernel depends on sizes that change from step to step names those for
/// other sizes, too: what its table has.
#[derive(Debug)]
pub struct AllSizes(());

static ALL_SIZES: AtomicUsize = AtomicUsize::new(0);

impl AllSizes {
    /// Begins.
    #[allow(clippy::new_without_default, reason = "a guard is no value")]
    pub fn new() -> Self {
        ALL_SIZES.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for AllSizes {
    fn drop(&mut self) {
        ALL_SIZES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether launchers name the kernels for other sizes: launches reach no device then, whatever their arguments are.
pub(crate) fn names_all_sizes() -> bool {
    ALL_SIZES.load(Ordering::Relaxed) > 0 && cubecl::dry_run::dry_run()
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

/// The kernels that `pass` launches, and other threads meanwhile: the name of each under a hash of what its code depends on.
pub fn launched<T>(pass: impl FnOnce() -> T) -> (T, BTreeMap<u128, String>) {
    let names = Arc::new(Names(Mutex::new((LaunchedKernels::new(), BTreeMap::new()))));
    let observation = LaunchObservation::new(names.clone());
    let result = pass();
    drop(observation);
    let mut names = names.0.lock().unwrap_or_else(PoisonError::into_inner);
    (result, std::mem::take(&mut names.1))
}

/// Names of kernels, and what was launched since the last one.
struct Names(Mutex<(LaunchedKernels, BTreeMap<u128, String>)>);

impl LaunchObserver for Names {
    /// The hash of a launch is noted just before this.
    fn launched(&self, kernel: &'static str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hashes = std::mem::replace(&mut names.0, LaunchedKernels::new()).finish();
        names.1.extend(hashes.into_iter().map(|hash| (hash, kernel.to_string())));
    }
}
