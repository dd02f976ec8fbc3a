//! Waiting for asynchronous copies of a thread.
//!
//! `cp.async.commit_group`, `cp.async.wait_group` and `cp.async.mbarrier.arrive`, PTX ISA, "Data Movement and Conversion Instructions: Asynchronous
//! copy". Groups are those of one thread, and complete in the order in which they were made. From `sm_80` on. The copies
//! are CubeCL's `copy_async`.

use cubecl::prelude::*;

use super::read;

/// Makes a group of the copies that this thread has started since its last group, of none as well:
/// `cp.async.commit_group`.
#[cube]
pub(crate) fn commit_copies() {
    gpu_asm!("cp.async.commit_group;", options(explicit_mem, reads_address_space shared, writes_address_space shared));
}

/// Waits until all but the last `pending` groups of this thread have arrived: `cp.async.wait_group`.
///
/// The thread may then read what it has copied itself. Others may when they have synchronised with it.
#[cube]
pub(crate) fn wait_for_copies(#[comptime] pending: u32) {
    gpu_asm!(
        "cp.async.wait_group {pending};",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Arrives at an mbarrier when all copies that this thread has started are complete: `cp.async.mbarrier.arrive.noinc`.
///
/// Any thread; it does not wait. The barrier counts it like any other arrival. Who has waited for the phase reads what was copied;
/// `wgmma` does after a [`crate::ptx::fence::async_shared()`], for these copies are of the generic proxy.
#[cube]
pub(crate) fn arrive_with_copies(bar: u32) {
    gpu_asm!(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{bar}];",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}
