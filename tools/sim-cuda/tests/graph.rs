//! Captures and graphs, and what the driver refuses meanwhile.
mod common;
use common::{Copy2D, Driver, GLOBAL, PTX, RELAXED, THREAD_LOCAL, add_double_copy, count};
use ptx_sim::{TensorElem, TensorMap, TensorSwizzle};
use std::ffi::CString;

const INVALID_VALUE: u32 = 1;
const ILLEGAL_STATE: u32 = 401;
const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;
const NOT_SUPPORTED: u32 = 801;
const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;
const MERGE: u32 = 902;
const UNMATCHED: u32 = 903;
const UNJOINED: u32 = 904;
const ISOLATION: u32 = 905;
const CAPTURED_EVENT: u32 = 907;
const WRONG_THREAD: u32 = 908;

fn doubled(first: u32) -> Vec<u32> {
    count(first).into_iter().map(|word| (word + 5) * 2).collect()
}

/// The end of a capture that was invalidated.
fn ends_invalidated(driver: &Driver, stream: usize) {
    assert_eq!(driver.status(stream), 2);
    assert_eq!(driver.cuMemsetD8Async(0, 0, 1, stream), INVALIDATED, "it takes no more work");
    let mut graph = 7;
    assert_eq!((driver.cuStreamEndCapture(stream, &mut graph), graph), (INVALIDATED, 0));
    assert_eq!((driver.status(stream), driver.cuStreamSynchronize(stream)), (0, 0));
}

#[test]
fn a_graph_runs_in_order_with_what_its_buffers_hold_now() {
    let driver = Driver::new();
    let (stream, input, out) = (driver.stream(), driver.words(10), driver.words(0));
    let executable = add_double_copy(&driver, stream, input, out);
    assert_eq!(driver.read(out), count(0), "nothing has run yet");
    assert_eq!((driver.cuGraphUpload(executable, stream), driver.cuGraphLaunch(executable, stream)), (0, 0));
    assert_eq!(driver.read(out), doubled(10));
    driver.write(input, 1000);
    assert_eq!((driver.cuGraphLaunch(executable, stream), driver.cuStreamSynchronize(stream)), (0, 0));
    assert_eq!(driver.read(out), doubled(1000));
    assert_eq!((driver.cuGraphExecDestroy(executable), driver.cuGraphLaunch(executable, stream)), (0, INVALID_VALUE));
}

/// Launches and copies to the host, those of graphs as they run.
#[test]
fn what_the_gpu_has_done_is_counted() {
    let driver = Driver::new();
    let counts = || {
        let mut counts = [0; 2];
        assert_eq!(driver.simCudaCounts(&mut counts), 0);
        counts
    };
    let (stream, input, out) = (driver.stream(), driver.words(10), driver.words(0));
    let executable = add_double_copy(&driver, stream, input, out);
    assert_eq!(counts(), [0, 0]);
    assert_eq!(driver.cuGraphLaunch(executable, stream), 0);
    assert_eq!(counts(), [2, 0]);
    driver.read(out);
    assert_eq!(counts(), [2, 1]);
}

#[test]
fn copies_from_the_host_read_it_when_the_graph_runs() {
    let driver = Driver::new();
    let (stream, to, rows) = (driver.stream(), driver.words(0), driver.words(0));
    let mut pinned = std::ptr::null_mut();
    assert_eq!(driver.cuMemAllocHost_v2(&mut pinned, 128), 0);
    // SAFETY: the driver allocated as much, and zeroed it.
    let host = unsafe { std::slice::from_raw_parts_mut(pinned, 32) };
    // Rows of 8 bytes that are 16 apart on the device.
    let copy = Copy2D {
        from_type: 1,
        from_host: pinned as usize,
        from_pitch: 8,
        to_type: 2,
        to_device: rows,
        to_pitch: 16,
        width: 8,
        height: 2,
        ..Copy2D::default()
    };
    driver.begin(stream);
    assert_eq!(driver.cuMemcpyHtoDAsync_v2(to, pinned, 128, stream), 0);
    assert_eq!((driver.cuMemcpy2DAsync_v2(&copy, stream), driver.cuMemsetD8Async(rows + 32, 1, 4, stream)), (0, 0));
    let graph = driver.end(stream);
    assert_eq!(driver.node_types(graph), [1, 1, 2]);
    let executable = driver.instantiate(graph);
    for first in [3, 900] {
        host.copy_from_slice(&count(first));
        assert_eq!(driver.cuGraphLaunch(executable, stream), 0);
        assert_eq!(driver.read(to), count(first));
        assert_eq!(driver.read(rows)[..9], [first, first + 1, 2, 3, first + 2, first + 3, 6, 7, 0x0101_0101]);
    }
    assert_eq!(driver.cuMemFreeHost(pinned), 0);
    assert_eq!(driver.cuGraphLaunch(executable, stream), ILLEGAL_ADDRESS, "pinned memory that was freed");
}

