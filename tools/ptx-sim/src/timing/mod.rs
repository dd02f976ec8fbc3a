//! How fast a GPU's units are: what the estimate of a launch's time is made with (see `exec/time`).
mod gpus;

pub use gpus::{B200, H200};

/// Rates and latencies of a GPU, in cycles of a multiprocessor's clock. [`gpus`](self) says where each figure is from.
#[derive(Debug, Clone, PartialEq)]
pub struct Rates {
    /// The GPU.
    pub name: &'static str,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The clock under a load of matrix products, in GHz.
    pub clock_ghz: f64,
    /// Bytes of main memory in a second.
    pub memory_bandwidth: f64,
    /// Bytes from L2 in a cycle, all multiprocessors together.
    pub l2_bytes: f64,
    /// Results of 32 lanes and more in a cycle of a multiprocessor.
    pub lanes: Lanes,
    /// From an instruction's issue to its result.
    pub latency: Latency,
    /// Bytes of shared memory in a cycle.
    pub shared_bytes: f64,
    /// Bytes that a multiprocessor can get from, or give to, L2 in a cycle.
    pub port_bytes: f64,
    /// Multiply-adds of 16-bit factors in a cycle.
    pub products: f64,
    /// What part of that `mma.sync` reaches.
    pub synchronous_products: f64,
    /// Rows of a product in one CTA below which its rate falls.
    pub product_rows: f64,
    /// Bytes of tensor memory in a cycle of a warp.
    pub tensor_memory_bytes: f64,
    /// Bytes that loads of a multiprocessor get in a cycle. Part of a launch rather than of a GPU: how many share the memory.
    pub load_bytes: f64,
    /// Likewise of stores.
    pub store_bytes: f64,
}

/// Results in a cycle of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lanes {
    /// f32 addition, multiplication, fused multiply-add; multiplication of integers runs there, too, at half the rate.
    pub float: f64,
    /// Integer addition, logic, shifts, comparisons, selection.
    pub integer: f64,
    /// Exponential, logarithm, reciprocal, square roots.
    pub special: f64,
    /// Conversions between types.
    pub conversion: f64,
    /// Shuffles.
    pub shuffle: f64,
    /// Votes, matches, reductions of a warp; counts of bits.
    pub slow: f64,
    /// f64.
    pub double: f64,
}

/// Cycles from an instruction's issue to its result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// Arithmetic.
    pub arithmetic: f64,
    /// What [`Lanes::special`] and [`Lanes::conversion`] count.
    pub special: f64,
    /// Shared memory, mbarriers, shuffles.
    pub shared: f64,
    /// L1.
    pub l1: f64,
    /// L2.
    pub l2: f64,
    /// Main memory.
    pub memory: f64,
    /// What a bulk copy takes longer than a load.
    pub bulk: f64,
    /// `mma.sync`.
    pub product: f64,
    /// Tensor memory.
    pub tensor_memory: f64,
}

impl Rates {
    /// The GPU where `active` multiprocessors load at a time, each byte of main memory `times` times.
    pub fn shared_by(&self, active: usize, times: f64) -> Self {
        let active = active.max(1) as f64;
        let memory = self.memory_bandwidth / (self.clock_ghz * 1e9) / active * times;
        let store_bytes = self.port_bytes.min(self.l2_bytes / active);
        Self { load_bytes: store_bytes.min(memory), store_bytes, ..self.clone() }
    }

    /// Cycles as microseconds.
    pub fn microseconds(&self, cycles: f64) -> f64 {
        cycles / (self.clock_ghz * 1e3)
    }
}
