//! Graphs: not simulated. Forwarded, launches are not recorded while one is captured.
use crate::driver::api;
use crate::forward::Real;
use std::ffi::{c_uint, c_ulonglong};

api! {
    fn cuStreamBeginCapture_v2(_stream: usize, _mode: c_uint) { |_| Err(Code::NotSupported) } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            real.shadow().capturing = true;
            call()
        }
    }
    fn cuStreamEndCapture(_stream: usize, _graph: *mut usize) { |_| Err(Code::NotSupported) } forward {
        |real: &Real, call: &dyn Fn() -> u32| {
            real.shadow().capturing = false;
            call()
        }
    }
    fn cuStreamIsCapturing(_stream: usize, status: *mut c_uint) { |_| crate::driver::put(status, 0) }
    fn cuGraphGetNodes(_graph: usize, _nodes: *mut usize, _count: *mut usize) { |_| Err(Code::NotSupported) }
    fn cuGraphNodeGetType(_node: usize, _kind: *mut c_uint) { |_| Err(Code::NotSupported) }
    fn cuGraphInstantiateWithFlags(_executable: *mut usize, _graph: usize, _flags: c_ulonglong) { |_| Err(Code::NotSupported) }
    fn cuGraphUpload(_executable: usize, _stream: usize) { |_| Err(Code::NotSupported) }
    fn cuGraphLaunch(_executable: usize, _stream: usize) { |_| Err(Code::NotSupported) }
    fn cuGraphDestroy(_graph: usize) { |_| Err(Code::NotSupported) }
    fn cuGraphExecDestroy(_executable: usize) { |_| Err(Code::NotSupported) }
}
