//! All of it together: a warpgroup that loads tiles through a ring, and one that multiplies them with more registers.

use super::*;
use crate::ptx::wgmma::{self, Elem, Layout, Mma, Source};
use crate::ptx::{mbarrier, registers, shared_address, tma, warp};

/// Bytes of a stage's tile of A, and of its tiles of both.
const A_BYTES: u32 = 64 * 128;
const STAGE_BYTES: u32 = A_BYTES + 256 * 128;
const STAGES: u32 = 4;

/// Columns of the result.
const N: usize = 256;

/// A stage's product.
const STEP: Mma = Mma {
    n: N,
    steps: 4,
    elem: Elem::Bf16,
    a: Source::Shared(Layout::Terms { rows: 64 }),
    b: Layout::Terms { rows: N },
    groups: 1,
    per_step: 1,
};

/// A[64, 64 k] B[256, 64 k] (transposed).
#[cube(launch_unchecked, create_dummy_kernel)]
fn gemm_kernel(a: &TensorMap<bf16, Tiled>, b: &TensorMap<bf16, Tiled>, out: &mut [f32], k: u32) {
    let ring = Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * STAGE_BYTES / 4) as usize), 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(comptime!(2 * STAGES as usize), 8usize);
    let first = shared_address::<u32>(&ring);
    let full = shared_address::<u64>(&bars);
    let empty = full + comptime!(8 * STAGES);
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(STAGES) {
            mbarrier::init(full + stage * 8, 1u32);
            // One arrival of each warp: a warp that has waited for a product knows of its own part.
            mbarrier::init(empty + stage * 8, 4u32);
        }
        mbarrier::fence_init();
    }
    sync_cube();
    if warp::uniform(UNIT_POS / 128) == 1 {
        registers::fewer(24u32);
        if warp::uniform(UNIT_POS / 32) == 4 && warp::elect() {
            let a = tma::tensor_map_address::<bf16, Tiled>(a);
            let b = tma::tensor_map_address::<bf16, Tiled>(b);
            let mut tile = 0u32;
            while tile < k {
                let stage = tile % STAGES;
                let bar = full + stage * 8;
                let at = first + stage * STAGE_BYTES;
                mbarrier::wait(empty + stage * 8, ((tile / STAGES) & 1) ^ 1);
                mbarrier::arrive_expect(bar, comptime!(STAGE_BYTES).runtime());
                tma::load_2d(at, a, bar, i32::cast_from(tile * 64), 0i32);
                tma::load_2d(at + A_BYTES, b, bar, i32::cast_from(tile * 64), 0i32);
                tile = warp::next(tile);
            }
        }
    } else {
        registers::more(240u32);
        let mut acc = Vector::<f32, Const<128>>::zeroed();
        let mut tile = 0u32;
        while tile < k {
            let stage = tile % STAGES;
            let at = first + stage * STAGE_BYTES;
            let a = wgmma::descriptor(at, comptime!(Layout::Terms { rows: 64 }));
            let b = wgmma::descriptor(at + A_BYTES, comptime!(Layout::Terms { rows: N }));
            mbarrier::wait(full + stage * 8, (tile / STAGES) & 1);
            let sum = wgmma::mma_ss::<Const<128>>(acc, a, b, comptime!(STEP));
            acc = wgmma::wait::<Const<128>>(sum, 0u32);
            mbarrier::arrive_if(empty + stage * 8, UNIT_POS_PLANE == 0);
            tile = warp::next(tile);
        }
        #[unroll]
        for i in 0..128usize {
            out[i * 128 + UNIT_POS as usize] = acc.extract(i);
        }
    }
}

#[test]
fn a_ring_feeds_products() {
    on_hopper(|client| {
        for k in [1, 4, 9, 33] {
            let terms = 64 * k;
            let (a, b) = (random(6, 64 * terms), random(7, N * terms));
            let rounded = |values: &[f32]| -> Vec<bf16> { values.iter().copied().map(bf16::from_f32).collect() };
            let (a_buffer, b_buffer) = (upload(client, &rounded(&a)), upload(client, &rounded(&b)));
            let out = upload(client, &vec![f32::NAN; 64 * N]);
            // SAFETY: the kernel writes the 64 * 256 sums.
            unsafe {
                gemm_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(256),
                    map(&a_buffer, &[64, terms], &[64, 64], FloatKind::BF16),
                    map(&b_buffer, &[N, terms], &[N, 64], FloatKind::BF16),
                    arg(&out, 64 * N),
                    k as u32,
                );
            }
            let got = download::<f32>(client, out);
            for row in 0..64 {
                for column in 0..N {
                    let factors = a[row * terms..][..terms].iter().zip(&b[column * terms..][..terms]);
                    let want: f64 = factors.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    let unit = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
                    let got = got[(column / 8 * 4 + row % 16 / 8 * 2 + column % 2) * 128 + unit];
                    assert_eq!(f64::from(got), want, "{terms} terms, row {row}, column {column}");
                }
            }
        }
    });
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{buffer, handle};
    vec![sm90_entry("ptx.gemm", |device, target| {
        let tensor = |rows: usize| map(&handle(64), &[rows, 64], &[rows, 64], FloatKind::BF16);
        let (one, units) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(256));
        gemm_kernel::create_dummy_kernel(device, target, one, units, tensor(64), tensor(N), buffer(), 1)
    })]
}
