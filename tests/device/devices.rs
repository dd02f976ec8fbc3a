//! The devices of this machine that the tests run on.
//!
//! Flex is always there; the features `wgpu` and `cuda` add one device each. An absent one is skipped, and says so,
//! unless `MLA_REQUIRE` (a comma-separated list, e.g. `wgpu,cuda`) names it: then its absence is a failure, and so is a
//! wgpu that has fallen back to OpenGL. `lavapipe` in the list: wgpu, on Mesa's Vulkan driver for the CPU; `simulated`:
//! cuda, on a simulated GPU. One that `MLA_SKIP` names is left out. Cases that a device does not run call [`skip`].

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use burn::tensor::{DType, Device, Tensor};

/// Float types of the operations.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Runs a test on every device that is present.
pub fn for_each_device(test: impl Fn(&Device)) {
    for (name, device) in present() {
        eprintln!("device: {name}");
        test(device);
    }
}

/// GPUs that wait for each other are used by one test at a time: two could each have one of them.
pub fn alone(device: &Device) -> Option<MutexGuard<'static, ()>> {
    static GPUS: Mutex<()> = Mutex::new(());
    is_cuda(device).then(|| GPUS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs a test on every device, with every float type that the device can compute with.
pub fn for_each_dtype(test: impl Fn(&Device, DType)) {
    for_each_device(|device| {
        for dtype in FLOATS {
            if supports(device, dtype) {
                test(device, dtype);
            }
        }
    });
}

/// Whether the device can compute with the type; says so where it cannot.
pub fn supports(device: &Device, dtype: DType) -> bool {
    let supported = device.supports_dtype(dtype);
    if !supported {
        skip(device, format_args!("no {dtype:?}"));
    }
    supported
}

/// Says that a case, or the rest of it, is not run on a device, and why. `MLA_SKIPPED` names a file that gets a line for each, for
/// whoever counts them (`tools/part.sh`).
pub fn skip(device: &Device, why: impl Display) {
    let name = present().iter().find(|(_, present)| present == device).map_or("device", |(name, _)| name);
    eprintln!("skipped: {why} ({name})");
    if let Some(file) = std::env::var_os("MLA_SKIPPED") {
        note(file.as_ref(), name, why);
    }
}

/// Adds a line: the test, the device, the reason.
fn note(file: &Path, device: &str, why: impl Display) {
    let thread = std::thread::current();
    let line = format!("{}\t{device}\t{why}\n", thread.name().unwrap_or("a test"));
    let mut file = OpenOptions::new().create(true).append(true).open(file).expect("the file that MLA_SKIPPED names");
    // In one piece: other tests write, too.
    file.write_all(line.as_bytes()).expect("a line");
}

#[test]
fn skipped_cases_are_counted() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    for why in ["no BF16", "takes minutes"] {
        note(file.path(), "wgpu", why);
    }
    let lines = std::fs::read_to_string(file.path()).expect("lines");
    let name = "devices::skipped_cases_are_counted";
    assert_eq!(lines, format!("{name}\twgpu\tno BF16\n{name}\twgpu\ttakes minutes\n"));
}

/// Whether the device is wgpu's. On a machine without a GPU that is the CPU by way of Vulkan.
pub fn is_wgpu(device: &Device) -> bool {
    present().iter().any(|(name, present)| *name == "wgpu" && present == device)
}

/// Whether the device is CUDA's.
pub fn is_cuda(device: &Device) -> bool {
    present().iter().any(|(name, present)| *name == "cuda" && present == device)
}

/// Whether the device is a CUDA GPU that is simulated on the CPU: `simulated` in `MLA_REQUIRE`, as `tools/simulate.sh` says.
pub fn is_simulated(device: &Device) -> bool {
    is_cuda(device) && required("simulated")
}

/// Whether the device is the CPU, or may be, that runs kernels for GPUs. Tests that would take minutes there run a part of
/// their cases, and say which.
pub fn is_slow(device: &Device) -> bool {
    is_wgpu(device) || is_simulated(device)
}

/// Whether the device is an NVIDIA GPU of the Hopper generation.
pub fn is_hopper(device: &Device) -> bool {
    is_generation(device, "ptx_sm90")
}