#[test]
fn structs_and_tensor_maps_are_copied_at_capture() {
    let driver = Driver::new();
    let (first, stream, out, tensor) = (driver.kernel("first"), driver.stream(), driver.words(0), driver.words(0));
    let map = TensorMap {
        elem: TensorElem::Int(4),
        address: tensor,
        dims: vec![32],
        strides: Vec::new(),
        boxes: vec![32],
        steps: vec![1],
        swizzle: TensorSwizzle::None,
        fill_nan: false,
    };
    driver.begin(stream);
    assert_eq!(driver.launch(first, 32, stream, &[&map.encode().unwrap(), &out.to_le_bytes()]), 0);
    let executable = driver.instantiate(driver.end(stream));
    assert_eq!(driver.cuGraphLaunch(executable, stream), 0);
    assert_eq!(driver.read(out)[31], tensor as u32, "where a map of ours has the address");
    assert_eq!(driver.cuMemFree_v2(tensor), 0);
    assert_eq!(driver.cuGraphLaunch(executable, stream), ILLEGAL_ADDRESS, "the kernel would not even read it");
}

#[test]
fn what_waits_or_allocates_invalidates_the_capture() {
    let driver = Driver::new();
    let (stream, other, memory, event) = (driver.stream(), driver.stream(), driver.words(0), driver.event());
    let image = CString::new(PTX).unwrap();
    let mut address = 0;
    assert_eq!(driver.cuEventRecord(event, other), 0);
    let calls: [&mut dyn FnMut() -> u32; 9] = [
        &mut || driver.cuStreamSynchronize(stream),
        &mut || driver.cuStreamQuery(stream),
        &mut || driver.cuCtxSynchronize(),
        &mut || driver.cuEventQuery(event),
        &mut || driver.cuMemAlloc_v2(&mut address, 128),
        &mut || driver.cuMemFree_v2(memory),
        &mut || driver.cuMemAllocHost_v2(&mut std::ptr::null_mut(), 128),
        &mut || driver.cuMemcpyHtoD_v2(memory, count(0).as_ptr(), 128),
        &mut || driver.cuModuleLoadData(&mut 0, image.as_ptr().cast()),
    ];
    for (index, call) in calls.into_iter().enumerate() {
        driver.begin(stream);
        assert_eq!(call(), UNSUPPORTED, "call {index}");
        ends_invalidated(&driver, stream);
    }
    driver.begin(stream);
    assert_eq!((driver.cuStreamSynchronize(other), driver.cuEventSynchronize(event)), (0, 0), "these wait for others");
    assert_eq!(driver.node_types(driver.end(stream)), [0u32; 0]);
    assert_eq!(driver.read(memory), count(0), "it was not freed");
}

#[test]
fn modes_say_which_threads_may_allocate() {
    let driver = Driver::new();
    let stream = driver.stream();
    let here = || driver.cuMemAlloc_v2(&mut 0, 128);
    let elsewhere = || std::thread::scope(|scope| scope.spawn(here).join().unwrap());
    for (mode, expected) in [(GLOBAL, UNSUPPORTED), (THREAD_LOCAL, 0), (RELAXED, 0)] {
        assert_eq!(driver.cuStreamBeginCapture_v2(stream, mode), 0);
        assert_eq!(elsewhere(), expected, "mode {mode}");
        driver.cuStreamEndCapture(stream, &mut 0);
    }
    for (mode, expected) in [(THREAD_LOCAL, UNSUPPORTED), (RELAXED, 0)] {
        assert_eq!(driver.cuStreamBeginCapture_v2(stream, mode), 0);
        assert_eq!(here(), expected, "mode {mode}");
        driver.cuStreamEndCapture(stream, &mut 0);
    }
    let end_elsewhere =
        || std::thread::scope(|scope| scope.spawn(|| driver.cuStreamEndCapture(stream, &mut 0)).join().unwrap());
    for (mode, expected) in [(GLOBAL, WRONG_THREAD), (RELAXED, 0)] {
        assert_eq!(driver.cuStreamBeginCapture_v2(stream, mode), 0);
        assert_eq!(end_elsewhere(), expected, "mode {mode}");
        driver.cuStreamEndCapture(stream, &mut 0);
    }
    assert_eq!(driver.cuStreamBeginCapture_v2(stream, 3), INVALID_VALUE);
}

