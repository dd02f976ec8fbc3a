//! Shared memory of the other cubes of a cluster. sm_90.
//!
//! A cube must not have ended while others write to it: the cluster synchronises at the start and the end
//! ([`crate::ptx::barrier::sync_cluster()`]).

use cubecl::prelude::*;

use super::read;

/// Starts to copy from the own cube's shared memory to the same place in another cube of the cluster, where the bytes count at the mbarrier
/// that lies at `bar` here: `cp.async.bulk` (PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk").
///
/// One thread; address and bytes are multiples of 16. Who has written the source has fenced ([`crate::ptx::fence::async_shared()`]), and it
/// stays until the other cube has the bytes.
#[cube]
pub(crate) fn copy_to(cube: u32, address: u32, #[comptime] bytes: u32, bar: u32) {
    gpu_asm!(
        "{{\n.reg .b32 to, full;\n",
        "mapa.shared::cluster.u32 to, {address}, {cube};\nmapa.shared::cluster.u32 full, {bar}, {cube};\n",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [{address}], {bytes}, [full];\n}}",
        address = in(_) read::<u32>(address),
        cube = in(_) read::<u32>(cube),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}
