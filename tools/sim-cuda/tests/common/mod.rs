//! Calls the library as programs do, by the names of `cuda.h`.
#![allow(dead_code, reason = "each test target uses a part")]
#![allow(non_snake_case, clippy::too_many_arguments, reason = "functions of cuda.h")]
use libloading::Library;
use std::ffi::{CString, c_void};
use std::path::PathBuf;

/// Kernels for 32 threads: `add` writes `in[i] + k` to `out[i]`, `double` doubles `a[i]`, `unwritten` reads shared
/// memory that nothing wrote, `first` writes a word of a struct to `out[i]`.
pub const PTX: &str = ".version 9.0\n.target sm_90a\n.address_size 64
.visible .entry add(.param .u64 in, .param .u64 out, .param .u32 k) {
    .reg .b64 %rd<5>; .reg .b32 %r<5>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.param.u32 %r3, [k]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
    ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r3; st.global.u32 [%rd2], %r2; ret; }
.visible .entry double(.param .u64 a) {
    .reg .b64 %rd<5>; .reg .b32 %r<5>;
    ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
    ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r2; st.global.u32 [%rd1], %r2; ret; }
.visible .entry unwritten(.param .u64 a) {
    .reg .b64 %rd<5>; .reg .b32 %r<5>; .shared .align 4 .b8 buf[128];
    ld.param.u64 %rd1, [a]; ld.shared.u32 %r2, [buf]; st.global.u32 [%rd1], %r2; ret; }
.visible .entry first(.param .align 64 .b8 s[128], .param .u64 out) {
    .reg .b64 %rd<5>; .reg .b32 %r<5>;
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
    ld.param.u32 %r2, [s+16]; st.global.u32 [%rd1], %r2; ret; }
";

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
pub const GLOBAL: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub const THREAD_LOCAL: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const RELAXED: u32 = 2;

/// A copy of the library, with a device of its own.
pub struct Driver {
    // Never unloaded, for the simulator's threads go on.
    library: &'static Library,
}

/// The library that cargo built for the tests.
pub fn built() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libsim_cuda.so")
}

macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),*);)*) => {
        impl Driver {$(
            pub fn $name(&self, $($arg: $ty),*) -> u32 {
                type Function = unsafe extern "C" fn($($ty),*) -> u32;
                // SAFETY: the type is that of cuda.h, and the tests' pointers are what it asks for.
                unsafe { self.library.get::<Function>(stringify!($name).as_bytes()).unwrap()($($arg),*) }
            }
        )*}
    };
}

