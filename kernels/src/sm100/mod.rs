//! Kernels for NVIDIA's Blackwell generation of data centers (compute capability 10.0).

pub(crate) mod mla_decode;
