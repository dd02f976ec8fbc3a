//! What a launch did.

/// What a launch did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions that warps executed; each counts once for all of its lanes.
    pub warp_instructions: u64,
    /// Operations of matrix instructions; a multiply-add is two.
    pub matrix_flops: u64,
    /// Bytes that `tcgen05.ld`, `.st` and `.cp` moved to or from tensor memory.
    pub tensor_memory_bytes: u64,
    /// Warp instructions of the CTA that executed most.
    pub longest_cta: u64,
    /// With [`Launch::rates`](crate::Launch::rates) the time of the cluster that takes longest; this and the next four are 0 without.
    pub cycles: u64,
    /// Cycles that tensor cores would be busy at their full rate.
    pub tensor_cycles: u64,
    /// Cycles that shared memory is busy.
    pub shared_cycles: u64,
    /// Bytes from L2, by loads and copies.
    pub loaded_bytes: u64,
    /// Bytes to L2.
    pub stored_bytes: u64,
}

impl std::iter::Sum for Stats {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            warp_instructions: a.warp_instructions + b.warp_instructions,
            matrix_flops: a.matrix_flops + b.matrix_flops,
            tensor_memory_bytes: a.tensor_memory_bytes + b.tensor_memory_bytes,
            longest_cta: a.longest_cta.max(b.longest_cta),
            cycles: a.cycles.max(b.cycles),
            tensor_cycles: a.tensor_cycles + b.tensor_cycles,
            shared_cycles: a.shared_cycles + b.shared_cycles,
            loaded_bytes: a.loaded_bytes + b.loaded_bytes,
            stored_bytes: a.stored_bytes + b.stored_bytes,
        })
    }
}
