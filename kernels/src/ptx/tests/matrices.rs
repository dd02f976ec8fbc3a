//! Matrices and 16 bytes between registers and shared memory, powers of two, pairs of 16-bit numbers.

use half::f16;

use super::*;
use crate::ptx::{math, matrix, shared_address, wgmma::Elem};

/// A warp stores four matrices, thread `t` the words `4 * t ..`, and loads them back, with or without transposing.
#[cube(launch_unchecked, create_dummy_kernel)]
fn matrices_kernel(words: &[u32], out: &mut [u32], #[comptime] store: bool, #[comptime] load: bool) {
    let memory = Shared::<[u32]>::new_aligned_slice(256usize, 16usize);
    // Matrix m, row r at 16-byte unit 8 * m + r, behind 512 bytes that are added as a constant.
    let address = shared_address::<u32>(&memory) + UNIT_POS * 16;
    let mut own = Sequence::<u32>::new();
    #[unroll]
    for i in 0..4usize {
        own.push(words[UNIT_POS as usize * 4 + i]);
    }
    matrix::store_x4(address, 512u32, store, math::vector::<u32, Const<4>>(&own));
    sync_plane();
    let pairs = matrix::load_x4(address, 512u32, load);
    let row = matrix::load_16(address, 512u32);
    matrix::store_16(address, 0u32, row);
    sync_plane();
    let first = UNIT_POS as usize * 4;
    #[unroll]
    for i in 0..4usize {
        out[first + i] = pairs.extract(i);
        out[128 + first + i] = memory[first + i];
    }
}

/// Powers of two, and pairs of neighbours in both types.
#[cube(launch_unchecked, create_dummy_kernel)]
fn math_kernel(numbers: &[f32], powers: &mut [f32], pairs: &mut [u32]) {
    let x = numbers[UNIT_POS as usize];
    let other = numbers[(UNIT_POS ^ 1) as usize];
    powers[UNIT_POS as usize] = math::exp2(x);
    pairs[UNIT_POS as usize] = math::pack(x, other, Elem::Bf16);
    pairs[32 + UNIT_POS as usize] = math::pack(x, other, Elem::F16);
}

/// Number `column` of row `row` of matrix `m`, of the registers of a warp.
fn element(registers: &[u32], m: usize, row: usize, column: usize) -> u16 {
    (registers[(row * 4 + column / 2) * 4 + m] >> (16 * (column % 2))) as u16
}

#[test]
fn matrices_go_to_shared_memory_and_back() {
    on_hopper(|client| {
        let words: Vec<u32> = (0..128).map(|i| i | (i + 1000) << 16).collect();
        for (store, load) in [(false, false), (true, false), (false, true), (true, true)] {
            let source = upload(client, &words);
            let out = upload(client, &[0u32; 256]);
            // SAFETY: a warp reads 128 words and writes 256.
            unsafe {
                matrices_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(32),
                    arg(&source, 128),
                    arg(&out, 256),
                    store,
                    load,
                );
            }
            let got = download::<u32>(client, out);
            for m in 0..4 {
                for row in 0..8 {
                    for column in 0..8 {
                        let at = |swap: bool| if swap { (column, row) } else { (row, column) };
                        let (stored, loaded) = (at(store), at(store != load));
                        let in_memory = got[128 + (m * 8 + row) * 4 + column / 2] >> (16 * (column % 2));
                        assert_eq!(in_memory as u16, element(&words, m, stored.0, stored.1));
                        assert_eq!(element(&got, m, row, column), element(&words, m, loaded.0, loaded.1));
                    }
                }
            }
        }
    });
}

#[test]
fn powers_and_pairs_are_rounded() {
    on_hopper(|client| {
        let mut numbers: Vec<f32> = (0..32).map(|i| i as f32 * 1.37 - 20.0).collect();
        numbers[3] = f32::NEG_INFINITY;
        numbers[4] = -200.0;
        // Halfway between two of bf16, where the even one is below and above.
        numbers[6] = 1.0 + 1.0 / 256.0;
        numbers[7] = 1.0 + 3.0 / 256.0;
        let source = upload(client, &numbers);
        let (powers, pairs) = (upload(client, &[0f32; 32]), upload(client, &[0u32; 64]));
        // SAFETY: a warp reads and writes a number for each thread, and two pairs.
        unsafe {
            math_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(32),
                arg(&source, 32),
                arg(&powers, 32),
                arg(&pairs, 64),
            );
        }
        for (got, x) in download::<f32>(client, powers).into_iter().zip(&numbers) {
            let want = f64::from(*x).exp2();
            let tolerance = want * 3e-7;
            assert!((f64::from(got) - want).abs() <= tolerance + 1e-38, "2^{x}: {got}, not {want}");
        }
        let got = download::<u32>(client, pairs);
        for (unit, low) in numbers.iter().enumerate() {
            let high = numbers[unit ^ 1];
            let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
            assert_eq!(got[unit], pair(bf16::from_f32(*low).to_bits(), bf16::from_f32(high).to_bits()));
            assert_eq!(got[32 + unit], pair(f16::from_f32(*low).to_bits(), f16::from_f32(high).to_bits()));
        }
    });
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::buffer;
    let (one, units) = (|| CubeCount::Static(1, 1, 1), || CubeDim::new_1d(32));
    let matrices = sm90_entry("ptx.matrices", move |device, target| {
        matrices_kernel::create_dummy_kernel(device, target, one(), units(), buffer(), buffer(), true, false)
    });
    let math = sm90_entry("ptx.math", move |device, target| {
        math_kernel::create_dummy_kernel(device, target, one(), units(), buffer(), buffer(), buffer())
    });
    vec![matrices, math]
}
