//! Products of matrices, against f64.

use half::f16;

use super::*;
use crate::ptx::wgmma::{self, Elem, Layout, Mma, Source};
use crate::ptx::{fence, math, mbarrier, shared_address, tma, warp};

/// Terms of the products: two tiles of 64.
const TERMS: usize = 128;

/// `rounds` times A[64, 128] B[128, n] with A and B loaded as tiles, or A from registers.
#[cube(launch_unchecked, create_dummy_kernel)]
fn product_kernel<E: Float, N: Size>(
    a_tensor: &TensorMap<E, Tiled>,
    b_tensor: &TensorMap<E, Tiled>,
    a_pairs: &[u32],
    out: &mut [f32],
    rounds: u32,
    #[comptime] mma: Mma,
    #[define(E)] _elem: ElemType,
) {
    let a = Shared::<[u32]>::new_aligned_slice(comptime!(64 * TERMS / 2), 1024usize);
    let b = Shared::<[u32]>::new_aligned_slice(comptime!(mma.n * TERMS / 2), 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
    let (a_at, b_at) = (shared_address::<u32>(&a), shared_address::<u32>(&b));
    let bar = shared_address::<u64>(&bars);
    if UNIT_POS == 0 {
        mbarrier::init(bar, 1u32);
        mbarrier::fence_init();
    }
    sync_cube();
    let warp = warp::uniform(UNIT_POS / 32);
    if warp == 0 && warp::elect() {
        let a_map = tma::tensor_map_address::<E, Tiled>(a_tensor);
        let b_map = tma::tensor_map_address::<E, Tiled>(b_tensor);
        mbarrier::arrive_expect(bar, comptime!(((64 + mma.n) * TERMS * 2) as u32).runtime());
        // Tiles that follow each other along a row.
        #[unroll]
        for tile in 0..comptime!(tiles(a_layout(mma), 64)) {
            let x = comptime!(tile as i32 * 64).runtime();
            tma::load_2d(a_at + comptime!((tile * rows(a_layout(mma), 64) * 128) as u32), a_map, bar, x, 0i32);
        }
        #[unroll]
        for tile in 0..comptime!(tiles(mma.b, mma.n)) {
            let x = comptime!(tile as i32 * 64).runtime();
            tma::load_2d(b_at + comptime!((tile * rows(mma.b, mma.n) * 128) as u32), b_map, bar, x, 0i32);
        }
    }
    mbarrier::wait(bar, 0u32);
    let lane = UNIT_POS % 32;
    let row = warp * 16 + lane / 4;
    let b_desc = wgmma::descriptor(b_at, mma.b);
    let acc = if comptime!(matches!(mma.a, Source::Registers)) {
        from_registers::<N>(a_pairs, row, b_desc, rounds, mma)
    } else {
        from_shared::<N>(wgmma::descriptor(a_at, comptime!(a_layout(mma))), b_desc, rounds, mma)
    };
    #[unroll]
    for i in 0..comptime!(mma.n / 2) {
        let column = (lane % 4) as usize * 2 + i / 4 * 8 + i % 2;
        out[(row as usize + i / 2 % 2 * 8) * mma.n + column] = acc.extract(i);
    }
}

/// The product with A from shared memory.
#[cube]
fn from_shared<N: Size>(a: u64, b: u64, rounds: u32, #[comptime] mma: Mma) -> Vector<f32, N> {
    let mut acc = wgmma::wait::<N>(wgmma::mma_ss_zero::<N>(a, b, mma), 0u32);
    let mut round = 1u32;
    while round < rounds {
        acc = wgmma::wait::<N>(wgmma::mma_ss::<N>(acc, a, b, mma), 0u32);
        round = warp::next(round);
    }
    acc
}

/// The product with A from registers; `row` is this unit's first.
#[cube]
fn from_registers<N: Size>(pairs: &[u32], row: u32, b: u64, rounds: u32, #[comptime] mma: Mma) -> Vector<f32, N> {
    let mut own = Sequence::<u32>::new();
    #[unroll]
    for i in 0..comptime!(TERMS / 4) {
        // Rows from 0 or 8, columns from 0 or 8 of a step.
        let at = (row as usize + i % 2 * 8) * comptime!(TERMS / 2) + UNIT_POS as usize % 4 + i / 2 * 4;
        own.push(pairs[at]);
    }
    let own = math::vector::<u32, Const<32>>(&own);
    let mut acc = wgmma::wait::<N>(wgmma::mma_rs_zero::<N, Const<32>>(own, b, mma), 0u32);
    let mut round = 1u32;
    while round < rounds {
        acc = wgmma::wait::<N>(wgmma::mma_rs::<N, Const<32>>(acc, own, b, mma), 0u32);
        round = warp::next(round);
    }
    acc
}

/// How A lies, if it is in shared memory.
fn a_layout(mma: Mma) -> Layout {
    match mma.a {
        Source::Shared(layout) => layout,
        Source::Registers => Layout::Terms { rows: 64 },
    }
}

/// Rows of a tile of a matrix with this many rows (of A) or columns (of B).
fn rows(layout: Layout, count: usize) -> usize {
    match layout {
        Layout::Terms { .. } => count,
        Layout::Across { .. } => TERMS,
        Layout::Cores { .. } => unreachable!("tile loads do not make it"),
    }
}

/// Tiles of it.
fn tiles(layout: Layout, count: usize) -> usize {
    count * TERMS / (rows(layout, count) * 64)
}

/// (A B) V of A[64, 128], B[64, 128] (transposed) and V[64, 64], the first product in two groups of which the second is
/// waited for later, its sums packed as the A of the second. A and B are written to shared memory by stores.
#[cube(launch_unchecked, create_dummy_kernel)]
fn chain_kernel(a_words: &[u32], b_words: &[u32], v_words: &[u32], out: &mut [f32]) {
    let mut a = Shared::<[u32]>::new_aligned_slice(4096usize, 1024usize);
    let mut b = Shared::<[u32]>::new_aligned_slice(4096usize, 1024usize);
    let mut v = Shared::<[u32]>::new_aligned_slice(2048usize, 1024usize);
    #[unroll]
    for i in 0..32usize {
        let at = i * 128 + UNIT_POS as usize;
        a[at] = a_words[at];
        b[at] = b_words[at];
        if comptime!(i < 16) {
            v[at] = v_words[at];
        }
    }
    fence::async_shared();
    sync_cube();
    let half = comptime!(Layout::Terms { rows: 64 });
    let first = comptime!(Mma {
        n: 64,
        steps: 4,
        elem: Elem::Bf16,
        a: Source::Shared(Layout::Terms { rows: 64 }),
        b: Layout::Terms { rows: 64 },
        groups: 0,
        per_step: 1,
    });
    let a_at = shared_address::<u32>(&a);
    let b_at = shared_address::<u32>(&b);
    // Either half of the terms with an accumulator of its own; the first group is not committed with the product.
    let left = wgmma::mma_ss_zero::<Const<32>>(wgmma::descriptor(a_at, half), wgmma::descriptor(b_at, half), first);
    wgmma::commit();
    let right = wgmma::mma_ss_zero::<Const<32>>(
        wgmma::descriptor(a_at + 8192, half),
        wgmma::descriptor(b_at + 8192, half),
        comptime!(Mma { groups: 1, ..first }),
    );
    let left = wgmma::wait::<Const<32>>(left, 1u32);
    let right = wgmma::wait::<Const<32>>(right, 0u32);
    let mut pairs = Sequence::<u32>::new();
    #[unroll]
    for i in 0..16usize {
        let low = left.extract(2 * i) + right.extract(2 * i);
        let high = left.extract(2 * i + 1) + right.extract(2 * i + 1);
        pairs.push(math::pack(low, high, Elem::Bf16));
    }
    let across = comptime!(Layout::Across { terms: 64 });
    let second = comptime!(Mma { a: Source::Registers, b: Layout::Across { terms: 64 }, groups: 1, ..first });
    let pairs = wgmma::pin::<Const<16>>(math::vector::<u32, Const<16>>(&pairs));
    wgmma::fence();
    let sum =
        wgmma::mma_rs_zero::<Const<32>, Const<16>>(pairs, wgmma::descriptor(shared_address::<u32>(&v), across), second);
    let sum = wgmma::wait::<Const<32>>(sum, 0u32);
    #[unroll]
    for i in 0..32usize {
        out[i * 128 + UNIT_POS as usize] = sum.extract(i);
    }
}

/// The bits of numbers in one of the types.
fn bits(values: &[f32], elem: Elem) -> Vec<u16> {
    let bits = |x: &f32| match elem {
        Elem::Bf16 => bf16::from_f32(*x).to_bits(),
        Elem::F16 => f16::from_f32(*x).to_bits(),
    };
    values.iter().map(bits).collect()
}

fn kind(elem: Elem) -> FloatKind {
    match elem {
        Elem::Bf16 => FloatKind::BF16,
        Elem::F16 => FloatKind::F16,
    }
}

/// The words of numbers.
fn words(bits: &[u16]) -> Vec<u32> {
    bits.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect()
}

/// The matrix `[terms, count]` from `[count, terms]`.
fn transposed(values: &[f32], count: usize) -> Vec<f32> {
    let terms = values.len() / count;
    (0..values.len()).map(|i| values[i % count * terms + i / count]).collect()
}

/// The forms that are tested.
fn forms() -> Vec<(String, Mma)> {
    let mut forms = Vec::new();
    for elem in [Elem::Bf16, Elem::F16] {
        for n in [8, 64, 128, 256] {
            let terms = |rows: usize| Layout::Terms { rows };
            let across = Layout::Across { terms: TERMS };
            let mut push = |name: &str, a: Source, b: Layout| {
                let mma = Mma { n, steps: TERMS / 16, elem, a, b, groups: 1, per_step: 1 };
                forms.push((format!("{name}.{}.{n}", elem.name()), mma));
            };
            push("ss", Source::Shared(terms(64)), terms(n));
            push("rs", Source::Registers, terms(n));
            if n >= 64 {
                push("ss_across", Source::Shared(terms(64)), across);
                push("rs_across", Source::Registers, across);
                push("a_across", Source::Shared(across), across);
            }
        }
    }
    forms
}

/// The map of a matrix whose rows (of A) or columns (of B) have terms, or whose terms have them.
fn factor(buffer: &Handle, layout: Layout, count: usize, elem: Elem) -> TensorMapArg<Tiled> {
    let shape = match layout {
        Layout::Terms { .. } => [count, TERMS],
        Layout::Across { .. } => [TERMS, count],
        Layout::Cores { .. } => unreachable!("tile loads do not make it"),
    };
    map(buffer, &shape, &[rows(layout, count), 64], kind(elem))
}

#[test]
fn products_of_matrices() {
    on_hopper(|client| {
        for (name, mma) in forms() {
            let (n, rounds) = (mma.n, 3);
            let (a, b) = (random(1, 64 * TERMS), random(2, n * TERMS));
            let lies = |values: &[f32], layout: Layout, count: usize| match layout {
                Layout::Terms { .. } => bits(values, mma.elem),
                Layout::Across { .. } => bits(&transposed(values, count), mma.elem),
                Layout::Cores { .. } => unreachable!("tile loads do not make it"),
            };
            let a_buffer = upload(client, &lies(&a, a_layout(mma), 64));
            let b_buffer = upload(client, &lies(&b, mma.b, n));
            let pairs = upload(client, &words(&bits(&a, mma.elem)));
            let out = upload(client, &vec![f32::NAN; 64 * n]);
            // SAFETY: buffers and maps have the shapes that the kernel reads and writes.
            unsafe {
                product_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(128),
                    n / 2,
                    factor(&a_buffer, a_layout(mma), 64, mma.elem),
                    factor(&b_buffer, mma.b, n, mma.elem),
                    arg(&pairs, 64 * TERMS / 2),
                    arg(&out, 64 * n),
                    rounds,
                    mma,
                    ElemType::Float(kind(mma.elem)),
                );
            }
            for (at, got) in download::<f32>(client, out).into_iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let terms = a[row * TERMS..][..TERMS].iter().zip(&b[column * TERMS..][..TERMS]);
                let want: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(rounds);
                // The factors are multiples of 1/8: the sums are exact.
                assert_eq!(f64::from(got), want, "{name}, row {row}, column {column}");
            }
        }
    });
}

