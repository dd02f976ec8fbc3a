//! A CUDA driver whose GPU is the simulator `ptx-sim`.
//!
//! The library has the functions of `libcuda.so` that CubeCL's CUDA runtime looks up, so that a program built for CUDA
//! runs its kernels on the CPU, unchanged. Or it passes all calls on to a real driver, and records launches. The README
//! says how to use it.
mod api;
mod capture;
mod code;
mod config;
mod device;
mod driver;
mod empty;
mod forward;
mod gpu;
mod graph;
mod host;
mod module;
mod nvrtc;
mod peers;
mod real_graphs;
mod record;
mod replay;
mod report;
mod work;
