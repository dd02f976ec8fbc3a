//! Compiles the kernels for NVIDIA GPUs on a machine that has none: `#[cube]` function to CUDA C++ as CubeCL's CUDA runtime
//! would do it, NVRTC to PTX, ptxas to machine code, whose registers, spills, shared memory and instructions are counted and
//! held against [`Limits`]. Each exchange of a warp's lanes has to name all of them (`masks.rs`), which have to come together to it
//! (`convergence.rs`).
//!
//! Each module of kernels lists the forms in which DeepSeek's models launch them, in a function `offline()`. A kernel needs
//! `create_dummy_kernel` among the arguments of `#[cube]`, which adds a function that makes it without a device.

mod compile;
mod convergence;
mod kernels;
mod limits;
mod masks;
mod report;
mod sass;
mod toolchain;
mod values;

pub(crate) use cubecl::ir::FloatKind;

pub use compile::Arch;
#[cfg(test)]
pub(crate) use kernels::handle;
pub use kernels::{Entry, entries};
pub(crate) use kernels::{FLOATS, buffer, form};
pub use limits::Limits;
pub use report::{OPCODES, Report};
pub use toolchain::{Toolchain, ToolchainError};
