//! Memory of the device and pinned memory of the host; copies.
use crate::code::Code;
use crate::driver::{api, put};
use crate::forward::Real;
use crate::gpu::Gpu;
use std::ffi::{c_uchar, c_uint, c_void};

type CallReal<'a> = &'a dyn Fn() -> u32;

/// Keeps an allocation that the real driver made.
unsafe fn allocated(real: &Real, call: CallReal, address: *mut u64, bytes: usize) -> u32 {
    let result = call();
    if result == 0 {
        // SAFETY: the driver has written there.
        real.shadow().allocations.insert(unsafe { *address }, bytes as u64);
    }
    result
}

/// Forgets one that it frees.
fn freed(real: &Real, call: CallReal, address: u64) -> u32 {
    real.shadow().allocations.remove(&address);
    call()
}

api! {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) { |gpu| put(address, gpu.alloc(bytes)?) } forward {
        |real: &Real, call: CallReal| allocated(real, call, address, bytes)
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, _stream: usize) { |gpu| put(address, gpu.alloc(bytes)?) } forward {
        |real: &Real, call: CallReal| allocated(real, call, address, bytes)
    }
    fn cuMemFree_v2(address: u64) { |gpu| gpu.free(address) } forward {
        |real: &Real, call: CallReal| freed(real, call, address)
    }
    fn cuMemFreeAsync(address: u64, _stream: usize) { |gpu| gpu.free(address) } forward {
        |real: &Real, call: CallReal| freed(real, call, address)
    }
    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) { |gpu| put(address, gpu.alloc_host(bytes)?) }
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) { |gpu| put(address, gpu.alloc_host(bytes)?) }
    fn cuMemFreeHost(address: *mut c_void) { |gpu| gpu.free_host(address) }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) { |gpu| to_device(gpu, to, from, bytes) }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, _stream: usize) {
        |gpu| to_device(gpu, to, from, bytes)
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) { |gpu| to_host(gpu, to, from, bytes) }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, _stream: usize) {
        |gpu| to_host(gpu, to, from, bytes)
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) { |gpu| on_device(gpu, to, from, bytes) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, _stream: usize) {
        |gpu| on_device(gpu, to, from, bytes)
    }
    fn cuMemsetD8_v2(to: u64, value: c_uchar, bytes: usize) { |gpu| set(gpu, to, value, bytes) }
    fn cuMemsetD8Async(to: u64, value: c_uchar, bytes: usize, _stream: usize) { |gpu| set(gpu, to, value, bytes) }
    fn cuMemcpy2D_v2(copy: *const Copy2D) { |gpu| copy_rows(gpu, &*copy) }
    fn cuMemcpy2DAsync_v2(copy: *const Copy2D, _stream: usize) { |gpu| copy_rows(gpu, &*copy) }
}

/// `CU_MEMORYTYPE_HOST`.
const HOST: c_uint = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: c_uint = 2;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2D {
    from_x: usize,
    from_y: usize,
    from_type: c_uint,
    from_host: *const c_void,
    from_device: u64,
    from_array: usize,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_type: c_uint,
    to_host: *mut c_void,
    to_device: u64,
    to_array: usize,
    to_pitch: usize,
    width: usize,
    height: usize,
}

/// A copy that leaves an allocation is the program's mistake and no kernel's: it fails, and nothing else does.
fn refuse(fault: ptx_sim::Fault) -> Code {
    eprintln!("sim-cuda: {fault}");
    Code::InvalidValue
}

/// # Safety
/// `from` has as many bytes.
unsafe fn to_device(gpu: &Gpu, to: u64, from: *const c_void, bytes: usize) -> Result<(), Code> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller vouches for the bytes.
    let data = unsafe { std::slice::from_raw_parts(from.cast(), bytes) };
    gpu.memory.copy_to(to, data).map_err(refuse)
}

/// # Safety
/// `to` has room for as many bytes.
unsafe fn to_host(gpu: &Gpu, to: *mut c_void, from: u64, bytes: usize) -> Result<(), Code> {
    if bytes == 0 {
        return Ok(());
    }
    let data = gpu.memory.copy_from(from, bytes as u64).map_err(refuse)?;
    // SAFETY: the caller vouches for the room.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.cast(), bytes) };
    Ok(())
}

fn on_device(gpu: &Gpu, to: u64, from: u64, bytes: usize) -> Result<(), Code> {
    let data = gpu.memory.copy_from(from, bytes as u64).map_err(refuse)?;
    gpu.memory.copy_to(to, &data).map_err(refuse)
}

fn set(gpu: &Gpu, to: u64, value: u8, bytes: usize) -> Result<(), Code> {
    gpu.memory.copy_to(to, &vec![value; bytes]).map_err(refuse)
}

/// # Safety
/// Rows on the host are the caller's.
unsafe fn copy_rows(gpu: &Gpu, copy: &Copy2D) -> Result<(), Code> {
    for row in 0..copy.height {
        let from = copy.from_x + (copy.from_y + row) * copy.from_pitch;
        let to = copy.to_x + (copy.to_y + row) * copy.to_pitch;
        let (device_from, device_to) = (copy.from_device + from as u64, copy.to_device + to as u64);
        match (copy.from_type, copy.to_type) {
            // SAFETY: the caller vouches for the rows.
            (HOST, DEVICE) => unsafe { to_device(gpu, device_to, copy.from_host.byte_add(from), copy.width) }?,
            // SAFETY: as above.
            (DEVICE, HOST) => unsafe { to_host(gpu, copy.to_host.byte_add(to), device_from, copy.width) }?,
            (DEVICE, DEVICE) => on_device(gpu, device_to, device_from, copy.width)?,
            _ => return Err(Code::NotSupported),
        }
    }
    Ok(())
}
