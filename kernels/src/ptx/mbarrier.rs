//! Barriers in shared memory that count arrivals of threads and bytes of asynchronous copies: mbarriers.
//!
//! An mbarrier is an aligned `u64` of shared memory. Its phases are numbered from 0, and the parity of a phase's number
//! is what is waited for. A phase completes when as many arrivals as it was initialised with have come and all bytes
//! that were announced have been copied; the next phase then expects the same number of arrivals.
//!
//! A ring of stages has two mbarriers for each: one that the copies fill, which consumers wait for with the parity of
//! the round (0, 1, 0, ..), and one that consumers arrive at when they are done, which the producer waits for with the
//! opposite parity: the wait for parity 1 of a fresh mbarrier returns at once, for the phase before the first counts as
//! complete.
//!
//! All addresses are those of the own cube's shared memory. PTX ISA, "Parallel Synchronization and Communication
//! Instructions: mbarrier".

use cubecl::prelude::*;

use super::read;

/// Initialises an mbarrier that `arrivals` threads arrive at in each phase: `mbarrier.init`.
///
/// One thread does this. Then that thread calls [`fence_init()`], and all threads that use the mbarrier synchronise.
/// The memory must not be in use as an mbarrier.
#[cube]
pub(crate) fn init(bar: u32, #[comptime] arrivals: u32) {
    gpu_asm!(
        "mbarrier.init.shared::cta.b64 [{bar}], {arrivals};",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Makes initialised mbarriers visible to asynchronous copies and to the other cubes of the cluster:
/// `fence.mbarrier_init` and `fence.proxy.async` (PTX ISA, "membar / fence").
///
/// The thread that has initialised them does this once, after the last [`init()`] and before threads synchronise.
#[cube]
pub(crate) fn fence_init() {
    gpu_asm!(
        "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;",
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Arrives: `mbarrier.arrive`.
///
/// Any thread. What it has read and written before is done when the phase completes, as seen by generic loads and
/// stores; a copy by [`crate::ptx::tma`] into memory that was only read needs nothing more.
#[cube]
pub(crate) fn arrive(bar: u32) {
    gpu_asm!(
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [{bar}];",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`arrive()`] so many times at once, for others that have nothing more to say: `mbarrier.arrive` with a count.
///
/// Any thread. No more than are still expected in this phase. What the others have written is not seen by that: they synchronise with
/// this thread before.
#[cube]
pub(crate) fn arrive_times(bar: u32, #[comptime] times: u32) {
    gpu_asm!(
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [{bar}], {times};",
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Arrives if the condition holds, without a branch.
///
/// Any thread. A branch between `wgmma` and the wait for it can make ptxas serialise them, hence this form for "one
/// thread of a warpgroup". After [`crate::ptx::wgmma::wait()`] one thread may arrive for its warpgroup, as far as
/// `wgmma` has read the memory; after loads the threads that have loaded synchronise before.
#[cube]
pub(crate) fn arrive_if(bar: u32, condition: bool) {
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {condition}, 0;\n",
        "@p mbarrier.arrive.release.cta.shared::cta.b64 _, [{bar}];\n}}",
        condition = in(_) read::<u32>(u32::cast_from(condition)),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Arrives, if the condition holds, at the mbarrier that a cube of the cluster has at the same address: `mapa` and
/// `mbarrier.arrive`.
///
/// Any thread. `cube` is the rank in the cluster, that of the own cube too. A cube must have initialised the mbarrier
/// before and must not have ended: synchronise the cluster ([`crate::ptx::barrier::sync_cluster()`]) at the start and
/// the end. It waits with [`wait_cluster()`].
#[cube]
pub(crate) fn arrive_at_if(bar: u32, cube: u32, condition: bool) {
    gpu_asm!(
        "{{\n.reg .pred p;\n.reg .b32 remote;\nsetp.ne.u32 p, {condition}, 0;\n",
        "mapa.shared::cluster.u32 remote, {bar}, {cube};\n",
        "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}}",
        condition = in(_) read::<u32>(u32::cast_from(condition)),
        bar = in(_) read::<u32>(bar),
        cube = in(_) read::<u32>(cube),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`arrive_at_if()`] of a thread that has written nothing which the others read: what its `wgmma` has read is complete
/// ([`crate::ptx::wgmma::wait()`]), and a copy may overwrite it.
///
/// The scope is that of the own cube. A release to the cluster would wait until all earlier writes of the thread are seen by the
/// whole GPU, most of a microsecond each time. Who waits with [`wait()`] may then issue copies to the memory that was read.
#[cube]
pub(crate) fn arrive_at_after_reads_if(bar: u32, cube: u32, condition: bool) {
    gpu_asm!(
        "{{\n.reg .pred p;\n.reg .b32 remote;\nsetp.ne.u32 p, {condition}, 0;\n",
        "mapa.shared::cluster.u32 remote, {bar}, {cube};\n",
        "@p mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote];\n}}",
        condition = in(_) read::<u32>(u32::cast_from(condition)),
        bar = in(_) read::<u32>(bar),
        cube = in(_) read::<u32>(cube),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Announces bytes that copies will bring in this phase, and arrives: `mbarrier.arrive.expect_tx`.
///
/// One thread, in general the one that issues the copies, before them. A tile that sticks out of its tensor counts in
/// full. A phase with a wrong number of bytes never completes, or completes too early.
#[cube]
pub(crate) fn arrive_expect(bar: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{bar}], {bytes};",
        bar = in(_) read::<u32>(bar),
        bytes = in(_) read::<u32>(bytes),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Announces bytes without arriving: `mbarrier.expect_tx`.
///
/// Any thread; it or another has yet to arrive in this phase.
#[cube]
pub(crate) fn expect(bar: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{bar}], {bytes};",
        bar = in(_) read::<u32>(bar),
        bytes = in(_) read::<u32>(bytes),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`expect()`] if the condition holds, without a branch.
#[cube]
pub(crate) fn expect_if(bar: u32, bytes: u32, condition: bool) {
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {condition}, 0;\n",
        "@p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{bar}], {bytes};\n}}",
        condition = in(_) read::<u32>(u32::cast_from(condition)),
        bar = in(_) read::<u32>(bar),
        bytes = in(_) read::<u32>(bytes),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Waits until the phase with this parity is complete: `mbarrier.try_wait.parity` in a loop.
///
/// Any thread. Copied bytes are visible to it then, both to its loads and to its `wgmma`. It must not fall two phases
/// behind, since it could not tell those apart: whoever completes the next phase must wait for this thread before.
#[cube]
pub(crate) fn wait(bar: u32, parity: u32) {
    gpu_asm!(
        "{{\n.reg .pred done;\nTRY:\n",
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [{bar}], {parity};\n",
        "@done bra DONE;\nbra TRY;\nDONE:\n}}",
        bar = in(_) read::<u32>(bar),
        parity = in(_) read::<u32>(parity),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// [`wait()`] where threads of other cubes of the cluster arrive.
#[cube]
pub(crate) fn wait_cluster(bar: u32, parity: u32) {
    gpu_asm!(
        "{{\n.reg .pred done;\nTRY:\n",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{bar}], {parity};\n",
        "@done bra DONE;\nbra TRY;\nDONE:\n}}",
        bar = in(_) read::<u32>(bar),
        parity = in(_) read::<u32>(parity),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// Whether the phase with this parity is complete, without waiting: `mbarrier.test_wait.parity`.
///
/// Any thread. To choose what to do first.
#[cube]
pub(crate) fn test_wait(bar: u32, parity: u32) -> bool {
    let done: u32;
    gpu_asm!(
        "{{\n.reg .pred p;\nmbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [{bar}], {parity};\n",
        "selp.u32 {done}, 1, 0, p;\n}}",
        done = out(_) done,
        bar = in(_) read::<u32>(bar),
        parity = in(_) read::<u32>(parity),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
    done != 0u32
}
