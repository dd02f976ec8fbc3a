//! The devices of this machine that the tests run on.
//!
//! Flex is always there; the features `wgpu` and `cuda` add one device each. An absent one is skipped, and says so,
//! unless `MLA_REQUIRE` (a comma-separated list, e.g. `wgpu,cuda`) names it: then its absence is a failure.

use std::sync::OnceLock;

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
        eprintln!("skipped: no {dtype:?} on {device:?}");
    }
    supported
}

fn present() -> &'static [(&'static str, Device)] {
    static PRESENT: OnceLock<Vec<(&str, Device)>> = OnceLock::new();
    PRESENT.get_or_init(|| {
        let required = std::env::var("MLA_REQUIRE").unwrap_or_default();
        let built = candidates();
        for name in required.split(',').map(str::trim).filter(|name| ["wgpu", "cuda"].contains(name)) {
            assert!(built.iter().any(|(built, _)| *built == name), "MLA_REQUIRE names {name}, a feature not built in");
        }
        let mut present = Vec::new();
        for (name, open) in built {
            match std::panic::catch_unwind(|| works(open())) {
                Ok(device) => present.push((name, device)),
                Err(_) if required.split(',').any(|it| it.trim() == name) => panic!("MLA_REQUIRE: no {name} adapter"),
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
        ("wgpu", || Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cuda")]
        ("cuda", || Device::cuda(0)),
    ]
}

fn works(device: Device) -> Device {
    let two = Tensor::<1>::ones([1], (&device, DType::F32)) + 1.0;
    assert_eq!(two.try_into_vec_as::<f32>().expect("reads back"), [2.0]);
    device
}
