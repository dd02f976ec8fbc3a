//! Barriers with a number, for some of a cube's warps, and the cluster's barrier.
//!
//! `bar` and `barrier.cluster`, PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier" and
//! "barrier.cluster". A cube has 16 barriers; number 0 is the one of `sync_cube`. The number of threads is a multiple
//! of 32, and counts those that wait together with those that only arrive. All threads of a warp take part at once. A
//! barrier is ready for its next use as soon as it completes, but threads that arrive without waiting have to be kept
//! from arriving twice, by another barrier in the opposite direction.
//!
//! They order generic accesses among the threads. Where the asynchronous proxy is concerned, see
//! [`mod@crate::ptx::fence`].

use cubecl::prelude::*;

use super::read;

/// Waits until `threads` threads have come to barrier `id`: `bar.sync`.
#[cube]
pub(crate) fn sync(#[comptime] id: u32, #[comptime] threads: u32) {
    gpu_asm!(
        "bar.sync {id}, {threads};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`sync()`] with a number that is known at run time, such as one for each warpgroup. The kernel then takes all 16
/// barriers.
#[cube]
pub(crate) fn sync_at(id: u32, #[comptime] threads: u32) {
    gpu_asm!(
        "bar.sync {id}, {threads};",
        id = in(_) read::<u32>(id),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Arrives at barrier `id` without waiting: `bar.arrive`.
#[cube]
pub(crate) fn arrive(#[comptime] id: u32, #[comptime] threads: u32) {
    gpu_asm!(
        "bar.arrive {id}, {threads};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`arrive()`] with a number that is known at run time.
#[cube]
pub(crate) fn arrive_at(id: u32, #[comptime] threads: u32) {
    gpu_asm!(
        "bar.arrive {id}, {threads};",
        id = in(_) read::<u32>(id),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Waits for all threads of the cluster: `barrier.cluster.arrive` and `barrier.cluster.wait`.
///
/// All threads of all its cubes. Those of a warp wait for each other before: the barrier needs them together, and PTX does not
/// promise that they are behind a branch.
#[cube]
pub(crate) fn sync_cluster() {
    gpu_asm!(
        "bar.warp.sync 0xffffffff;\nbarrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`sync_cluster()`] before cubes read from global memory what others of their cluster have written.
#[cube]
pub(crate) fn sync_cluster_global() {
    gpu_asm!(
        "bar.warp.sync 0xffffffff;\nbarrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
    );
}
