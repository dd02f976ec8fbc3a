//! Sums over the devices of this process. They need two CUDA devices, which a simulated driver has with `SIM_CUDA_DEVICES=2`; more
//! are used, up to four.

use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_mla::ops::{DeviceName, MlaError, PeerRank, capture};

use crate::devices::{FLOATS, alone, for_each_device, is_cuda, skip, supports};
use crate::ops_fixture::{bits, floats, random, restrided, rng, rounded, values};
use crate::refusals::Kind::Value;
use crate::refusals::assert_refused;

/// As many elements as the capacity has packets.
const PACKETS: usize = 524_288;

/// Runs a test on the CUDA devices of this machine, if there are two at least.
fn on_devices(test: impl Fn(&[Device])) {
    for_each_device(|device| {
        if !is_cuda(device) {
            return;
        }
        let _alone = alone(device);
        let others = (1..4).map_while(|index| DeviceName::Cuda(index).open().ok());
        let devices: Vec<_> = std::iter::once(device.clone()).chain(others).collect();
        match devices.len() {
            1 => skip(device, "there is no second CUDA device (simulated: SIM_CUDA_DEVICES=2)"),
            _ => test(&devices),
        }
    });
}

fn group(devices: &[Device]) -> Vec<PeerRank> {
    let ranks = PeerRank::group(devices).expect("devices that access each other's memory");
    // Longer than a kernel is compiled for on a busy machine.
    ranks.into_iter().map(|rank| rank.with_patience(Duration::from_secs(60))).collect()
}

