//! Fences, and the order of dependent kernels.

use cubecl::prelude::*;

/// Orders this thread's generic loads and stores of shared memory before later accesses by the asynchronous proxy, that
/// is by `wgmma` and by bulk copies: `fence.proxy.async` (PTX ISA, "membar / fence", and "Async Proxy").
///
/// Every thread that has written shared memory for a `wgmma` or a tile store does this after its last write. Then all
/// those threads synchronise with the thread that issues the instruction. Not needed after a tile load's mbarrier wait,
/// and not for memory that was only read before a tile load overwrites it, if an mbarrier or barrier lies between.
#[cube]
pub(crate) fn async_shared() {
    gpu_asm!(
        "fence.proxy.async.shared::cta;",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Lets kernels start that depend on this one, as far as the launch allows: `griddepcontrol.launch_dependents` (PTX
/// ISA, "griddepcontrol").
///
/// Any thread, once per cube. It promises nothing about memory: the dependent kernel waits with
/// [`wait_for_predecessor()`]. CubeCL launches kernels without that attribute, with which this does nothing.
#[cube]
pub(crate) fn launch_dependents() {
    gpu_asm!("griddepcontrol.launch_dependents;", options(nomem));
}

/// Waits until the kernels that this one depends on are complete and their writes visible: `griddepcontrol.wait`.
///
/// Every thread that reads what they have written. Does nothing in a kernel that was launched in the ordinary way.
#[cube]
pub(crate) fn wait_for_predecessor() {
    gpu_asm!(
        "griddepcontrol.wait;",
        options(explicit_mem, reads_address_space global, writes_address_space global)
    );
}
