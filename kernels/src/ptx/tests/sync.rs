//! Mbarriers in a ring, barriers with a number.

use super::*;
use crate::ptx::{barrier, mbarrier, shared_address, tma, warp};

/// A warp loads tiles of 8 rows through a ring of 3 stages, four others add up their words.
#[cube(launch_unchecked, create_dummy_kernel)]
fn ring_kernel(tensor: &TensorMap<bf16, Tiled>, out: &mut [u32], tiles: u32) {
    let ring = Shared::<[u32]>::new_aligned_slice(3usize * 256, 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(6usize, 8usize);
    let first = shared_address::<u32>(&ring);
    let full = shared_address::<u64>(&bars);
    let empty = full + 24;
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..3u32 {
            mbarrier::init(full + stage * 8, 1u32);
            mbarrier::init(empty + stage * 8, 4u32);
        }
        mbarrier::fence_init();
    }
    sync_cube();
    if warp::uniform(UNIT_POS / 32) == 4 {
        if warp::elect() {
            let map = tma::tensor_map_address::<bf16, Tiled>(tensor);
            let mut tile = 0u32;
            while tile < tiles {
                let stage = tile % 3;
                mbarrier::wait(empty + stage * 8, ((tile / 3) & 1) ^ 1);
                // In two parts, to see that the bytes are added.
                mbarrier::expect(full + stage * 8, 512u32);
                mbarrier::arrive_expect(full + stage * 8, 512u32);
                tma::load_2d(first + stage * 1024, map, full + stage * 8, 0i32, i32::cast_from(tile * 8));
                tile = warp::next(tile);
            }
        }
    } else {
        let lane = UNIT_POS % 32;
        let mut sum = 0u32;
        let mut tile = 0u32;
        while tile < tiles {
            let stage = tile % 3;
            let parity = (tile / 3) & 1;
            if !mbarrier::test_wait(full + stage * 8, parity) {
                mbarrier::wait(full + stage * 8, parity);
            }
            let at = (stage * 256 + UNIT_POS) as usize;
            sum = (sum * 3) ^ ring[at] ^ (ring[at + 128] * 5);
            // All of the warp have read.
            sync_plane();
            mbarrier::arrive_if(empty + stage * 8, lane == 0);
            tile = warp::next(tile);
        }
        out[UNIT_POS as usize] = sum;
    }
}

/// A warpgroup writes numbers that another one adds up; full and empty are barriers 1 and 2.
#[cube(launch_unchecked, create_dummy_kernel)]
fn barriers_kernel(out: &mut [u32], rounds: u32, #[comptime] numbered: bool) {
    let mut slots = Shared::<[u32]>::new_slice(128usize);
    let group = warp::uniform(UNIT_POS / 128);
    let unit = (UNIT_POS % 128) as usize;
    if group == 1 {
        let mut round = 0u32;
        while round < rounds {
            slots[unit] = UNIT_POS * 7 + round;
            barrier::arrive(1u32, 256u32);
            if comptime!(numbered) {
                barrier::sync_at(group + 1, 256u32);
            } else {
                barrier::sync(2u32, 256u32);
            }
            round = warp::next(round);
        }
    } else {
        let mut sum = 0u32;
        let mut round = 0u32;
        while round < rounds {
            barrier::sync(1u32, 256u32);
            sum = sum * 3 + slots[unit ^ 77];
            if comptime!(numbered) {
                barrier::arrive_at(group + 2, 256u32);
            } else {
                barrier::arrive(2u32, 256u32);
            }
            round = warp::next(round);
        }
        out[unit] = sum;
    }
}

#[test]
fn a_ring_of_stages_keeps_the_order() {
    on_hopper(|client| {
        let tiles = 50;
        let values = numbers(tiles * 8 * 64);
        let source = upload(client, &values);
        let out = upload(client, &[0u32; 128]);
        // SAFETY: the kernel writes 128 words, and reads tiles of the tensor.
        unsafe {
            ring_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(160),
                map(&source, &[tiles * 8, 64], &[8, 64], FloatKind::BF16),
                arg(&out, 128),
                tiles as u32,
            );
        }
        let mut want = [0u32; 128];
        for tile in values.chunks(512) {
            let mut lies = vec![0u16; 512];
            for (at, value) in tile.iter().enumerate() {
                lies[swizzled(at)] = value.to_bits();
            }
            let word = |at: usize| u32::from(lies[2 * at]) | u32::from(lies[2 * at + 1]) << 16;
            for (unit, sum) in want.iter_mut().enumerate() {
                *sum = sum.wrapping_mul(3) ^ word(unit) ^ word(unit + 128).wrapping_mul(5);
            }
        }
        assert_eq!(download::<u32>(client, out), want);
    });
}

#[test]
fn warpgroups_take_turns_at_barriers() {
    on_hopper(|client| {
        for numbered in [false, true] {
            let out = upload(client, &[0u32; 128]);
            // SAFETY: the kernel writes 128 words.
            unsafe {
                barriers_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(256),
                    arg(&out, 128),
                    1000,
                    numbered,
                );
            }
            let mut want = [0u32; 128];
            for round in 0..1000 {
                for (unit, sum) in want.iter_mut().enumerate() {
                    *sum = sum.wrapping_mul(3).wrapping_add((128 + (unit as u32 ^ 77)) * 7 + round);
                }
            }
            assert_eq!(download::<u32>(client, out), want, "numbered: {numbered}");
        }
    });
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{buffer, handle};
    let one = || CubeCount::Static(1, 1, 1);
    let ring = sm90_entry("ptx.ring", move |device, target| {
        let source = map(&handle(64), &[1, 64], &[8, 64], FloatKind::BF16);
        ring_kernel::create_dummy_kernel(device, target, one(), CubeDim::new_1d(160), source, buffer(), 1)
    });
    let barriers = [false, true].map(|numbered| {
        sm90_entry(format!("ptx.barriers.{numbered}"), move |device, target| {
            barriers_kernel::create_dummy_kernel(device, target, one(), CubeDim::new_1d(256), buffer(), 1, numbered)
        })
    });
    [ring].into_iter().chain(barriers).collect()
}
