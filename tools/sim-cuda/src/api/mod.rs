//! The functions of the driver API that CubeCL's CUDA runtime calls, by theme. Their types are those of `cuda.h`.
mod device;
mod graph;
mod launch;
mod memory;
mod stream;
mod tensor_map;
