//! Captures and graphs.
use crate::capture::Mode;
use crate::driver::{api, put};
use crate::forward::Real;
use std::ffi::{c_uint, c_ulonglong};

/// Flags of `cuGraphInstantiateWithFlags` that change nothing here: automatic frees, priorities of nodes.
const INSTANTIATE: c_ulonglong = 1 | 8;

api! {
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) {
        |gpu| gpu.captures.begin(stream, Mode::from_cuda(mode)?)
    } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            let result = call();
            if result == 0 {
                real.shadow().graphs.begun(stream);
            }
            result
        }
    }
    fn cuStreamEndCapture(stream: usize, graph: *mut usize) {
        |gpu| {
            put(graph, 0)?;
            put(graph, gpu.end_capture(stream)?)
        }
    } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            let result = call();
            let made = (result == 0 && !graph.is_null()).then(|| *graph);
            // In the wrong thread nothing ends.
            if !real.captures(stream) {
                real.shadow().graphs.ended(stream, made);
            }
            result
        }
    }
    fn cuStreamIsCapturing(stream: usize, status: *mut c_uint) {
        |gpu| put(status, gpu.captures.status(stream) as c_uint)
    }
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) {
        |gpu| list(&gpu.graphs.nodes(graph)?, nodes, count)
    }
    fn cuGraphNodeGetType(node: usize, kind: *mut c_uint) { |gpu| put(kind, gpu.graphs.work(node)?.node_type()) }
    fn cuGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: c_ulonglong) {
        |gpu| {
            if flags & !INSTANTIATE != 0 {
                return Err(Code::NotSupported);
            }
            let handle = gpu.handle();
            gpu.graphs.instantiate(handle, graph)?;
            put(executable, handle)
        }
    } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            let result = call();
            if result == 0 {
                real.shadow().graphs.instantiated(*executable, graph);
            }
            result
        }
    }
    fn cuGraphUpload(executable: usize, stream: usize) {
        |gpu| {
            gpu.graphs.executable(executable)?;
            gpu.captures.wait_on_host(stream)
        }
    }
    fn cuGraphLaunch(executable: usize, stream: usize) { |gpu| gpu.launch_graph(executable, stream) } forward {
        |real: &Real, call: &dyn Fn() -> u32| real.replay(executable, stream, call)
    }
    fn cuGraphDestroy(graph: usize) { |gpu| gpu.destroy_graph(graph) } forward {
        |real: &Real, call: &dyn Fn() -> u32| destroyed(real, graph, call)
    }
    fn cuGraphExecDestroy(executable: usize) { |gpu| gpu.graphs.destroy_executable(executable) } forward {
        |real: &Real, call: &dyn Fn() -> u32| destroyed(real, executable, call)
    }
}

/// Forgets a graph that the real driver destroys.
fn destroyed(real: &Real, handle: usize, call: &dyn Fn() -> u32) -> u32 {
    real.shadow().graphs.destroyed(handle);
    call()
}

/// Writes as many handles as the caller has room for, zeros behind them; without room only how many there are.
///
/// # Safety
/// `count` can be written, and `to` is null or has as many elements as it says.
unsafe fn list(handles: &[usize], to: *mut usize, count: *mut usize) -> Result<(), crate::code::Code> {
    if count.is_null() {
        return Err(crate::code::Code::InvalidValue);
    }
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        if to.is_null() {
            return put(count, handles.len());
        }
        let room = *count;
        (0..room).for_each(|index| to.add(index).write(handles.get(index).copied().unwrap_or(0)));
        put(count, room.min(handles.len()))
    }
}