/// Whether the device is an NVIDIA GPU of the Blackwell generation, one for data centers.
pub fn is_blackwell(device: &Device) -> bool {
    is_generation(device, "ptx_sm100")
}

/// Whether the device has the kernel for many rows with the matrix instructions of a warp: NVIDIA GPUs from sm_80 on, but Hopper,
/// which has one of its own.
pub fn has_tiles(device: &Device) -> bool {
    is_cuda(device) && !is_hopper(device) && !is_generation(device, "ptx_sm75")
}

fn is_generation(device: &Device, fingerprint: &str) -> bool {
    #[cfg(feature = "cuda")]
    if let burn::backend::DispatchDevice::Cube(cube) = device.as_dispatch() {
        return is_cuda(device) && cube.client().properties().identity.fingerprint == fingerprint;
    }
    let _ = (device, fingerprint);
    false
}

/// Whether `MLA_REQUIRE` names this.
fn required(name: &str) -> bool {
    named("MLA_REQUIRE", name)
}

/// Whether a list in the environment names this.
fn named(variable: &str, name: &str) -> bool {
    std::env::var(variable).is_ok_and(|list| list.split(',').any(|it| it.trim() == name))
}

fn present() -> &'static [(&'static str, Device)] {
    static PRESENT: OnceLock<Vec<(&str, Device)>> = OnceLock::new();
    PRESENT.get_or_init(|| {
        let built = candidates();
        for name in ["wgpu", "cuda"].into_iter().filter(|name| required(name)) {
            assert!(built.iter().any(|(built, _)| *built == name), "MLA_REQUIRE names {name}, a feature not built in");
        }
        let mut present = Vec::new();
        for (name, open) in built.into_iter().filter(|(name, _)| !named("MLA_SKIP", name)) {
            match std::panic::catch_unwind(|| works(open())) {
                Ok(device) => present.push((name, device)),
                Err(_) if required(name) => panic!("MLA_REQUIRE: no {name} adapter"),
                Err(_) => eprintln!("skipped: no {name} adapter"),
            }
        }
        present
    })
}

/// Opens a device.
type Open = fn() -> Device;

/// The devices of this build. Opening one that is absent panics, at the latest when it computes.
fn candidates() -> Vec<(&'static str, Open)> {
    vec![
        ("flex", Device::flex),
        #[cfg(feature = "wgpu")]
        ("wgpu", wgpu::open),
        #[cfg(feature = "cuda")]
        ("cuda", || Device::cuda(0)),
    ]
}

fn works(device: Device) -> Device {
    let two = Tensor::<1>::ones([1], (&device, DType::F32)) + 1.0;
    assert_eq!(two.try_into_vec_as::<f32>().expect("reads back"), [2.0]);
    device
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use std::sync::OnceLock;

    use burn::tensor::Device;

    use super::{present, required};

    /// Graphics interface and name of the adapter.
    static ADAPTER: OnceLock<(String, String)> = OnceLock::new();

    /// Opens the device as its first use would, and keeps which adapter that was: the device does not say.
    pub fn open() -> Device {
        let (device, setup) = Device::wgpu_options().init_with_setup().expect("an adapter");
        ADAPTER.get_or_init(|| (format!("{:?}", setup.backend), setup.adapter.get_info().name));
        device
    }

    /// Where no Vulkan driver is installed, wgpu takes OpenGL without a word, which lacks half of what is to be tested.
    #[test]
    fn wgpu_is_not_the_opengl_fallback() {
        let (wgpu, lavapipe) = (required("wgpu"), required("lavapipe"));
        present();
        let Some((api, name)) = ADAPTER.get() else {
            assert!(!lavapipe, "MLA_REQUIRE: no lavapipe");
            eprintln!("skipped: no wgpu adapter");
            return;
        };
        eprintln!("wgpu: {name} by way of {api}");
        if wgpu || lavapipe {
            assert!(["Vulkan", "Metal", "Dx12"].contains(&api.as_str()), "wgpu has fallen back to {api} ({name})");
        }
        if lavapipe {
            assert!(api == "Vulkan" && name.contains("llvmpipe"), "expected lavapipe, not {name} by way of {api}");
        }
    }
}