functions! {
    fn cuDeviceGetCount(count: &mut i32);
    fn cuDevicePrimaryCtxRetain(context: &mut usize, device: i32);
    fn cuCtxSetCurrent(context: usize);
    fn cuCtxGetCurrent(context: &mut usize);
    fn cuDeviceCanAccessPeer(can: &mut i32, device: i32, peer: i32);
    fn cuCtxEnablePeerAccess(context: usize, flags: u32);
    fn cuCtxSynchronize();
    fn simCudaCounts(counts: &mut [u64; 2]);
    fn simCudaLeave(bytes: u64);
    fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize);
    fn cuStreamCreate(stream: &mut usize, flags: u32);
    fn cuStreamSynchronize(stream: usize);
    fn cuStreamQuery(stream: usize);
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    fn cuStreamBeginCapture_v2(stream: usize, mode: u32);
    fn cuStreamEndCapture(stream: usize, graph: &mut usize);
    fn cuStreamIsCapturing(stream: usize, status: &mut u32);
    fn cuEventCreate(event: &mut usize, flags: u32);
    fn cuEventRecord(event: usize, stream: usize);
    fn cuEventQuery(event: usize);
    fn cuEventSynchronize(event: usize);
    fn cuMemAlloc_v2(address: &mut u64, bytes: usize);
    fn cuMemAllocAsync(address: &mut u64, bytes: usize, stream: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemFreeAsync(address: u64, stream: usize);
    fn cuMemAllocHost_v2(address: &mut *mut u32, bytes: usize);
    fn cuMemFreeHost(address: *mut u32);
    fn cuMemcpyHtoD_v2(to: u64, from: *const u32, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut u32, from: u64, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u32, bytes: usize, stream: usize);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize);
    fn cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: usize);
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: usize);
    fn cuModuleLoadData(module: &mut usize, image: *const c_void);
    fn cuModuleGetFunction(function: &mut usize, module: usize, name: *const std::ffi::c_char);
    fn cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void);
    fn cuGraphGetNodes(graph: usize, nodes: *mut usize, count: &mut usize);
    fn cuGraphNodeGetType(node: usize, kind: &mut u32);
    fn cuGraphInstantiateWithFlags(executable: &mut usize, graph: usize, flags: u64);
    fn cuGraphUpload(executable: usize, stream: usize);
    fn cuGraphLaunch(executable: usize, stream: usize);
    fn cuGraphDestroy(graph: usize);
    fn cuGraphExecDestroy(executable: usize);
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Default)]
pub struct Copy2D {
    pub from_x: usize,
    pub from_y: usize,
    pub from_type: u32,
    pub from_host: usize,
    pub from_device: u64,
    pub from_array: usize,
    pub from_pitch: usize,
    pub to_x: usize,
    pub to_y: usize,
    pub to_type: u32,
    pub to_host: usize,
    pub to_device: u64,
    pub to_array: usize,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

impl Driver {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so");
        std::fs::copy(built(), &path).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(path) }.unwrap();
        Self { library: Box::leak(Box::new(library)) }
    }

    pub fn stream(&self) -> usize {
        let mut stream = 0;
        assert_eq!(self.cuStreamCreate(&mut stream, 1), 0);
        stream
    }

    pub fn event(&self) -> usize {
        let mut event = 0;
        assert_eq!(self.cuEventCreate(&mut event, 0), 0);
        event
    }

    /// Memory with 32 words from a first one on.
    pub fn words(&self, first: u32) -> u64 {
        let mut address = 0;
        assert_eq!(self.cuMemAlloc_v2(&mut address, 128), 0);
        self.write(address, first);
        address
    }

    pub fn write(&self, address: u64, first: u32) {
        assert_eq!(self.cuMemcpyHtoD_v2(address, count(first).as_ptr(), 128), 0);
    }

    pub fn read(&self, address: u64) -> Vec<u32> {
        let mut words = vec![0; 32];
        assert_eq!(self.cuMemcpyDtoH_v2(words.as_mut_ptr(), address, 128), 0);
        words
    }

    pub fn kernel(&self, name: &str) -> usize {
        let (mut module, mut function) = (0, 0);
        let (image, name) = (CString::new(PTX).unwrap(), CString::new(name).unwrap());
        assert_eq!(self.cuModuleLoadData(&mut module, image.as_ptr().cast()), 0);
        assert_eq!(self.cuModuleGetFunction(&mut function, module, name.as_ptr()), 0);
        function
    }

    /// Launches so many threads. The parameters are overwritten afterwards: the driver has to have copied them.
    pub fn launch(&self, function: usize, threads: u32, stream: usize, params: &[&[u8]]) -> u32 {
        let mut params: Vec<_> = params.iter().map(|bytes| bytes.to_vec()).collect();
        let mut pointers: Vec<_> = params.iter_mut().map(|bytes| bytes.as_mut_ptr().cast::<c_void>()).collect();
        let (pointers, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        let result = self.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, pointers, none);
        params.iter_mut().for_each(|bytes| bytes.fill(0xab));
        result
    }

    pub fn begin(&self, stream: usize) {
        assert_eq!(self.cuStreamBeginCapture_v2(stream, GLOBAL), 0);
    }

    pub fn end(&self, stream: usize) -> usize {
        let mut graph = 0;
        assert_eq!(self.cuStreamEndCapture(stream, &mut graph), 0);
        graph
    }

    /// Makes a graph executable, and destroys it.
    pub fn instantiate(&self, graph: usize) -> usize {
        let mut executable = 0;
        assert_eq!(self.cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
        assert_eq!(self.cuGraphDestroy(graph), 0);
        executable
    }

    pub fn node_types(&self, graph: usize) -> Vec<u32> {
        let mut count = 0;
        assert_eq!(self.cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count), 0);
        let mut nodes = vec![1; count + 1];
        let mut room = count + 1;
        assert_eq!(self.cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut room), 0);
        assert_eq!((room, nodes.pop()), (count, Some(0)));
        let kind = |node| {
            let mut kind = u32::MAX;
            assert_eq!(self.cuGraphNodeGetType(node, &mut kind), 0);
            kind
        };
        nodes.into_iter().map(kind).collect()
    }

    pub fn status(&self, stream: usize) -> u32 {
        let mut status = u32::MAX;
        assert_eq!(self.cuStreamIsCapturing(stream, &mut status), 0);
        status
    }
}

pub fn count(first: u32) -> Vec<u32> {
    (first..first + 32).collect()
}

/// `(in[i] + 5) * 2` by two kernels and a copy to `out`, as an executable graph.
pub fn add_double_copy(driver: &Driver, stream: usize, input: u64, out: u64) -> usize {
    let (add, double, middle) = (driver.kernel("add"), driver.kernel("double"), driver.words(0));
    driver.begin(stream);
    assert_eq!(driver.status(stream), 1);
    let params: [&[u8]; 3] = [&input.to_le_bytes(), &middle.to_le_bytes(), &5u32.to_le_bytes()];
    assert_eq!(driver.launch(add, 32, stream, &params), 0);
    assert_eq!(driver.launch(double, 32, stream, &[&middle.to_le_bytes()]), 0);
    assert_eq!(driver.cuMemcpyDtoDAsync_v2(out, middle, 128, stream), 0);
    let graph = driver.end(stream);
    assert_eq!(driver.status(stream), 0);
    assert_eq!(driver.node_types(graph), [0, 0, 1]);
    driver.instantiate(graph)
}
