//! Atomic operations on shared memory.

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
