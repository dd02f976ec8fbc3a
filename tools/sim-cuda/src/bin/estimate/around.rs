//! What is around the decoding: launches, and the merge of splits.
use crate::kernel::{Failure, Kernel};
use crate::launches::Plan;
use crate::merge::Merge;
use crate::shapes::Shape;
use ptx_sim::timing::{Latency, Rates};
use std::path::Path;

/// What an empty kernel takes by the method of the benchmark, in microseconds (`kernels/README.md`).
const LAUNCH: f64 = 3.5;
/// What the second launch adds where there is nothing to merge: b 64, h 16, s_k 16384 takes 298.4 us with the merge and 296
/// without (`kernels/src/mla_decode/sm90/README.md`).
const SECOND_LAUNCH: f64 = 2.4;
/// Instructions that a multiprocessor issues in a cycle.
const ISSUES: f64 = 4.0;

/// Microseconds beside the decoding.
pub fn around(folder: &Path, shape: &Shape, (plan, capacity): (&Plan, usize), rates: &Rates) -> Result<f64, Failure> {
    Ok(LAUNCH + SECOND_LAUNCH + rates.microseconds(merge(folder, shape, (plan, capacity), rates)?))
}

/// Cycles of the merge: the way through one cube, or what all of them issue and move. What it reads was just written: it is
/// in L2.
fn merge(folder: &Path, shape: &Shape, (plan, capacity): (&Plan, usize), rates: &Rates) -> Result<f64, Failure> {
    let splits = |ends: &[i32]| (ends[1] - ends[0]) as usize;
    let counts: Vec<usize> = plan.split_ptr.windows(2).map(splits).collect();
    let most = counts.iter().enumerate().max_by_key(|(_, count)| **count);
    let Some((sequence, _)) = most.filter(|(_, count)| **count > 1) else { return Ok(0.0) };
    let latency = Latency { memory: rates.latency.l2, ..rates.latency };
    let port = rates.port_bytes;
    let near = Rates { latency, load_bytes: port, store_bytes: port, ..rates.clone() };
    let form = Merge::new(shape.batch * shape.rows(), capacity / shape.batch);
    let kernel = Kernel::load(folder, &form.name())?;
    let (stats, cubes) = kernel.merge(&form.compiled(), shape, (plan, sequence), &near)?;
    // Sequences that were not cut are left alone.
    let part = counts.iter().filter(|count| **count > 1).count() as f64 / shape.batch as f64;
    let cubes = cubes as f64 * part;
    let issued = cubes * stats.warp_instructions as f64 / ISSUES / f64::from(rates.multiprocessors);
    let moved = cubes * (stats.loaded_bytes + stats.stored_bytes) as f64 / rates.l2_bytes;
    Ok((stats.cycles as f64).max(issued).max(moved))
}
