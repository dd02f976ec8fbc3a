//! The GPUs, and where each figure is from:
//!
//! - `[H100]` NVIDIA H100 Tensor Core GPU Architecture, whitepaper v1.04, "H100 SM architecture" and table 3: 4 tensor cores
//!   of 512 multiply-adds in f16, 1830 MHz with tensor cores at work, 1980 MHz without.
//! - `[guide]` CUDA C++ Best Practices Guide 13, "Throughput of Native Arithmetic Instructions", columns 9.0 and 10.0.
//! - `[Luo]` Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv:2402.13499, table IV (shared
//!   memory 29.0 cycles, L1 40.7), table VII (`mma.sync` 24.1 cycles, 62.9 %
//!   of the peak), table VIII (`wgmma` m64n256k16 128 cycles, above 95 % of the peak).
//! - `[Luo 2]` the same authors, Dissecting the NVIDIA Hopper Architecture through Microbenchmarking and Multiple Level
//!   Analysis, arXiv:2501.12084: L2 hits 258 cycles in the near half and 414 in the far one, misses 556 and 744; a copy by TMA
//!   takes 170 cycles more than a load. Pages lie in both halves, hence the means.
//! - `[Ampere]` Abdelkhalik et al., Demystifying the Nvidia Ampere Architecture through Microbenchmarking and
//!   Instruction-level Analysis, arXiv:2208.11174: 4 cycles for dependent arithmetic in f32, 18 for `ex2.approx` and
//!   conversions. No such table is known of Hopper or Blackwell.
//! - `[bench]` measured by this project on an H200, `kernels/README.md`: a copy has 4.28 TB/s, of 4.8 by the data
//!   sheet.
//! - `[FA4]` Zadouri et al., FlashAttention-4, section 2.2: B200 with 8192 operations (4096 multiply-adds) in a cycle of a
//!   multiprocessor, 128 bytes of shared memory and 16 exponentials in a cycle as on Hopper, 2.25 PFLOP/s at 1.85 GHz.
//! - `[B200]` NVIDIA Blackwell Architecture Technical Brief, table 3: 148 multiprocessors, 8 TB/s.
//! - `[TileSight]` Mo et al., TileSight, arXiv:2607.22432, table 3, measured: L2 9.2 TB/s of an H200 and 20.5 of a B200; of the B200's memory
//!   7.0 TB/s (of an H200's 4.2, where `[bench]` has 4.28).
//! - `[notes]` public notes on a B300: `tcgen05.ld` of 16 registers moves 57 bytes in a cycle of a warp.
//!
//! The port of a multiprocessor to L2 is taken to have 64 bytes, and tensor memory the latency of shared memory: no source
//! says either. What has no source of its own on Blackwell is Hopper's: latencies of arithmetic and memory.
use super::{Lanes, Latency, Rates};

const LANES: Lanes =
    // `[guide]`
    Lanes { float: 128.0, integer: 64.0, special: 16.0, conversion: 64.0, shuffle: 32.0, slow: 16.0, double: 64.0 };

const LATENCY: Latency = Latency {
    arithmetic: 4.0,
    special: 18.0,
    shared: 29.0,
    l1: 40.7,
    l2: 336.0,
    memory: 650.0,
    bulk: 170.0,
    product: 24.1,
    tensor_memory: 29.0,
};

/// H200 SXM.
pub const H200: Rates = Rates {
    name: "H200",
    multiprocessors: 132,
    clock_ghz: 1.83,
    memory_bandwidth: 4.28e12,
    l2_bytes: 9.2e12 / 1.83e9,
    lanes: LANES,
    latency: LATENCY,
    shared_bytes: 128.0,
    port_bytes: 64.0,
    products: 2048.0,
    synchronous_products: 0.629,
    product_rows: 64.0,
    tensor_memory_bytes: 0.0,
    load_bytes: 64.0,
    store_bytes: 64.0,
};

/// B200.
pub const B200: Rates = Rates {
    name: "B200",
    multiprocessors: 148,
    clock_ghz: 1.85,
    memory_bandwidth: 7.0e12,
    l2_bytes: 20.5e12 / 1.85e9,
    products: 4096.0,
    product_rows: 128.0,
    tensor_memory_bytes: 57.0,
    ..H200
};
