//! One launch in the place of two: the last cube to have written goes on with what all of them have.
//!
//! Cubes count themselves. Launches of a queue run one after the other, so they have their counters in common: each is zero before a
//! launch and behind it.

#[cfg(feature = "cuda")]
use std::collections::HashMap;
#[cfg(feature = "cuda")]
use std::sync::{LazyLock, Mutex, PoisonError};

use cubecl::prelude::*;
#[cfg(feature = "cuda")]
use cubecl::server::Handle;
#[cfg(feature = "cuda")]
use cubecl_common::device::ServiceId;
#[cfg(feature = "cuda")]
use cubecl_core::environment::stream::StreamId;

#[cfg(feature = "cuda")]
use crate::ptx::{atomic, warp};

/// Counters of a queue: so many groups of cubes of a launch have a last one each.
#[cfg(feature = "cuda")]
pub(crate) const COUNTERS: usize = 64;

/// u32 `[COUNTERS]` of this thread's queue. They stay: captured launches go on counting.
#[cfg(feature = "cuda")]
pub(crate) fn counters(client: &Client) -> BufferArg {
    static OF_QUEUES: LazyLock<Mutex<HashMap<(ServiceId, StreamId), Handle>>> = LazyLock::new(Mutex::default);
    let queues = || OF_QUEUES.lock().unwrap_or_else(PoisonError::into_inner);
    let queue = (client.service_id(), StreamId::current());
    let known = queues().get(&queue).cloned();
    // Without the lock: the device may have to finish first what waits for it.
    let handle = known.unwrap_or_else(|| {
        let zeros = client.create_from_slice(&[0; COUNTERS * size_of::<u32>()]);
        queues().entry(queue).or_insert(zeros).clone()
    });
    // SAFETY: it has as many.
    unsafe { BufferArg::from_raw_parts(handle, COUNTERS) }
}

/// Whether this cube is the last of `cubes` that count with counter number `counter`; then it sees what all of them have written before.
/// Called by all units of each.
#[cube]
pub(crate) fn is_last(counters: &mut [u32], counter: usize, cubes: usize) -> bool {
    let mut is_last = Shared::<[u32]>::new_slice(1usize);
    let last = cubes as u32 - 1;
    // Lanes come together, wherever they come from: some kernels shuffle behind the branch.
    sync_plane();
    sync_cube();
    if UNIT_POS == 0 {
        let before = atomic::count(&counters[counter..counter + 1], last);
        is_last[0] = u32::cast_from(before == last);
    }
    sync_plane();
    sync_cube();
    // What all units compare with the same number.
    warp::uniform(is_last[0]) != 0
}

/// In place of the instructions, which no device of this build has.
#[cfg(not(feature = "cuda"))]
mod atomic {
    use cubecl::prelude::*;

    #[cube]
    pub(super) fn count(_counter: &[u32], last: u32) -> u32 {
        last
    }
}

#[cfg(not(feature = "cuda"))]
mod warp {
    use cubecl::prelude::*;

    #[cube]
    pub(super) fn uniform(value: u32) -> u32 {
        value
    }
}
