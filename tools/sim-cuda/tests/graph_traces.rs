//! Launches of graphs are recorded, on the simulated GPU and with another driver. One test, as its settings are the
//! process's.
mod common;
use common::{Driver, add_double_copy, built, count};
use ptx_sim::Trace;
use std::path::Path;

/// Records two launches of a graph: the memory that its first kernel found.
fn record(folder: &Path, device: &str) -> Vec<Vec<u8>> {
    // SAFETY: no other thread is there.
    unsafe { std::env::set_var("SIM_CUDA_TRACE", folder) };
    let driver = Driver::new();
    let (stream, input, out) = (driver.stream(), driver.words(10), driver.words(0));
    let executable = add_double_copy(&driver, stream, input, out);
    assert!(traces(folder).is_empty(), "a capture runs nothing");
    for first in [7, 70] {
        driver.write(input, first);
        assert_eq!(driver.cuGraphLaunch(executable, stream), 0);
        assert_eq!(driver.read(out), count(first).iter().map(|word| (word + 5) * 2).collect::<Vec<_>>());
    }
    let found = traces(folder);
    let of = |name: &str| found.iter().filter(|trace| trace.launch.entry == name).collect::<Vec<_>>();
    // Of launches with the same shape one is recorded.
    assert_eq!((of("add").len(), of("double").len()), (1, 1));
    for trace in &found {
        assert_eq!(trace.launch.device, device);
        assert_eq!(trace.run(1).unwrap().memory, trace.after);
    }
    of("add")[0].before.clone()
}

fn traces(folder: &Path) -> Vec<Trace> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| Trace::load(&entry.unwrap().path()).ok()).collect()
}

#[test]
fn launches_of_graphs_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let simulated = record(&folder.path().join("simulated"), "ptx-sim sm_90");
    let first: Vec<u8> = count(7).into_iter().flat_map(u32::to_le_bytes).collect();
    assert!(simulated.contains(&first), "what the first launch of the graph read");
    let real = folder.path().join("libreal.so");
    std::fs::copy(built(), &real).unwrap();
    // SAFETY: as above.
    unsafe { std::env::set_var("SIM_CUDA_FORWARD", &real) };
    assert_eq!(record(&folder.path().join("forwarded"), "forwarded"), simulated);
}
