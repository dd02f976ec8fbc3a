//! Kernels for NVIDIA GPUs from sm_80 on: matrix instructions, and asynchronous copies in groups.

pub(crate) mod lightning_index;
pub(crate) mod linear;
