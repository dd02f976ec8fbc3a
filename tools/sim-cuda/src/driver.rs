//! The driver behind the functions: the simulated GPU, or a real driver that gets all calls.
use crate::code::{Code, CuResult, status};
use crate::config::Config;
use crate::forward::Real;
use crate::gpu::Gpu;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The driver behind the functions.
// One for the whole program.
#[allow(clippy::large_enum_variant)]
pub enum Driver {
    /// The simulator.
    Simulated(Mutex<Gpu>),
    /// Another driver.
    Real(Real),
}

/// The driver, made as the environment says when it is first asked for. None: what the environment says cannot be.
pub fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| open().map_err(|error| eprintln!("sim-cuda: {error}")).ok()).as_ref()
}

/// Tells this copy of the library from others.
#[unsafe(no_mangle)]
unsafe extern "C" fn sim_cuda_marker() {}

fn open() -> Result<Driver, String> {
    let mut config = Config::from_env()?;
    if let Some(path) = &config.forward {
        let real = Real::open(path, &config).map_err(|error| format!("SIM_CUDA_FORWARD: {error}"))?;
        // SAFETY: only this library has a function of that name.
        let marker = unsafe { real.symbol::<unsafe extern "C" fn()>("sim_cuda_marker") };
        if marker.is_none_or(|marker| !std::ptr::fn_addr_eq(marker, sim_cuda_marker as unsafe extern "C" fn())) {
            return Ok(Driver::Real(real));
        }
        // Another copy of this library has forwarded to this one, and records.
        config.trace = None;
    }
    eprintln!(
        "sim-cuda: simulated GPU, sm_{}, {} multiprocessors, seed {}{}",
        config.arch, config.multiprocessors, config.seed, config.adversary
    );
    Ok(Driver::Simulated(Mutex::new(Gpu::new(config))))
}

/// Runs a function on the simulated GPU, unless a launch has failed before.
pub fn simulate(gpu: &Mutex<Gpu>, body: impl FnOnce(&mut Gpu) -> Result<(), Code>) -> CuResult {
    let run = || {
        let mut gpu = gpu.lock().unwrap_or_else(PoisonError::into_inner);
        gpu.check()?;
        body(&mut gpu)
    };
    // Panics must not leave a C function.
    status(catch_unwind(AssertUnwindSafe(run)).unwrap_or(Err(Code::Unknown)))
}

/// Defines functions of the driver API: what each does on the simulated GPU and, where recording needs to know of the
/// call, what is done besides calling the real driver.
macro_rules! api {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) { $simulated:expr } $(forward { $forwarded:expr })?)*) => {$(
        $(#[$doc])*
        // Some bodies need it, others do not.
        #[allow(unused_unsafe)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::code::CuResult {
            use $crate::code::Code;
            use $crate::driver::{Driver, driver, simulate};
            type CFunction = unsafe extern "C" fn($($ty),*) -> $crate::code::CuResult;
            match driver() {
                // SAFETY: the caller's pointers are what cuda.h asks for.
                Some(Driver::Simulated(gpu)) => unsafe { simulate(gpu, $simulated) },
                Some(Driver::Real(real)) => {
                    // SAFETY: the type is that of cuda.h.
                    let Some(function) = (unsafe { real.symbol::<CFunction>(stringify!($name)) }) else {
                        return Code::NotSupported as u32;
                    };
                    // SAFETY: the arguments are the caller's.
                    let call = || unsafe { function($($arg),*) };
                    // SAFETY: the caller's pointers are what cuda.h asks for.
                    $(return unsafe { ($forwarded)(real, &call as &dyn Fn() -> u32) };)?
                    #[allow(unreachable_code)]
                    call()
                }
                None => Code::Unknown as u32,
            }
        }
    )*};
}
pub(crate) use api;

/// Writes a result where the caller wants it.
///
/// # Errors
/// [`Code::InvalidValue`]: nowhere.
///
/// # Safety
/// `to` is null or can be written.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: the caller vouches for the pointer.
    unsafe { to.write(value) };
    Ok(())
}
