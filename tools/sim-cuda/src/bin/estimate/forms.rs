//! The kernels that decode, and how they divide their work.
use crate::shapes::Shape;
use ptx_sim::timing::{B200, H200, Rates};

/// Query rows of a CTA.
pub const ROWS: usize = 64;

/// A kernel that decodes, as the offline compiler calls it.
pub struct Form {
    pub name: &'static str,
    /// Threads and bytes of shared memory of a CTA.
    pub threads: u32,
    pub shared: u64,
    /// Keys that a tile load brings.
    pub box_keys: usize,
    /// Tiles of 64 channels that a load of a query brings.
    pub query_tiles: usize,
    /// CTAs of a cluster.
    pub ctas: usize,
    /// How often its CTAs load each byte of a block of keys, together.
    pub times: f64,
}

const HOPPER: Form = Form {
    name: "mla_decode.sm90.bf16.576.32.sm_90a",
    threads: 384,
    shared: 229_728,
    box_keys: 32,
    query_tiles: 9,
    ctas: 1,
    times: 1.0,
};

const SINGLE: Form = Form {
    name: "mla_decode.sm100.bf16.576.32.sm_100a",
    threads: 224,
    shared: 221_312,
    box_keys: 32,
    query_tiles: 9,
    ctas: 1,
    times: 1.0,
};

/// A cube of a pair loads its own keys with all channels and half of the channels of the others: 106,496 bytes of 147,456.
const PAIR: Form = Form {
    name: "mla_decode.sm100_pair.bf16.576.32.sm_100a",
    threads: 352,
    shared: 231_568,
    box_keys: 32,
    query_tiles: 1,
    ctas: 2,
    times: 2.0 * 106_496.0 / 147_456.0,
};

/// A GPU that decodes.
pub struct Gpu {
    pub rates: &'static Rates,
    /// For as many rows as a CTA has, and for more.
    few: &'static Form,
    many: &'static Form,
    /// Whether times were measured.
    pub measured: bool,
}

pub const HOPPER_GPU: Gpu = Gpu { rates: &H200, few: &HOPPER, many: &HOPPER, measured: true };
pub const BLACKWELL_GPU: Gpu = Gpu { rates: &B200, few: &SINGLE, many: &PAIR, measured: false };

impl Gpu {
    pub fn form(&self, shape: &Shape) -> &'static Form {
        if shape.rows() > ROWS { self.many } else { self.few }
    }

    /// Cubes of the plan (`mla_decode`, `parallel_cubes`).
    pub fn cubes(&self, shape: &Shape) -> usize {
        (self.rates.multiprocessors as usize / shape.rows().div_ceil(ROWS)).max(1)
    }
}

impl Form {
    /// Clusters that have the rows of a sequence.
    pub fn clusters(&self, shape: &Shape) -> usize {
        shape.rows().div_ceil(self.ctas * ROWS)
    }
}
