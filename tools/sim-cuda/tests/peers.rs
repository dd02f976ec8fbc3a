//! Several devices: whose memory kernels may access, and launches that wait for one another.
mod common;
use common::Driver;
use std::ffi::CString;
use std::sync::Once;

const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;
const ALREADY_ENABLED: u32 = 704;
const INVALID_CONTEXT: u32 = 201;
const INVALID_DEVICE: u32 = 101;

/// `meet` writes `mine + 1` with its flag to `to`, and waits until `from` has a flag, or for so many nanoseconds; what came with it
/// goes to `out`. `weak` writes without an order.
const PTX: &str = ".version 8.0\n.target sm_90a\n.address_size 64
.visible .entry meet(.param .u64 to, .param .u64 from, .param .u64 out, .param .u32 mine, .param .u64 patience) {
    .reg .b64 %rd<9>; .reg .b32 %r<5>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [to]; ld.param.u64 %rd2, [from]; ld.param.u64 %rd3, [out]; ld.param.u32 %r1, [mine];
    ld.param.u64 %rd7, [patience]; mov.u64 %rd5, %globaltimer; mov.u32 %r2, 1;
    mov.b64 %rd4, {%r1, %r2}; st.relaxed.sys.global.b64 [%rd1], %rd4;
again:
    ld.relaxed.sys.global.b64 %rd4, [%rd2]; mov.b64 {%r3, %r4}, %rd4; setp.eq.u32 %p1, %r4, 1; @%p1 bra came;
    mov.u64 %rd6, %globaltimer; sub.u64 %rd6, %rd6, %rd5; setp.lt.u64 %p2, %rd6, %rd7; @%p2 bra again;
came:
    st.global.u32 [%rd3], %r3; ret; }
.visible .entry weak(.param .u64 to) {
    .reg .b64 %rd<3>; .reg .b32 %r<3>;
    ld.param.u64 %rd1, [to]; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1; ret; }
";

/// A driver with two devices, and their contexts.
fn two() -> (Driver, [usize; 2]) {
    static SET: Once = Once::new();
    // SAFETY: every test does this first, and none reads the environment but the libraries that it loads afterwards.
    SET.call_once(|| unsafe { std::env::set_var("SIM_CUDA_DEVICES", "2") });
    let driver = Driver::new();
    let mut count = 0;
    assert_eq!((driver.cuDeviceGetCount(&mut count), count), (0, 2));
    let context = |device| {
        let mut context = 0;
        assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut context, device), 0);
        context
    };
    let contexts = [context(0), context(1)];
    (driver, contexts)
}

/// 8 bytes of zeros in the memory of the current device.
fn zeros(driver: &Driver) -> u64 {
    let mut address = 0;
    assert_eq!(driver.cuMemAlloc_v2(&mut address, 8), 0);
    assert_eq!(driver.cuMemsetD8Async(address, 0, 8, driver.stream()), 0);
    address
}

fn kernel(driver: &Driver, name: &str) -> usize {
    let (mut module, mut function) = (0, 0);
    let [text, name] = [PTX, name].map(|text| CString::new(text).unwrap());
    assert_eq!(driver.cuModuleLoadData(&mut module, text.as_ptr().cast()), 0);
    assert_eq!(driver.cuModuleGetFunction(&mut function, module, name.as_ptr()), 0);
    function
}

fn meet(driver: &Driver, [to, from, out]: [u64; 3], mine: u32, patience: u64) -> u32 {
    let [to, from, out, patience] = [to, from, out, patience].map(u64::to_le_bytes);
    driver.launch(kernel(driver, "meet"), 1, driver.stream(), &[&to, &from, &out, &mine.to_le_bytes(), &patience])
}

