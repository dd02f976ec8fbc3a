//! Kernels for Hopper (sm_90a).

mod asm;
pub(crate) mod mla_decode;
