//! Which implementation runs, and why.

#[cfg(feature = "_gpu")]
use burn::backend::{DispatchDevice, cubecl::dtype_to_elem_type};
use burn::tensor::Device;
#[cfg(feature = "_gpu")]
use mla_kernels::mla_decode::{DecodeKernel, DecodeSizes, available};

use super::MlaDecodeProblem;
use crate::{Path, PathChoice};

/// Which implementation of [`mla_decode`](crate::mla_decode) runs for a problem on a device, where the options name none.
pub fn explain_path(problem: &MlaDecodeProblem, device: &Device) -> PathChoice {
    let path = available_paths(problem, device).first().copied().unwrap_or(Path::Portable);
    let what = match path {
        Path::Reference => {
            return PathChoice { path, reason: format!("tensor operations, the implementation on {device:?}") };
        }
        Path::Portable => "no matrix instructions",
        Path::PortableMma => "matrix instructions",
        Path::Sm90 => "TMA and wgmma",
        Path::Sm100 => "TMA and tcgen05",
    };
    PathChoice { path, reason: format!("{what} for {} on {device:?}", words(problem)) }
}

/// The implementations of [`mla_decode`](crate::mla_decode) that a device has for a problem, the fastest first.
pub fn available_paths(problem: &MlaDecodeProblem, device: &Device) -> Vec<Path> {
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(cube) = device.as_dispatch() {
        let &MlaDecodeProblem { batch, query_len, heads, key_width, value_width, page_size, dtype } = problem;
        let elem = dtype_to_elem_type(dtype);
        // The sizes of cache and plan decide nothing here.
        let (pages, max_pages, cubes, capacity, causal) = (1, 1, 1, 1, true);
        let sizes = DecodeSizes {
            batch,
            query_len,
            heads,
            key_width,
            value_width,
            pages,
            page_size,
            max_pages,
            cubes,
            capacity,
            causal,
            elem,
        };
        let client = cube.client();
        let available = available(&client, &sizes);
        return Path::ALL
            .into_iter()
            .rev()
            .filter(|&path| available.iter().any(|it| Some(it.path) == kernel(path)))
            .collect();
    }
    let _ = (problem, device);
    vec![Path::Reference]
}

/// What decides the path, for a reader.
pub(super) fn words(problem: &MlaDecodeProblem) -> String {
    let MlaDecodeProblem { dtype, key_width, value_width, page_size, .. } = problem;
    format!("{dtype:?}, widths of {key_width} and {value_width} and pages of {page_size}")
}

/// The kernel that a path is; none for [`Path::Reference`].
#[cfg(feature = "_gpu")]
pub(super) fn kernel(path: Path) -> Option<DecodeKernel> {
    match path {
        Path::Reference => None,
        Path::Portable => Some(DecodeKernel::Plain),
        Path::PortableMma => Some(DecodeKernel::Mma),
        Path::Sm90 => Some(DecodeKernel::Sm90),
        Path::Sm100 => Some(DecodeKernel::Sm100),
    }
}
