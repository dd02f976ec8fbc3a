//! Devices, contexts, errors.
use crate::code::{Code, CuResult};
use crate::device::attribute;
use crate::driver::{api, put};
use crate::gpu::Counts;
use std::ffi::{CStr, c_char, c_int, c_uint};

/// The version of the driver API (13.0).
const VERSION: c_int = 13000;

api! {
    /// No function of CUDA: what the simulated GPU has done so far, for tests that count.
    fn simCudaCounts(counts: *mut Counts) { |gpu| put(counts, gpu.counts) }
    /// No function of CUDA: leaves so many bytes of memory free, for tests of programs that want more.
    fn simCudaLeave(bytes: u64) { |gpu| { gpu.leave(bytes); Ok(()) } }
    fn cuCtxSynchronize() { |gpu| gpu.captures.context_on_host() }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        |gpu| { put(free, gpu.free_bytes() as usize)?; put(total, gpu.config.memory as usize) }
    }
}

api! {
    all devices:
    fn cuInit(_flags: c_uint) { |_| Ok(()) }
    fn cuDriverGetVersion(version: *mut c_int) { |_| put(version, VERSION) }
    fn cuDeviceGetCount(count: *mut c_int) { |devices| put(count, devices.config.devices as c_int) }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        |devices| put(device, devices.number(ordinal)? as c_int)
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        |devices| {
            let text = format!("Simulated GPU sm_{}\0", devices.config.arch);
            if text.len() > length as usize {
                return Err(Code::InvalidValue);
            }
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
            Ok(())
        }
    }
    fn cuDeviceGetAttribute(value: *mut c_int, which: c_uint, _device: c_int) {
        |devices| match attribute(&devices.config, which) {
            Some(found) => put(value, found),
            None => {
                eprintln!("sim-cuda: the simulated GPU has no value of attribute {which}");
                Err(Code::InvalidValue)
            }
        }
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { |devices| put(bytes, devices.config.memory as usize) }
    fn cuDeviceGetPCIBusId(_id: *mut c_char, _length: c_int, _device: c_int) { |_| Err(Code::NotSupported) }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        |devices| match devices.config.full {
            true => Err(Code::OutOfMemory),
            false => put(context, devices.context(devices.number(device)?)),
        }
    }
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) { |_| Ok(()) }
    fn cuCtxSetCurrent(context: usize) { |devices| devices.set_current(context) }
    fn cuCtxGetCurrent(context: *mut usize) {
        |devices| put(context, devices.current().map_or(0, |device| devices.context(device)))
    }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        |_| { put(least, 0)?; put(greatest, 0) }
    }
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        |devices| put(can, c_int::from(devices.number(device)? != devices.number(peer)?))
    }
    fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) {
        |devices| if flags == 0 { devices.enable_peer(context) } else { Err(Code::InvalidValue) }
    }
    fn cuCtxDisablePeerAccess(context: usize) { |devices| devices.disable_peer(context) }
}

/// Writes one of the two texts of a result; they are asked for after a failure, too.
unsafe fn text(
    result: CuResult,
    to: *mut *const c_char,
    choose: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> CuResult {
    let found = Code::texts(result).map_or(c"CUDA_ERROR_OTHER", choose);
    // SAFETY: the caller's pointer is what cuda.h asks for.
    crate::code::status(unsafe { put(to, found.as_ptr()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(result: CuResult, name: *mut *const c_char) -> CuResult {
    // SAFETY: as above.
    unsafe { text(result, name, |(name, _)| name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(result: CuResult, description: *mut *const c_char) -> CuResult {
    // SAFETY: as above.
    unsafe { text(result, description, |(_, description)| description) }
}