#[test]
fn the_sums_of_a_product_are_a_factor_of_the_next() {
    on_hopper(|client| {
        let (a, b, v) = (random(3, 64 * 128), random(4, 64 * 128), random(5, 64 * 64));
        // Two tiles of 64 columns, as they lie.
        let tiled = |values: &[f32], columns: usize| {
            let mut lies = vec![0u16; values.len()];
            for (at, bits) in bits(values, Elem::Bf16).into_iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                lies[column / 64 * 4096 + swizzled(row * 64 + column % 64)] = bits;
            }
            upload(client, &words(&lies))
        };
        let out = upload(client, &[f32::NAN; 4096]);
        let (a_words, b_words, v_words) = (tiled(&a, 128), tiled(&b, 128), tiled(&v, 64));
        // SAFETY: the buffers have the sizes of the tiles.
        unsafe {
            chain_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(128),
                arg(&a_words, 4096),
                arg(&b_words, 4096),
                arg(&v_words, 2048),
                arg(&out, 4096),
            );
        }
        let got = download::<f32>(client, out);
        for row in 0..64 {
            let factor: Vec<f64> = (0..64)
                .map(|key| {
                    let sum: f32 = (0..128).map(|i| a[row * 128 + i] * b[key * 128 + i]).sum();
                    bf16::from_f32(sum).to_f64()
                })
                .collect();
            for column in 0..64 {
                let want: f64 = (0..64).map(|key| factor[key] * f64::from(v[key * 64 + column])).sum();
                let unit = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
                let got = f64::from(got[(column / 8 * 4 + row % 16 / 8 * 2 + column % 2) * 128 + unit]);
                assert!((got - want).abs() <= 1e-3, "row {row}, column {column}: {got}, not {want}");
            }
        }
    });
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{buffer, handle};
    let (one, units) = (|| CubeCount::Static(1, 1, 1), || CubeDim::new_1d(128));
    let chain = sm90_entry("ptx.chain", move |device, target| {
        chain_kernel::create_dummy_kernel(device, target, one(), units(), buffer(), buffer(), buffer(), buffer())
    });
    let products = forms().into_iter().map(|(name, mma)| {
        sm90_entry(format!("ptx.{name}"), move |device, target| {
            product_kernel::create_dummy_kernel(
                device,
                target,
                one(),
                units(),
                mma.n / 2,
                factor(&handle(64), a_layout(mma), 64, mma.elem),
                factor(&handle(64), mma.b, mma.n, mma.elem),
                buffer(),
                buffer(),
                1,
                mma,
                ElemType::Float(kind(mma.elem)),
            )
        })
    });
    [chain].into_iter().chain(products).collect()
}
