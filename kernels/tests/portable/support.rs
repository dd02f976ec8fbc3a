//! Devices, buffers and random inputs.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

use cubecl::prelude::*;
use cubecl::server::Handle;
use mla_kernels::Runtime;

/// Runs a test on every device that is present: wgpu and cuda, as far as this build has them and `MLA_SKIP` does not name
/// them. Says which.
pub fn for_each_client(test: impl Fn(&Client)) {
    let runtimes: &[Runtime] = &[
        #[cfg(feature = "wgpu")]
        Runtime::Wgpu,
        #[cfg(feature = "cuda")]
        Runtime::Cuda(0),
    ];
    let named = |variable: &str, name: &str| {
        std::env::var(variable).is_ok_and(|list| list.split(',').any(|it| name.starts_with(it) && !it.is_empty()))
    };
    for runtime in runtimes {
        let name = format!("{runtime:?}").to_lowercase();
        if named("MLA_SKIP", &name) {
            continue;
        }
        match runtime.open() {
            Ok(device) => {
                eprintln!("device: {name}");
                test(&device.client());
            }
            Err(error) => {
                assert!(!named("MLA_REQUIRE", &name), "no {name}: {error}");
                skip(format_args!("no {name}: {error}"));
            }
        }
    }
}

/// Says that a case is not run on a device, and why. `MLA_SKIPPED` names a file that gets a line for each, for whoever counts them
/// (`tools/part.sh`).
pub fn skip(why: impl Display) {
    eprintln!("skipped: {why}");
    if let Some(file) = std::env::var_os("MLA_SKIPPED") {
        let thread = std::thread::current();
        let line = format!("{}\tkernels\t{why}\n", thread.name().unwrap_or("a test"));
        let mut file =
            OpenOptions::new().create(true).append(true).open(file).expect("the file that MLA_SKIPPED names");
        // In one piece: other tests write, too.
        file.write_all(line.as_bytes()).expect("a line");
    }
}

/// A buffer with these values.
pub fn upload<T: CubeElement>(client: &Client, values: &[T]) -> Handle {
    client.create_from_slice(T::as_bytes(values))
}

/// The argument of a launch for a buffer of `len` elements.
pub fn arg(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: every caller passes the number of elements that the buffer was made with.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// The values of a buffer.
pub fn read<T: CubeElement>(client: &Client, handle: Handle) -> Vec<T> {
    let bytes = client.read_one(handle).expect("reads back");
    T::from_bytes(&bytes).to_vec()
}

/// Pseudo-random numbers in -1 .. 1.
pub fn random(seed: u32, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
