//! Streams and events. Work is done when its call returns, so there is nothing to wait for, unless the stream captures.
use crate::capture::Event;
use crate::code::Code;
use crate::driver::{api, put};
use crate::gpu::Gpu;
use std::ffi::{c_int, c_uint};

api! {
    fn cuStreamCreate(stream: *mut usize, _flags: c_uint) { |gpu| put(stream, gpu.handle()) }
    fn cuStreamCreateWithPriority(stream: *mut usize, _flags: c_uint, _priority: c_int) { |gpu| put(stream, gpu.handle()) }
    fn cuStreamDestroy_v2(stream: usize) of stream {
        |gpu| {
            gpu.captures.destroyed(stream);
            Ok(())
        }
    }
    fn cuStreamSynchronize(stream: usize) { |gpu| gpu.captures.wait_on_host(stream) }
    fn cuStreamQuery(stream: usize) { |gpu| gpu.captures.wait_on_host(stream) }
    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) {
        |gpu| {
            let event = gpu.event(event)?;
            gpu.captures.wait(stream, &event)
        }
    }
    fn cuEventCreate(event: *mut usize, _flags: c_uint) {
        |gpu| {
            let handle = gpu.handle();
            gpu.events.insert(handle, Event::New);
            put(event, handle)
        }
    }
    fn cuEventDestroy_v2(event: usize) of event { |gpu| gpu.events.remove(&event).map(|_| ()).ok_or(Code::InvalidHandle) }
    fn cuEventRecord(event: usize, stream: usize) {
        |gpu| {
            gpu.event(event)?;
            gpu.events.insert(event, gpu.captures.record(stream)?);
            Ok(())
        }
    }
    fn cuEventSynchronize(event: usize) of event {
        |gpu| {
            let event = gpu.event(event)?;
            gpu.captures.event_on_host(&event)
        }
    }
    fn cuEventQuery(event: usize) of event {
        |gpu| {
            let event = gpu.event(event)?;
            gpu.captures.event_on_host(&event)?;
            gpu.captures.unsafe_call("cuEventQuery")
        }
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize) { |gpu| put(milliseconds, elapsed(gpu, start, end)?) }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize) { |gpu| put(milliseconds, elapsed(gpu, start, end)?) }
}

/// Milliseconds from one event to another, on the clock of this machine.
fn elapsed(gpu: &mut Gpu, start: usize, end: usize) -> Result<f32, Code> {
    let mut time = |event| match gpu.event(event)? {
        Event::New => Err(Code::NotReady),
        Event::Recorded(time) => Ok(time),
        captured => Err(gpu.captures.event_on_host(&captured).err().unwrap_or(Code::CapturedEvent)),
    };
    Ok(time(end)?.saturating_duration_since(time(start)?).as_secs_f32() * 1000.0)
}
