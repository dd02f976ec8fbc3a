//! Kernels for Hopper (sm_90a).

pub(crate) mod mla_decode;
