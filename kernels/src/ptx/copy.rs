//! Waiting for asynchronous copies of a thread.
//!
//! `cp.async.commit_group`, `cp.async.wait_group` and `cp.async.mbarrier.arrive`, PTX ISA, "Data Movement and Conversion Instructions: Asynchronous
//! copy". Groups are those of one thread, and complete in the order in which they were made. From `sm_80` on. Copies that
//! are always whole are CubeCL's `copy_async`.

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

/// Starts to copy the 16 bytes that are `from` bytes behind the beginning of `source` to `to` bytes behind an address of shared memory,
/// or writes as many zeros there: `cp.async` with so many bytes of the source, 16 or 0.
///
/// Any thread. Both addresses are multiples of 16. Without bytes nothing is read. (CubeCL's own form takes the number as an index, which
/// has 64 bits where buffers are large, and the instruction wants 32.)
#[cube]
pub(crate) fn copy_or_zero<T: CubePrimitive>(
    source: &[T],
    #[comptime] from: u32,
    shared: u32,
    #[comptime] to: u32,
    bytes: u32,
) {
    let source = source.as_ptr();
    gpu_asm!(
        "cp.async.cg.shared::cta.global [{shared} + {to}], [{source} + {from}], 16, {bytes};",
        shared = in(_) read::<u32>(shared),
        source = mem_in(_) source,
        bytes = in(_) read::<u32>(bytes),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
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

/// Loads the 16 bytes with which `source` begins, or those `offset` bytes on: `ld.global.v4` (PTX ISA, "Data Movement and Conversion
/// Instructions: ld").
///
/// Any thread; the address is a multiple of 16. It stays where it is among other assembly: loads of CubeCL's own may be moved down to
/// where they are used, behind what was to hide them.
#[cube]
pub(crate) fn load_global_16<T: CubePrimitive>(source: &[T], #[comptime] offset: u32) -> Vector<u32, Const<4>> {
    let source = source.as_ptr();
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.global.v4.b32 {words}, [{source} + {offset}];",
        words = out(_) words,
        source = mem_in(_) source,
        options(explicit_mem, reads_address_space global)
    );
    words
}

/// [`load_global_16()`] of 4 bytes, whose address is a multiple of 4; zero without reading anything if not `reads`: `ld.global`.
#[cube]
pub(crate) fn load_global_4_or_zero<T: CubePrimitive>(source: &[T], #[comptime] offset: u32, reads: bool) -> u32 {
    let source = source.as_ptr();
    let word: u32;
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {reads}, 0;\nmov.b32 {word}, 0;\n@p ld.global.b32 {word}, [{source} + {offset}];\n}}",
        word = out(_) word,
        source = mem_in(_) source,
        reads = in(_) read::<u32>(u32::cast_from(reads)),
        options(explicit_mem, reads_address_space global)
    );
    word
}
