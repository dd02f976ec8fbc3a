//! What the simulated device says of itself.
use crate::config::Config;

/// The limits of a compute capability (CUDA C++ Programming Guide, table of technical specifications).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Shared memory of a multiprocessor.
    pub shared: u32,
    /// Shared memory that a CTA can have, if it asks.
    pub shared_optin: u32,
    /// Resident threads of a multiprocessor.
    pub threads: u32,
    /// Resident CTAs of a multiprocessor.
    pub blocks: u32,
}

/// Shared memory that a CTA can have without asking.
pub const SHARED: u32 = 48 << 10;

impl Limits {
    /// The limits of an architecture.
    pub fn of(arch: u32) -> Self {
        let (shared, shared_optin, threads, blocks) = match arch {
            75 => (64, 64, 1024, 16),
            80 => (164, 163, 2048, 32),
            _ => (228, 227, 2048, 32),
        };
        Self { shared: shared << 10, shared_optin: shared_optin << 10, threads, blocks }
    }
}

/// The value of a `CUdevice_attribute`; none for those that CubeCL does not query.
pub fn attribute(config: &Config, attribute: u32) -> Option<i32> {
    let limits = Limits::of(config.arch);
    let value = match attribute {
        // Threads of a block, its extents, those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX as u32,
        6 | 7 => 65535,
        8 => SHARED,
        // Constant memory.
        9 => 64 << 10,
        // Warp size.
        10 => 32,
        // Registers of a block and of a multiprocessor.
        12 | 82 => 64 << 10,
        // Clock rate in kHz.
        13 => 1_000_000,
        16 => config.multiprocessors,
        // Unified addressing.
        41 => 1,
        // Memory clock in kHz, bus width in bits, L2 cache.
        36 => 1_000_000,
        37 => 1024,
        38 => 4 << 20,
        39 => limits.threads,
        75 => config.arch / 10,
        76 => config.arch % 10,
        // Priorities of streams are accepted.
        78 => 1,
        81 => limits.shared,
        97 => limits.shared_optin,
        106 => limits.blocks,
        // Shared memory that the system keeps of each block.
        111 => {
            if config.arch >= 80 {
                1024
            } else {
                0
            }
        }
        // Stream-ordered allocation.
        115 => 1,
        // Clusters.
        120 => u32::from(config.arch >= 90),
        _ => return None,
    };
    Some(value as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_splits_into_major_and_minor() {
        for (arch, major, minor, shared) in [(75, 7, 5, 64), (80, 8, 0, 163), (90, 9, 0, 227), (100, 10, 0, 227)] {
            let adversary = Default::default();
            let (full, forward, trace) = (false, None, None);
            let config = Config {
                arch,
                devices: 1,
                multiprocessors: 4,
                memory: 1 << 30,
                full,
                seed: 1,
                adversary,
                forward,
                trace,
            };
            assert_eq!([75, 76, 97, 16].map(|a| attribute(&config, a)), [major, minor, shared << 10, 4].map(Some));
        }
    }
}
