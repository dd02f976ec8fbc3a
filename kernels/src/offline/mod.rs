//! Compiles the kernels for NVIDIA GPUs on a machine that has none: `#[cube]` function to CUDA C++, NVRTC to PTX, ptxas to
//! machine code, whose registers, spills, shared memory and instructions are counted.

mod compile;
mod kernels;
mod toolchain;

pub use compile::{Arch, Report};
pub(crate) use kernels::buffer;
#[cfg(test)]
pub(crate) use kernels::handle;
pub use kernels::{Entry, entries};
pub use toolchain::{Toolchain, ToolchainError};
