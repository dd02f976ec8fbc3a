//! Memory of the device and pinned memory of the host; copies.
use crate::code::Code;
use crate::driver::{api, put};
use crate::forward::Real;
use crate::gpu::Gpu;
use crate::real_graphs::Issue;
use crate::work::{Place, Rows, Work};
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

/// Keeps a copy that the real driver took, for the graph that it may become a node of.
fn issued(real: &Real, call: CallReal, stream: usize, work: Result<Work, Code>) -> u32 {
    let result = call();
    if result == 0 {
        real.issued(stream, work.ok().map(Issue::new));
    }
    result
}

/// Forgets one that it frees.
fn freed(real: &Real, call: CallReal, address: u64) -> u32 {
    real.shadow().allocations.remove(&address);
    call()
}

api! {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        |gpu| {
            gpu.captures.unsafe_call("cuMemAlloc_v2")?;
            put(address, gpu.alloc(bytes)?)
        }
    } forward {
        |real: &Real, call: CallReal| allocated(real, call, address, bytes)
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: usize) {
        |gpu| put(address, gpu.alloc_async(bytes, stream)?)
    } forward {
        |real: &Real, call: CallReal| {
            let result = allocated(real, call, address, bytes);
            real.issued(stream, None);
            result
        }
    }
    fn cuMemFree_v2(address: u64) {
        |gpu| {
            gpu.captures.unsafe_call("cuMemFree_v2")?;
            gpu.free(address)
        }
    } forward {
        |real: &Real, call: CallReal| freed(real, call, address)
    }
    fn cuMemFreeAsync(address: u64, stream: usize) { |gpu| gpu.free_async(address, stream) } forward {
        |real: &Real, call: CallReal| {
            real.issued(stream, None);
            freed(real, call, address)
        }
    }
    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) {
        |gpu| {
            gpu.captures.unsafe_call("cuMemAllocHost_v2")?;
            put(address, gpu.pinned.alloc(bytes)?)
        }
    }
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) {
        |gpu| {
            gpu.captures.unsafe_call("cuMemHostAlloc")?;
            put(address, gpu.pinned.alloc(bytes)?)
        }
    }
    fn cuMemFreeHost(address: *mut c_void) {
        |gpu| {
            gpu.captures.unsafe_call("cuMemFreeHost")?;
            gpu.pinned.free(address)
        }
    }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        |gpu| at_once(gpu, "cuMemcpyHtoD_v2", &to_device(to, from, bytes))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) {
        |gpu| gpu.give(stream, to_device(to, from, bytes))
    } forward {
        |real: &Real, call: CallReal| issued(real, call, stream, Ok(to_device(to, from, bytes)))
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        |gpu| at_once(gpu, "cuMemcpyDtoH_v2", &to_host(to, from, bytes))
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) {
        |gpu| gpu.give(stream, to_host(to, from, bytes))
    } forward {
        |real: &Real, call: CallReal| issued(real, call, stream, Ok(to_host(to, from, bytes)))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        |gpu| at_once(gpu, "cuMemcpyDtoD_v2", &on_device(to, from, bytes))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        |gpu| gpu.give(stream, on_device(to, from, bytes))
    } forward {
        |real: &Real, call: CallReal| issued(real, call, stream, Ok(on_device(to, from, bytes)))
    }
    fn cuMemsetD8_v2(to: u64, value: c_uchar, bytes: usize) {
        |gpu| at_once(gpu, "cuMemsetD8_v2", &Work::Fill { to, value, bytes })
    }
    fn cuMemsetD8Async(to: u64, value: c_uchar, bytes: usize, stream: usize) {
        |gpu| gpu.give(stream, Work::Fill { to, value, bytes })
    } forward {
        |real: &Real, call: CallReal| issued(real, call, stream, Ok(Work::Fill { to, value, bytes }))
    }
    fn cuMemcpy2D_v2(copy: *const Copy2D) { |gpu| at_once(gpu, "cuMemcpy2D_v2", &(*copy).work()?) }
    fn cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: usize) { |gpu| gpu.give(stream, (*copy).work()?) } forward {
        |real: &Real, call: CallReal| issued(real, call, stream, (*copy).work())
    }
}

fn to_device(to: u64, from: *const c_void, bytes: usize) -> Work {
    Work::copy(Place::host(from), Place::Device(to), bytes)
}

fn to_host(to: *mut c_void, from: u64, bytes: usize) -> Work {
    Work::copy(Place::Device(from), Place::host(to), bytes)
}

fn on_device(to: u64, from: u64, bytes: usize) -> Work {
    Work::copy(Place::Device(from), Place::Device(to), bytes)
}

/// Work of a call that returns when it is done.
///
/// # Safety
/// As [`Work::run`].
unsafe fn at_once(gpu: &mut Gpu, function: &str, work: &Work) -> Result<(), Code> {
    gpu.captures.unsafe_call(function)?;
    // SAFETY: the caller vouches for the host's memory.
    unsafe { gpu.run(work) }
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

impl Copy2D {
    /// The copy.
    ///
    /// # Errors
    /// [`Code::NotSupported`] between other kinds of memory than the host's and the device's.
    fn work(&self) -> Result<Work, Code> {
        let place = |kind, host: *const c_void, device| match kind {
            HOST => Ok(Place::host(host)),
            DEVICE => Ok(Place::Device(device)),
            _ => Err(Code::NotSupported),
        };
        let from = place(self.from_type, self.from_host, self.from_device)?;
        let to = place(self.to_type, self.to_host, self.to_device)?;
        Ok(Work::Copy(Rows {
            from: from.offset(self.from_x + self.from_y * self.from_pitch),
            to: to.offset(self.to_x + self.to_y * self.to_pitch),
            width: self.width,
            height: self.height,
            from_pitch: self.from_pitch,
            to_pitch: self.to_pitch,
        }))
    }
}
