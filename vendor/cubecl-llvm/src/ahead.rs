//! Kernels that are compiled before they are needed, on all cores.
//!
//! A runtime asks for a kernel when it is launched, waits, and asks for the next one. While a program is [`Collecting`], it gets an
//! error at once and the kernel goes to a pool: so a pass that launches nothing (`cubecl::dry_run`) names its kernels while others
//! are compiled. Who asks again waits: a runtime makes the source of a kernel anew each time, which is no faster.
//!
//! A tuner's launches are real inside of such a pass, and would find no kernel: Burn's feature `autotune` and this exclude each
//! other.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::thread;

use crate::{disk, nvrtc};

/// What has been compiled by this process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compiled {
    /// Kernels that the compiler ran for.
    pub compiled: usize,
    /// Kernels that were on the disk.
    pub from_disk: usize,
}

static COMPILED: AtomicUsize = AtomicUsize::new(0);
static FROM_DISK: AtomicUsize = AtomicUsize::new(0);

/// What this process has compiled so far.
pub fn compiled() -> Compiled {
    Compiled { compiled: COMPILED.load(Ordering::Relaxed), from_disk: FROM_DISK.load(Ordering::Relaxed) }
}

/// As long as there is one, kernels go to the pool when they are asked for the first time, and who asks gets an error.
#[derive(Debug)]
pub struct Collecting(());

impl Collecting {
    /// Begins.
    #[allow(clippy::new_without_default, reason = "a guard is no value")]
    pub fn new() -> Self {
        pool().collecting += 1;
        Self(())
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        pool().collecting -= 1;
    }
}

/// Waits until the pool has nothing left to do.
pub fn wait() {
    let mut pool = pool();
    while pool.workers > 0 {
        pool = wait_for(pool);
    }
}

/// A kernel's source and what the compiler is told.
struct Job {
    key: u128,
    source: String,
    options: Vec<String>,
}

enum Code {
    /// Somebody compiles it.
    Pending,
    Ready(Result<Vec<u8>, String>),
}

#[derive(Default)]
struct Pool {
    /// Guards of [`Collecting`].
    collecting: usize,
    jobs: VecDeque<Job>,
    /// What nobody has asked for yet since it was compiled, or is being compiled.
    codes: HashMap<u128, Code>,
    /// Threads at work.
    workers: usize,
}

static POOL: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);
/// Notified when a code is ready, and when a worker has nothing left.
static CHANGED: Condvar = Condvar::new();

fn pool() -> MutexGuard<'static, Pool> {
    // A thread that panics leaves nothing half changed.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_for(pool: MutexGuard<'static, Pool>) -> MutexGuard<'static, Pool> {
    CHANGED.wait(pool).unwrap_or_else(PoisonError::into_inner)
}

/// The code of a source for an architecture.
///
/// # Errors
/// What the compiler says; while there is a [`Collecting`], at the first time that it is being compiled.
pub(crate) fn compile(source: &str, arch: &str) -> Result<Vec<u8>, String> {
    let options = nvrtc::options(arch);
    let key = disk::key(source, &options, nvrtc::version()?);
    let job = Job { key, source: source.into(), options };
    let mut pool = pool();
    if pool.collecting > 0 && !pool.codes.contains_key(&key) {
        return pool.collect(job);
    }
    while let Some(Code::Pending) = pool.codes.get(&key) {
        // Who needs it now does not wait for those before it in the queue.
        if let Some(place) = pool.jobs.iter().position(|job| job.key == key) {
            pool.jobs.remove(place);
            break;
        }
        pool = wait_for(pool);
    }
    if let Some(Code::Ready(code)) = pool.codes.remove(&key) {
        return code;
    }
    pool.codes.insert(key, Code::Pending);
    drop(pool);
    let code = make(&job);
    self::pool().codes.remove(&key);
    CHANGED.notify_all();
    code
}

impl Pool {
    /// Sees to it that a kernel is compiled that nobody has asked for.
    fn collect(&mut self, job: Job) -> Result<Vec<u8>, String> {
        if let Some(code) = from_disk(job.key) {
            return Ok(code);
        }
        self.codes.insert(job.key, Code::Pending);
        self.jobs.push_back(job);
        self.add_worker();
        Err("the kernel is being compiled".into())
    }

    /// One more thread, if there are cores. Without any, nobody waits for what is to be done.
    fn add_worker(&mut self) {
        AT_EXIT.call_once(|| {
            // SAFETY: the function is there as long as the program; that it was not taken does not matter.
            unsafe { atexit(stop) };
        });
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        if self.workers < cores && thread::Builder::new().name("nvrtc".into()).spawn(work).is_ok() {
            self.workers += 1;
        }
        if self.workers == 0 {
            self.jobs.drain(..).for_each(|job| drop(self.codes.remove(&job.key)));
        }
    }
}

static AT_EXIT: Once = Once::new();

unsafe extern "C" {
    /// Of the C library: calls a function when the program ends, before what was loaded earlier is taken apart.
    fn atexit(call: extern "C" fn()) -> c_int;
}

/// A program may end while kernels are compiled; the compiler must not be gone before.
extern "C" fn stop() {
    pool().jobs.clear();
    wait();
}

/// Compiles until there is nothing left.
fn work() {
    loop {
        let mut pool = pool();
        let Some(job) = pool.jobs.pop_front() else {
            pool.workers -= 1;
            CHANGED.notify_all();
            return;
        };
        drop(pool);
        let code = make(&job);
        self::pool().codes.insert(job.key, Code::Ready(code));
        CHANGED.notify_all();
    }
}

/// From the disk, or from the compiler and to the disk. A panic (the compiler's library lacks a function) is an error, too: others
/// wait for this.
fn make(job: &Job) -> Result<Vec<u8>, String> {
    std::panic::catch_unwind(|| make_or_panic(job)).unwrap_or_else(|_| Err("the compiler panicked".into()))
}

fn make_or_panic(job: &Job) -> Result<Vec<u8>, String> {
    if let Some(code) = from_disk(job.key) {
        return Ok(code);
    }
    let code = nvrtc::compile(&job.source, &job.options)?;
    COMPILED.fetch_add(1, Ordering::Relaxed);
    if let Some(folder) = disk::folder() {
        disk::write(&folder, job.key, &code);
    }
    Ok(code)
}

fn from_disk(key: u128) -> Option<Vec<u8>> {
    let code = disk::read(&disk::folder()?, key)?;
    FROM_DISK.fetch_add(1, Ordering::Relaxed);
    Some(code)
}
