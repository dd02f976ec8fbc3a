//! A small kernel for each family of instructions, run on a Hopper GPU where there is one.
//!
//! With the feature `offline` and a CUDA toolkit in `CUDA_PATH` the same kernels are compiled without a GPU.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;

use super::tma::tiled_map;
use crate::Runtime;

mod copies;
mod gemm;
mod matrices;
mod products;
mod sync;

/// Runs a test on the first GPU, if that is a Hopper.
fn on_hopper(test: impl Fn(&Client)) {
    on_generation("sm90", "Hopper", true, test);
}

/// Runs a test on the first GPU, if that is a Blackwell of data centers. Where GPUs are required, others will do.
fn on_blackwell(test: impl Fn(&Client)) {
    on_generation("sm100", "Blackwell", false, test);
}

fn on_generation(generation: &str, name: &str, required: bool, test: impl Fn(&Client)) {
    let found = match Runtime::Cuda(0).open() {
        Ok(device) => {
            let client = device.client();
            let fingerprint = client.properties().identity.fingerprint.clone();
            if fingerprint.contains(generation) { Ok(client) } else { Err(format!("{fingerprint} is no {name}")) }
        }
        Err(error) => Err(error.to_string()),
    };
    match found {
        Ok(client) => test(&client),
        Err(why) => {
            let requirements = std::env::var("MLA_REQUIRE").unwrap_or_default();
            assert!(!required || !requirements.split(',').any(|it| it == "cuda"), "{why}");
            eprintln!("skipped: {why}");
        }
    }
}

fn upload<T: CubeElement>(client: &Client, values: &[T]) -> Handle {
    client.create_from_slice(T::as_bytes(values))
}

fn arg(buffer: &Handle, len: usize) -> BufferArg {
    // SAFETY: every caller passes the number of elements that the buffer was made with.
    unsafe { BufferArg::from_raw_parts(buffer.clone(), len) }
}

fn download<T: CubeElement>(client: &Client, buffer: Handle) -> Vec<T> {
    T::from_bytes(&client.read_one(buffer).expect("reads back")).to_vec()
}

/// Different finite numbers, as far as bf16 has them: their bits are 0, 1, ..
fn numbers(count: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_bits(i as u16 & 0x3fff)).collect()
}

/// Pseudo-random multiples of 1/8 in -2 .. 2, which bf16 and f16 have.
fn random(seed: u32, count: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 27) as f32 / 8.0 - 2.0
    };
    (0..count).map(|_| next()).collect()
}

/// The map of a packed tensor with swizzled tiles.
fn map(buffer: &Handle, shape: &[usize], tile: &[usize], elem: FloatKind) -> TensorMapArg<Tiled> {
    let strides: Vec<_> = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
    // SAFETY: every caller passes the shape that the buffer was made with.
    unsafe { tiled_map(buffer.clone().binding(), shape, &strides, tile, ElemType::Float(elem), TensorMapSwizzle::B128) }
}

/// Where number `at` of a tile of 64 columns lies with swizzle.
fn swizzled(at: usize) -> usize {
    let (row, column) = (at / 64, at % 64);
    row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8
}

/// A kernel for Hopper alone.
#[cfg(feature = "offline")]
fn sm90_entry<K: CubeKernel>(
    name: impl Into<String>,
    form: impl Fn(std::sync::Arc<DeviceProperties>, std::sync::Arc<TargetProperties>) -> K + Send + Sync + 'static,
) -> crate::offline::Entry {
    crate::offline::Entry::new(name, form).on(|arch| arch == crate::offline::Arch::Sm90a).unchecked()
}

/// All the kernels of these tests compile without spills, and without a warning that matrix products are serialised.
#[cfg(feature = "offline")]
#[test]
fn the_kernels_compile() {
    use crate::offline::{Arch, Toolchain};
    let Some(root) = std::env::var_os("CUDA_PATH") else {
        eprintln!("skipped: CUDA_PATH is not set");
        return;
    };
    let toolchain = match Toolchain::open(root.as_ref()) {
        Ok(toolchain) => toolchain,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    let folder = std::env::temp_dir().join("offline-ptx");
    let mut failures = Vec::new();
    let entries = [copies::offline(), gemm::offline(), matrices::offline(), products::offline(), sync::offline()];
    for entry in entries.into_iter().flatten() {
        let arch = if entry.archs().contains(&Arch::Sm90a) { Arch::Sm90a } else { Arch::Sm100a };
        match entry.compile(arch, &toolchain, &folder) {
            Ok(report) => {
                eprintln!("{:32} {report:?}", entry.name());
                if report.spill_bytes > 0 || !report.warnings.is_empty() {
                    failures.push(entry.name().to_string());
                }
            }
            Err(why) => failures.push(format!("{}: {why}", entry.name())),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
