//! What the tables of products choose, and other choices in their place: for programs that measure whether the tables are right.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "_gpu")]
use {
    burn::backend::DispatchDevice,
    mla_kernels::linear::{self, Choice, Forced},
    std::sync::atomic::{AtomicUsize, Ordering},
};

use super::LinearProblem;
use crate::path::Path;

/// An implementation of a product, and how it divides the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearChoice {
    /// Which one.
    pub path: Path,
    /// How a kernel divides it.
    #[cfg(feature = "_gpu")]
    kernel: Option<Choice>,
}

impl LinearChoice {
    fn of(path: Path) -> Self {
        Self {
            path,
            #[cfg(feature = "_gpu")]
            kernel: None,
        }
    }

    /// Whether another one has tiles of the same size.
    pub fn has_tiles_of(&self, other: &Self) -> bool {
        #[cfg(feature = "_gpu")]
        let tokens = |choice: &Self| choice.kernel.map(|kernel| (kernel.tokens, kernel.is_tiled()));
        #[cfg(not(feature = "_gpu"))]
        let tokens = |_: &Self| 0;
        self.path == other.path && tokens(self) == tokens(other)
    }
}

impl fmt::Display for LinearChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        #[cfg(feature = "_gpu")]
        if let Some(kernel) = self.kernel {
            write!(f, " {kernel}")?;
        }
        Ok(())
    }
}

#[cfg(feature = "_gpu")]
impl From<Choice> for LinearChoice {
    fn from(kernel: Choice) -> Self {
        Self { path: kernel.path.into(), kernel: Some(kernel) }
    }
}

/// What computes a product.
pub fn linear_choice(problem: &LinearProblem, device: &Device) -> LinearChoice {
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(cube) = device.as_dispatch() {
        return match problem.has_kernel(device) {
            true => linear::choose(&cube.client(), &problem.sizes()).into(),
            false => LinearChoice::of(Path::Matmul),
        };
    }
    let _ = (problem, device);
    LinearChoice::of(Path::Reference)
}

/// All that could compute it on a device, that of the table first.
pub fn linear_choices(problem: &LinearProblem, device: &Device) -> Vec<LinearChoice> {
    let own = linear_choice(problem, device);
    #[cfg(feature = "_gpu")]
    if let DispatchDevice::Cube(cube) = device.as_dispatch() {
        let mut all: Vec<LinearChoice> =
            linear::choices(&cube.client(), &problem.sizes()).into_iter().map(LinearChoice::from).collect();
        if !problem.is_of_experts() {
            all.push(LinearChoice::of(Path::Matmul));
        }
        all.retain(|choice| *choice != own);
        all.insert(0, own);
        return all;
    }
    vec![own]
}

/// Where none is forced; otherwise 1, and the place in [`Path::ALL`].
#[cfg(feature = "_gpu")]
static FORCED: AtomicUsize = AtomicUsize::new(0);

/// As long as it lives, all products of the program are computed so, where they can be. There is one at a time.
#[derive(Debug)]
pub struct ForcedChoice {
    #[cfg(feature = "_gpu")]
    _kernel: Option<Forced>,
}

impl ForcedChoice {
    /// Begins.
    pub fn new(choice: LinearChoice) -> Self {
        #[cfg(feature = "_gpu")]
        {
            let place = Path::ALL.into_iter().position(|known| known == choice.path).unwrap_or_default();
            FORCED.store(1 + place, Ordering::Release);
            Self { _kernel: choice.kernel.map(Forced::new) }
        }
        #[cfg(not(feature = "_gpu"))]
        {
            let _ = choice;
            Self {}
        }
    }
}

impl Drop for ForcedChoice {
    fn drop(&mut self) {
        #[cfg(feature = "_gpu")]
        FORCED.store(0, Ordering::Release);
    }
}

/// The implementation that is forced.
#[cfg(feature = "_gpu")]
pub(super) fn forced() -> Option<Path> {
    Path::ALL.get(FORCED.load(Ordering::Acquire).checked_sub(1)?).copied()
}

/// Bytes of the scratch of dequantised experts at most, unless [`ForcedScratch`] says otherwise: a few hundred megabytes are
/// enough experts for the launches to be few.
#[cfg(feature = "_gpu")]
const SCRATCH_BYTES: usize = 1 << 30;

/// That of a [`ForcedScratch`]; 0 where there is none.
#[cfg(feature = "_gpu")]
static FORCED_SCRATCH: AtomicUsize = AtomicUsize::new(0);

/// As long as it lives, the scratch of dequantised experts has so many bytes at most, or one expert. There is one at a time.
#[derive(Debug)]
pub struct ForcedScratch(());

impl ForcedScratch {
    /// Begins.
    pub fn new(bytes: usize) -> Self {
        #[cfg(feature = "_gpu")]
        FORCED_SCRATCH.store(bytes.max(1), Ordering::Release);
        let _ = bytes;
        Self(())
    }
}

impl Drop for ForcedScratch {
    fn drop(&mut self) {
        #[cfg(feature = "_gpu")]
        FORCED_SCRATCH.store(0, Ordering::Release);
    }
}

/// Bytes of the scratch of dequantised experts at most.
#[cfg(feature = "_gpu")]
pub(crate) fn scratch_bytes() -> usize {
    match FORCED_SCRATCH.load(Ordering::Acquire) {
        0 => SCRATCH_BYTES,
        bytes => bytes,
    }
}