#[test]
fn a_thread_has_the_context_that_it_sets() {
    let (driver, contexts) = two();
    let mut current = 7;
    assert_eq!((driver.cuCtxGetCurrent(&mut current), current), (0, 0), "none at first");
    assert_eq!(driver.cuMemAlloc_v2(&mut 0, 8), INVALID_CONTEXT);
    assert_eq!(driver.cuCtxSetCurrent(contexts[1]), 0);
    assert_eq!((driver.cuCtxGetCurrent(&mut current), current), (0, contexts[1]));
    assert_eq!(driver.cuCtxSetCurrent(12), INVALID_CONTEXT);
    assert_eq!(driver.cuDevicePrimaryCtxRetain(&mut current, 2), INVALID_DEVICE);
    let mut can = [7; 2];
    assert_eq!(driver.cuDeviceCanAccessPeer(&mut can[0], 0, 1), 0);
    assert_eq!(driver.cuDeviceCanAccessPeer(&mut can[1], 1, 1), 0);
    assert_eq!(can, [1, 0]);
}

#[test]
fn memory_of_another_device_is_accessible_when_it_was_enabled() {
    let (driver, contexts) = two();
    assert_eq!(driver.cuCtxSetCurrent(contexts[1]), 0);
    let theirs = zeros(&driver);
    assert_eq!(driver.cuCtxSetCurrent(contexts[0]), 0);
    let own = zeros(&driver);
    assert_eq!(driver.cuCtxEnablePeerAccess(contexts[0], 0), INVALID_CONTEXT, "of its own");
    assert_eq!(driver.cuCtxEnablePeerAccess(contexts[1], 0), 0);
    assert_eq!(driver.cuCtxEnablePeerAccess(contexts[1], 0), ALREADY_ENABLED);
    assert_eq!(meet(&driver, [theirs, theirs, own], 5, 1 << 40), 0, "what it wrote there it reads there");
    // The other way it was not.
    assert_eq!(driver.cuCtxSetCurrent(contexts[1]), 0);
    assert_eq!(meet(&driver, [own, own, theirs], 5, 1 << 40), ILLEGAL_ADDRESS);
}

#[test]
fn accesses_of_several_devices_are_strong_ones_of_the_system() {
    let (driver, contexts) = two();
    assert_eq!(driver.cuCtxSetCurrent(contexts[1]), 0);
    let theirs = zeros(&driver);
    assert_eq!(driver.cuCtxSetCurrent(contexts[0]), 0);
    assert_eq!(driver.cuCtxEnablePeerAccess(contexts[1], 0), 0);
    let weak = || driver.launch(kernel(&driver, "weak"), 1, driver.stream(), &[&theirs.to_le_bytes()]);
    assert_eq!(weak(), LAUNCH_FAILED);
    // The other device goes on, and may do with its own memory what it likes as long as nobody else has been there.
    assert_eq!(driver.cuCtxSetCurrent(contexts[1]), 0);
    assert_eq!(weak(), 0);
}

#[test]
fn launches_of_two_devices_wait_for_each_other() {
    let (driver, contexts) = two();
    let mailboxes = contexts.map(|context| {
        assert_eq!(driver.cuCtxSetCurrent(context), 0);
        zeros(&driver)
    });
    let run = |rank: usize| {
        assert_eq!(driver.cuCtxSetCurrent(contexts[rank]), 0);
        assert_eq!(driver.cuCtxEnablePeerAccess(contexts[1 - rank], 0), 0);
        let out = zeros(&driver);
        assert_eq!(meet(&driver, [mailboxes[1 - rank], mailboxes[rank], out], 40 + rank as u32, 1 << 36), 0);
        let mut came = 0;
        assert_eq!(driver.cuMemcpyDtoH_v2(&mut came, out, 4), 0);
        came
    };
    let run = &run;
    let came = std::thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || run(rank))).map(|t| t.join().unwrap()));
    assert_eq!(came, [41, 40]);
}

/// Time passes while a kernel waits.
#[test]
fn a_launch_whose_partner_never_comes_ends() {
    let (driver, contexts) = two();
    assert_eq!(driver.cuCtxSetCurrent(contexts[0]), 0);
    let [to, from, out] = [zeros(&driver), zeros(&driver), zeros(&driver)];
    let start = std::time::Instant::now();
    assert_eq!(meet(&driver, [to, from, out], 3, 50_000_000), 0);
    assert!(start.elapsed().as_millis() >= 50);
}