#[test]
fn events_lead_other_streams_into_a_capture_and_back() {
    let driver = Driver::new();
    let (first, second, memory) = (driver.stream(), driver.stream(), driver.words(1));
    let (double, fork, join) = (driver.kernel("double"), driver.event(), driver.event());
    let params: [&[u8]; 1] = [&memory.to_le_bytes()];
    let forked = || {
        driver.begin(first);
        assert_eq!(driver.launch(double, 32, first, &params), 0);
        assert_eq!((driver.cuEventRecord(fork, first), driver.cuStreamWaitEvent(second, fork, 0)), (0, 0));
        assert_eq!(driver.launch(double, 32, second, &params), 0);
    };
    forked();
    assert_eq!(driver.cuStreamEndCapture(second, &mut 0), UNMATCHED);
    assert_eq!((driver.cuEventRecord(join, second), driver.cuStreamWaitEvent(first, join, 0)), (0, 0));
    let graph = driver.end(first);
    assert_eq!((driver.node_types(graph), driver.status(second)), (vec![0, 0], 0));
    assert_eq!(driver.cuGraphLaunch(driver.instantiate(graph), second), 0);
    assert_eq!(driver.read(memory)[0], 4);
    forked();
    assert_eq!(driver.cuStreamEndCapture(first, &mut 0), UNJOINED);
    assert_eq!(driver.cuStreamEndCapture(first, &mut 0), ILLEGAL_STATE);
}

#[test]
fn events_do_not_lead_out_of_a_capture() {
    let driver = Driver::new();
    let (first, second, event, inside) = (driver.stream(), driver.stream(), driver.event(), driver.event());
    assert_eq!(driver.cuEventRecord(event, second), 0);
    driver.begin(first);
    assert_eq!(driver.cuStreamWaitEvent(first, event, 0), ISOLATION);
    ends_invalidated(&driver, first);
    driver.begin(first);
    assert_eq!((driver.cuEventRecord(inside, first), driver.cuEventSynchronize(inside)), (0, CAPTURED_EVENT));
    ends_invalidated(&driver, first);
    assert_eq!(driver.cuEventSynchronize(inside), CAPTURED_EVENT, "until it is recorded again");
    driver.begin(first);
    driver.begin(second);
    assert_eq!((driver.cuEventRecord(inside, first), driver.cuStreamWaitEvent(second, inside, 0)), (0, MERGE));
    ends_invalidated(&driver, first);
    ends_invalidated(&driver, second);
    assert_eq!(driver.cuStreamBeginCapture_v2(0, GLOBAL), UNSUPPORTED, "the default stream");
}

#[test]
fn an_allocation_becomes_a_node_and_the_graph_is_refused() {
    let driver = Driver::new();
    let (stream, memory) = (driver.stream(), driver.words(0));
    driver.begin(stream);
    let mut address = 0;
    assert_eq!(driver.cuMemAllocAsync(&mut address, 128, stream), 0);
    assert_eq!(driver.cuMemsetD8Async(address, 0, 128, stream), 0);
    assert_eq!(driver.cuMemFreeAsync(address, stream), 0);
    let graph = driver.end(stream);
    assert_eq!(driver.node_types(graph), [10, 2, 11]);
    assert_eq!(driver.cuGraphInstantiateWithFlags(&mut 0, graph, 0), NOT_SUPPORTED);
    assert_eq!((driver.cuGraphDestroy(graph), driver.cuGraphDestroy(graph)), (0, INVALID_VALUE));
    driver.begin(stream);
    assert_eq!(driver.cuMemFreeAsync(memory, stream), INVALID_VALUE, "memory of no graph");
    ends_invalidated(&driver, stream);
}

#[test]
fn memory_that_was_freed_after_the_capture_is_an_error() {
    let driver = Driver::new();
    let (stream, input, out) = (driver.stream(), driver.words(10), driver.words(0));
    let executable = add_double_copy(&driver, stream, input, out);
    assert_eq!(driver.cuGraphLaunch(executable, stream), 0);
    assert_eq!(driver.cuMemFree_v2(out), 0);
    assert_eq!(driver.cuGraphLaunch(executable, stream), ILLEGAL_ADDRESS);
    assert_eq!(driver.cuStreamSynchronize(stream), ILLEGAL_ADDRESS, "and stays one");
}

#[test]
fn kernels_of_a_graph_are_checked_like_others() {
    for (name, threads, expected) in [("double", 64, ILLEGAL_ADDRESS), ("unwritten", 32, LAUNCH_FAILED)] {
        let driver = Driver::new();
        let (kernel, stream, memory) = (driver.kernel(name), driver.stream(), driver.words(0));
        driver.begin(stream);
        assert_eq!(driver.launch(kernel, threads, stream, &[&memory.to_le_bytes()]), 0);
        let executable = driver.instantiate(driver.end(stream));
        assert_eq!(driver.cuGraphLaunch(executable, stream), expected, "{name}");
        assert_eq!(driver.cuStreamSynchronize(stream), expected);
    }
}
