//! The driver behind the functions: the simulated GPU, or a real driver that gets all calls.
use crate::code::{Code, CuResult, status};
use crate::config::Config;
use crate::forward::Real;
use crate::gpu::Gpu;
use crate::peers::Devices;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// The driver behind the functions.
pub enum Driver {
    /// The simulator.
    Simulated(Devices),
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
        "sim-cuda: {}simulated GPU, sm_{}, {} multiprocessors, seed {}{}",
        if config.devices > 1 { format!("{} times a ", config.devices) } else { String::new() },
        config.arch,
        config.multiprocessors,
        config.seed,
        config.adversary
    );
    Ok(Driver::Simulated(Devices::new(config)))
}

/// Runs a function on the simulated GPU of a handle, or of the current context, unless a launch has failed there before.
pub fn simulate(devices: &Devices, handle: Option<usize>, body: impl FnOnce(&mut Gpu) -> Result<(), Code>) -> CuResult {
    of_all(devices, handle, |devices| {
        let mut gpu = devices.lock(handle)?;
        gpu.check()?;
        body(&mut gpu)
    })
}

/// Runs a function that waits for no device.
pub fn of_all(devices: &Devices, _handle: Option<usize>, body: impl FnOnce(&Devices) -> Result<(), Code>) -> CuResult {
    // Panics must not leave a C function.
    status(catch_unwind(AssertUnwindSafe(|| body(devices))).unwrap_or(Err(Code::Unknown)))
}

/// Defines functions of the driver API: what each does on the simulated GPU and, where recording needs to know of the
/// call, what is done besides calling the real driver. `of handle`: on the device of the handle, whose context need not be current.
/// Behind `all devices:` functions get the devices, and wait for none of them.
macro_rules! api {
    (all devices: $($rest:tt)*) => { $crate::driver::api! { @of_all $($rest)* } };
    (@$how:ident $($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(of $handle:ident)? { $simulated:expr }
        $(forward { $forwarded:expr })?)*) => {$(
        $(#[$doc])*
        // Some bodies need it, others do not.
        #[allow(unused_unsafe)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::code::CuResult {
            use $crate::code::Code;
            use $crate::driver::{Driver, driver, $how};
            type CFunction = unsafe extern "C" fn($($ty),*) -> $crate::code::CuResult;
            match driver() {
                Some(Driver::Simulated(devices)) => {
                    let handle: Option<usize> = None;
                    $(let handle = handle.or(Some($handle));)?
                    // SAFETY: the caller's pointers are what cuda.h asks for.
                    unsafe { $how(devices, handle, $simulated) }
                }
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
    ($($rest:tt)*) => { $crate::driver::api! { @simulate $($rest)* } };
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
