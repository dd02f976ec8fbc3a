//! Atomic operations.

use cubecl::prelude::*;

use super::read;

/// Adds to a `u32`, and gives what it was before: `atom.add` (PTX ISA, "Parallel Synchronization and Communication Instructions:
/// atom").
///
/// Any thread; the order among threads is any. CubeCL's own `Atomic` has no store that does not also read.
#[cube]
pub(crate) fn add_shared(address: u32, value: u32) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.relaxed.cta.shared::cta.add.u32 {before}, [{address}], {value};",
        before = out(_) before,
        address = in(_) read::<u32>(address),
        value = in(_) read::<u32>(value),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
    before
}

/// Counts the number at the start of `counter` on, behind `last` from 0 again; gives what it was before: `atom.acq_rel.gpu.inc` (the same
/// section). sm_70.
///
/// Any thread. What the threads of its cube have written before a barrier that it has passed is there for the threads of a cube of
/// which one counts later, behind a barrier that this one passes then.
#[cube]
pub(crate) fn count(counter: &[u32], last: u32) -> u32 {
    let before: u32;
    let counter = counter.as_ptr();
    gpu_asm!(
        "atom.acq_rel.gpu.global.inc.u32 {before}, [{counter}], {last};",
        before = out(_) before,
        counter = mem_in(_) counter,
        last = in(_) read::<u32>(last),
        options(explicit_mem, reads_address_space global, writes_address_space global)
    );
    before
}
