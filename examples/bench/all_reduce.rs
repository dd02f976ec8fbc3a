//! Sums over two GPUs of this process: `PeerRank::all_reduce`, and Burn's, which is NCCL's, both in captured graphs of 20.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::distributed::{ReduceOperation, all_reduce};
use burn::tensor::{Device, Tensor};
use burn_mla::ops::{DeviceName, PeerRank, capture, find_nccl, is_cuda};
use serde_json::json;

use crate::cases::Bench;
use crate::report::rounded;
use crate::timing::caught;

/// Sums of a graph, each of what the one before has made.
const CALLS: usize = 20;
/// Replays that are timed together.
const REPLAYS: usize = 50;
/// How often Burn runs a computation before it records it.
const WARM_UPS: usize = 3;
/// How long a rank waits for the other between its steps.
const PATIENCE: Duration = Duration::from_secs(120);

/// The section. NCCL comes last: where it is missing, the devices may be of no use afterwards.
pub fn run(bench: &mut Bench) {
    let mut devices = Vec::new();
    bench.case("all_reduce: two GPUs", |bench| {
        let second = DeviceName::Cuda(1).open().map_err(|error| error.to_string())?;
        if !is_cuda(&bench.device) || bench.device == second {
            return Err("--device is not the first GPU, cuda:0".into());
        }
        devices = vec![bench.device.clone(), second];
        Ok(())
    });
    if devices.is_empty() {
        return;
    }
    let sizes = bench.pick(&[4, 8, 14, 32, 64, 128, 256, 512, 1024, 2048, 4096], 3, &[4]);
    for &kib in sizes.iter().filter(|kib| **kib <= 2048) {
        bench.case(&format!("all_reduce {kib} KiB"), |bench| {
            let ranks = PeerRank::group(&devices).map_err(|error| error.to_string())?;
            let sum = |rank: usize, x| ranks[rank].all_reduce(x).map_err(|error| error.to_string());
            row(bench, "all_reduce", kib, &devices, &sum)
        });
    }
    let mut has_nccl = false;
    bench.case("all_reduce_nccl", |_| find_nccl().map(|()| has_nccl = true).map_err(|error| error.to_string()));
    if !has_nccl {
        return;
    }
    for &kib in &sizes {
        bench.case(&format!("all_reduce_nccl {kib} KiB"), |bench| {
            let sum = |_, x| Ok(all_reduce(x, ReduceOperation::Sum, devices.clone()).resolve());
            row(bench, "all_reduce_nccl", kib, &devices, &sum)
        });
    }
}

/// A sum of a rank.
type Sum<'a> = dyn Fn(usize, Tensor<2>) -> Result<Tensor<2>, String> + Sync + 'a;

/// Times a sum of rows of so many KiB: the mean over the replays, of the rank that took longer.
fn row(bench: &mut Bench, op: &str, kib: usize, devices: &[Device], sum: &Sum) -> Result<(), String> {
    let (dtype, meeting) = (bench.dtype, Meeting::default());
    let width = kib * 1024 / dtype.size();
    let times = thread::scope(|scope| {
        let rank = |rank: usize| {
            let (device, meeting) = (&devices[rank], &meeting);
            scope.spawn(move || {
                caught(|| time(rank, device, Tensor::full([1, width], 0.5, (device, dtype)), sum, meeting))
            })
        };
        let threads: Vec<_> = (0..devices.len()).map(rank).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "panicked".to_string())?)
            .collect::<Result<Vec<_>, _>>()
    })?;
    let us = times.into_iter().fold(0.0, f64::max);
    let shape = [("ranks", json!(devices.len())), ("kib", json!(kib))];
    bench.report.rate(op, &shape, &[("us_each", rounded(us, 3)), ("how", json!("graph"))]);
    Ok(())
}

/// Microseconds of each sum of a graph. Of two ranks with 0.5 each the sum of halves is 0.5 again.
fn time(rank: usize, device: &Device, x: Tensor<2>, sum: &Sum, meeting: &Meeting) -> Result<f64, String> {
    let (mut failure, mut runs) = (None, 0);
    let step = || {
        let out = (0..CALLS).fold(x.clone(), |x, _| {
            let half = x * 0.5;
            sum(rank, half.clone()).unwrap_or_else(|error| {
                failure = Some(error);
                half
            })
        });
        runs += 1;
        if runs == WARM_UPS {
            // Both have their memory; then one records after the other, as CUDA gives none meanwhile.
            meeting.arrive();
            meeting.until(2 + rank);
        }
        out
    };
    let graph = capture(device, step);
    meeting.arrive();
    meeting.until(4);
    let mut graph = graph.ok_or("nothing is captured under Fusion")?;
    let sync = || device.sync().map_err(|error| format!("{error:?}"));
    for _ in 0..5 {
        // SAFETY: all that the graph reads and writes is here.
        unsafe { graph.replay() };
    }
    sync()?;
    meeting.arrive();
    meeting.until(6);
    let start = Instant::now();
    for _ in 0..REPLAYS {
        // SAFETY: as above.
        unsafe { graph.replay() };
    }
    sync()?;
    let us = start.elapsed().as_secs_f64() * 1e6 / (REPLAYS * CALLS) as f64;
    // SAFETY: as above.
    let last = unsafe { graph.replay() }.clone();
    let values: Vec<f32> = last.try_into_vec_as().map_err(|error| error.to_string())?;
    let is_hardware = graph.is_hardware();
    drop(graph);
    match failure {
        Some(error) => Err(error),
        None if !is_hardware => Err("no graph was captured".into()),
        None if values.iter().any(|value| *value != 0.5) => Err(format!("{} in place of 0.5", values[0])),
        None => Ok(us),
    }
}

/// Where ranks meet, of which one may have failed.
#[derive(Default)]
struct Meeting(AtomicUsize);

impl Meeting {
    fn arrive(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until there were so many arrivals, or too long: then what follows fails.
    fn until(&self, arrivals: usize) {
        let start = Instant::now();
        while self.0.load(Ordering::SeqCst) < arrivals && start.elapsed() < PATIENCE {
            thread::yield_now();
        }
    }
}
