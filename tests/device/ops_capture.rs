//! Computations that are recorded and replayed.

use std::thread;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_mla::ops::{capture, on_device_thread};

use crate::devices::for_each_device;

/// The device's thread is kept busy in the runs before the recording, and waited for while it is recorded. Runs on another thread
/// would be far ahead of it: a run's first buffer would be free when its third is made, so that two were enough, and the recording
/// would lack one.
#[test]
fn ops_capture_finds_the_buffers_of_the_runs_before() {
    // As no other test has, for no other buffer to be in the place of one.
    const LEN: usize = 54_321;
    for_each_device(|device| {
        let x = Tensor::<1>::full([LEN], 4.0, (device, DType::F32));
        let (mut runs, mut busy) = (0, Vec::new());
        let step = || {
            runs += 1;
            let is_recorded = runs == 4;
            let wait = || is_recorded.then(|| on_device_thread(device, || ()));
            if !is_recorded {
                let device = device.clone();
                busy.push(thread::spawn(move || {
                    on_device_thread(&device, || thread::sleep(Duration::from_millis(200)))
                }));
                thread::sleep(Duration::from_millis(50));
            }
            let first = x.clone() + 1.0;
            wait();
            let second = first.clone() + 1.0;
            wait();
            let third = second.clone() + 1.0;
            wait();
            third
        };
        let Some(mut graph) = capture(device, step) else {
            assert!(*device == Device::flex() || cfg!(feature = "fusion"), "no thread of {device:?}");
            return;
        };
        assert!(graph.is_hardware(), "on {device:?}");
        // SAFETY: all that the graph reads and writes is here, and on this thread.
        let replayed = unsafe { graph.replay() }.clone();
        assert_eq!(replayed.into_data().try_to_vec::<f32>().expect("f32"), vec![7.0; LEN], "on {device:?}");
        drop(graph);
        assert!(busy.into_iter().all(|thread| thread.join().is_ok_and(|slept| slept.is_some())));
    });
}
