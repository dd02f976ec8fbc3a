//! Ranks of one process, each on a thread of its own.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;

use burn_mla::model::{Communicator, HostCommunicator, Parallel};

/// What each of `size` ranks computes, in their order.
pub fn on_ranks<T: Send>(size: usize, compute: impl Fn(Parallel) -> T + Sync) -> Vec<T> {
    let group = HostCommunicator::group(size).into_iter().map(Arc::new).enumerate();
    thread::scope(|scope| {
        let start = |(rank, communicator): (usize, Arc<HostCommunicator>)| {
            let parallel = Parallel::new(rank, size, communicator.clone()).expect("a rank among them");
            let compute = &compute;
            scope.spawn(move || {
                let computed = panic::catch_unwind(AssertUnwindSafe(|| compute(parallel)));
                // The others must not wait for it.
                communicator.leave("its test is at its end");
                computed.unwrap_or_else(|panic| panic::resume_unwind(panic))
            })
        };
        let ranks: Vec<_> = group.map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}