/// What each rank makes of it, on a thread of its own.
fn on_ranks<T: Send>(ranks: &[PeerRank], run: impl Fn(&PeerRank) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(|| run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// The rows of a rank.
fn rows(seed: u64, rank: usize, n: usize, dtype: DType) -> Vec<f64> {
    random(&mut rng(seed * 100 + rank as u64), n, dtype)
}

fn tensor(seed: u64, rank: &PeerRank, sizes: [usize; 2], dtype: DType) -> Tensor<2> {
    floats(&rows(seed, rank.rank(), sizes[0] * sizes[1], dtype), sizes, dtype, rank.device())
}

/// All ranks have the same bits, and these are the sums, added in f32 in the order of the ranks and rounded once.
fn assert_sums(outs: Vec<Tensor<2>>, seed: u64, sizes: [usize; 2], dtype: DType) {
    let what = format!("{sizes:?} {dtype:?}, seed {seed}");
    let each: Vec<_> = outs.iter().map(bits).collect();
    assert!(each.iter().all(|bits| *bits == each[0]), "ranks differ, {what}");
    assert!(outs.iter().all(|out| out.dims() == sizes && out.dtype() == dtype), "{what}");
    let terms: Vec<_> = (0..outs.len()).map(|rank| rows(seed, rank, sizes[0] * sizes[1], dtype)).collect();
    let out = outs.into_iter().next().expect("a rank");
    for (i, value) in values(out).into_iter().enumerate() {
        let sum = terms.iter().map(|terms| terms[i] as f32).reduce(|sum, term| sum + term).expect("a rank");
        let sum = rounded(f64::from(sum), dtype);
        assert_eq!(f64::from(value), sum, "{what}, at {i}");
        let exact: f64 = terms.iter().map(|terms| terms[i]).sum();
        assert!((sum - exact).abs() <= 4e-3 * exact.abs().max(1.0), "{what}, at {i}: {sum}, exactly {exact}");
    }
}

/// One element, rows that end within a packet, within a cube and behind one, one row of a model, the most that is taken.
#[test]
fn ops_all_reduce_sums() {
    on_devices(|devices| {
        let ranks = group(devices);
        let shapes = [[1, 1], [1, 2], [3, 1], [1, 7], [2, 256], [3, 255], [1, 513], [5, 1000], [1, 7168], [7, 4681]];
        for dtype in FLOATS.into_iter().filter(|dtype| supports(&devices[0], *dtype)) {
            let elements = PACKETS * 4 / dtype.size();
            let most = if dtype == DType::BF16 { vec![[1, elements], [1, elements - 1]] } else { vec![[1, elements]] };
            for (seed, sizes) in (1..).zip(shapes.into_iter().chain(most)) {
                let sum = |rank: &PeerRank| rank.all_reduce(tensor(seed, rank, sizes, dtype)).expect("legal");
                assert_sums(on_ranks(&ranks, sum), seed, sizes, dtype);
            }
        }
    });
}

/// Nothing between the launches waits for another rank but they themselves. Cubes take part in some of them only.
#[test]
fn ops_all_reduce_many_in_a_row() {
    on_devices(|devices| {
        let ranks = group(devices);
        let sizes = [[1, 8], [1, 8], [3, 700], [1, 9], [2, 4000], [1, 8], [40, 999], [1, 4000], [1, 8]];
        let calls: Vec<_> = (1..).zip(sizes.into_iter().cycle().take(3 * sizes.len())).collect();
        let outs = on_ranks(&ranks, |rank| {
            let xs: Vec<_> = calls.iter().map(|(seed, sizes)| tensor(*seed, rank, *sizes, DType::F32)).collect();
            xs.into_iter().map(|x| rank.all_reduce(x).expect("legal")).collect::<Vec<_>>()
        });
        for (i, (seed, sizes)) in calls.into_iter().enumerate() {
            assert_sums(outs.iter().map(|outs| outs[i].clone()).collect(), seed, sizes, DType::F32);
        }
    });
}

/// The count of calls wraps around, at an epoch of either parity.
#[test]
fn ops_all_reduce_beyond_the_last_epoch() {
    on_devices(|devices| {
        let ranks = group(devices);
        for epoch in [u32::MAX - 2, u32::MAX - 1] {
            ranks[0].set_epoch(epoch).expect("devices that work");
            for seed in 1..7 {
                let sizes = [2, 300];
                let sum = |rank: &PeerRank| rank.all_reduce(tensor(seed, rank, sizes, DType::F32)).expect("legal");
                assert_sums(on_ranks(&ranks, sum), seed, sizes, DType::F32);
            }
        }
    });
}

#[test]
fn ops_all_reduce_of_a_view_and_of_nothing() {
    on_devices(|devices| {
        let ranks = group(devices);
        let sizes = [6, 50];
        let sum =
            |rank: &PeerRank| rank.all_reduce(restrided(tensor(3, rank, sizes, DType::F32), 0, 1)).expect("legal");
        assert_sums(on_ranks(&ranks, sum), 3, sizes, DType::F32);
        let empty = Tensor::<2>::empty([0, 8], (&devices[0], DType::F32));
        assert_eq!(ranks[0].all_reduce(empty).expect("legal").dims(), [0, 8]);
    });
}

/// Graphs count on their own: what they were captured with is what they replay with, between other calls.
#[test]
fn ops_all_reduce_captured() {
    on_devices(|devices| {
        if cfg!(feature = "fusion") {
            return skip(&devices[0], "nothing is captured under Fusion");
        }
        const CALLS: usize = 20;
        let (ranks, share) = (group(devices), 1.0 / devices.len() as f64);
        let wide = [1, 700];
        let outs = on_ranks(&ranks, |rank| {
            let x = tensor(5, rank, [1, 9], DType::F32);
            // The mean of means: the first sum over all ranks, for ever.
            let step = || (0..CALLS).fold(x.clone(), |x, _| rank.all_reduce(x).expect("legal") * share);
            let mut graph = capture(rank.device(), step).expect("a device with a thread of its own");
            assert!(graph.is_hardware(), "{rank:?}");
            let mut replayed = Vec::new();
            for _ in 0..4 {
                // SAFETY: all that the graph reads and writes is here.
                replayed.push(bits(&unsafe { graph.replay() }.clone()));
                replayed.push(bits(&rank.all_reduce(tensor(6, rank, wide, DType::F32)).expect("legal")));
            }
            // SAFETY: as above.
            let last = unsafe { graph.replay() }.clone();
            (replayed, values(last))
        });
        assert!(outs.iter().all(|(replayed, _)| *replayed == outs[0].0), "ranks differ");
        let (replayed, last) = &outs[0];
        assert!((2..replayed.len()).all(|i| replayed[i] == replayed[i - 2]), "replays differ");
        let terms: Vec<_> = (0..devices.len()).map(|rank| rows(5, rank, 9, DType::F32)).collect();
        for (i, mean) in last.iter().enumerate() {
            let expected = terms.iter().map(|terms| terms[i]).sum::<f64>() * share;
            assert!((f64::from(*mean) - expected).abs() < 1e-5, "{mean} at {i}, expected {expected}");
        }
    });
}

/// No kernel waits for ever.
#[test]
fn ops_all_reduce_without_a_rank() {
    on_devices(|devices| {
        for dtype in FLOATS.into_iter().filter(|dtype| supports(&devices[0], *dtype)) {
            let ranks = group(devices);
            let alone = ranks[0].clone().with_patience(Duration::from_millis(300));
            let start = Instant::now();
            let out = alone.all_reduce(tensor(1, &alone, [3, 1001], dtype)).expect("legal");
            assert!(values(out).iter().all(|value| value.is_nan()), "{dtype:?}");
            // A kernel is compiled before.
            assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
        }
    });
}

#[test]
fn ops_all_reduce_refuses() {
    on_devices(|devices| {
        let ranks = group(devices);
        let (device, other) = (&devices[0], &devices[1]);
        assert_eq!(ranks[0].capacity(), 4 * PACKETS);
        assert_refused(ranks[0].all_reduce(Tensor::zeros([2, PACKETS / 2 + 1], (device, DType::F32))), Value, "x");
        let elsewhere = ranks[0].all_reduce(Tensor::zeros([1, 8], (other, DType::F32)));
        assert!(matches!(elsewhere, Err(MlaError::Device { argument: "x", .. })), "{elsewhere:?}");
        assert_refused(PeerRank::group(&[device.clone(), other.clone(), device.clone()]), Value, "devices");
        assert_refused(PeerRank::group(&devices[..1]), Value, "devices");
        // The group goes on.
        let sum = |rank: &PeerRank| rank.all_reduce(tensor(1, rank, [1, 8], DType::F32)).expect("legal");
        assert_sums(on_ranks(&ranks, sum), 1, [1, 8], DType::F32);
    });
}

#[test]
fn ops_all_reduce_needs_cuda() {
    for_each_device(|device| {
        if !is_cuda(device) {
            let refused = PeerRank::group(&[device.clone(), device.clone()]);
            assert!(matches!(refused, Err(MlaError::UnsupportedDevice { .. })), "{refused:?}");
        }
    });
}
