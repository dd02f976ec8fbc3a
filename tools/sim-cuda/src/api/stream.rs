//! Streams and events. All calls are done when they return, so there is nothing to wait for.
use crate::driver::{api, put};
use std::ffi::{c_int, c_uint};
use std::time::Instant;

api! {
    fn cuStreamCreate(stream: *mut usize, _flags: c_uint) { |gpu| put(stream, gpu.handle()) }
    fn cuStreamCreateWithPriority(stream: *mut usize, _flags: c_uint, _priority: c_int) { |gpu| put(stream, gpu.handle()) }
    fn cuStreamDestroy_v2(_stream: usize) { |_| Ok(()) }
    fn cuStreamSynchronize(_stream: usize) { |_| Ok(()) }
    fn cuStreamQuery(_stream: usize) { |_| Ok(()) }
    fn cuStreamWaitEvent(_stream: usize, event: usize, _flags: c_uint) {
        |gpu| gpu.events.get(&event).map(|_| ()).ok_or(Code::InvalidHandle)
    }
    fn cuEventCreate(event: *mut usize, _flags: c_uint) {
        |gpu| {
            let handle = gpu.handle();
            gpu.events.insert(handle, None);
            put(event, handle)
        }
    }
    fn cuEventDestroy_v2(event: usize) { |gpu| gpu.events.remove(&event).map(|_| ()).ok_or(Code::InvalidHandle) }
    fn cuEventRecord(event: usize, _stream: usize) {
        |gpu| {
            *gpu.events.get_mut(&event).ok_or(Code::InvalidHandle)? = Some(Instant::now());
            Ok(())
        }
    }
    fn cuEventSynchronize(event: usize) { |gpu| gpu.events.get(&event).map(|_| ()).ok_or(Code::InvalidHandle) }
    fn cuEventQuery(event: usize) { |gpu| gpu.events.get(&event).map(|_| ()).ok_or(Code::InvalidHandle) }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) { |gpu| put(milliseconds, elapsed(gpu, start, end)?) }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) { |gpu| put(milliseconds, elapsed(gpu, start, end)?) }
}

/// Milliseconds from one event to another, on the clock of this machine.
fn elapsed(gpu: &crate::gpu::Gpu, start: usize, end: usize) -> Result<f32, crate::code::Code> {
    use crate::code::Code;
    let time = |event| gpu.events.get(&event).ok_or(Code::InvalidHandle)?.ok_or(Code::NotReady);
    Ok(time(end)?.saturating_duration_since(time(start)?).as_secs_f32() * 1000.0)
}
