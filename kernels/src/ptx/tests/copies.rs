//! Tile loads and stores.

use super::*;
use crate::ptx::{barrier, fence, mbarrier, shared_address, tma, warp};

/// How a tile is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Load {
    rank: usize,
    rows: usize,
    keep: Option<tma::Keep>,
}

/// Loads a tile of `rows` rows of 64 columns and writes the memory's words as they lie.
#[cube(launch_unchecked, create_dummy_kernel)]
fn load_kernel(tensor: &TensorMap<bf16, Tiled>, out: &mut [u32], x: i32, y: i32, z: i32, #[comptime] load: Load) {
    let tile = Shared::<[u32]>::new_aligned_slice(comptime!(load.rows * 32), 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
    let bar = shared_address::<u64>(&bars);
    if UNIT_POS == 0 {
        mbarrier::init(bar, 1u32);
        mbarrier::fence_init();
    }
    sync_cube();
    if warp::uniform(UNIT_POS / 32) == 0 && warp::elect() {
        let map = tma::tensor_map_address::<bf16, Tiled>(tensor);
        let at = shared_address::<u32>(&tile);
        tma::prefetch(map);
        // Nothing, in a kernel that is launched as CubeCL does.
        fence::wait_for_predecessor();
        fence::launch_dependents();
        mbarrier::arrive_expect(bar, comptime!(load.rows as u32 * 128).runtime());
        if comptime!(load.rank == 3) {
            tma::load_3d(at, map, bar, x, y, z);
        } else if let Some(keep) = comptime!(load.keep) {
            tma::load_2d_with(at, map, bar, x, y, tma::cache_policy(keep));
        } else {
            tma::load_2d(at, map, bar, x, y);
        }
    }
    mbarrier::wait(bar, 0u32);
    #[unroll]
    for i in 0..comptime!(load.rows / 4) {
        let word = i * 128 + UNIT_POS as usize;
        out[word] = tile[word];
    }
}

/// The first of two cubes loads a tile for both; both write it, and the second tells the first when it is done.
#[cube(launch_unchecked, create_dummy_kernel, cluster_dim = CubeDim::new_3d(2, 1, 1))]
fn multicast_kernel(tensor: &TensorMap<bf16, Tiled>, out: &mut [u32], y: i32) {
    let tile = Shared::<[u32]>::new_aligned_slice(8usize * 32, 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(2usize, 8usize);
    let full = shared_address::<u64>(&bars);
    let done = full + 8;
    if UNIT_POS == 0 {
        mbarrier::init(full, 1u32);
        mbarrier::init(done, 2u32);
        mbarrier::fence_init();
    }
    barrier::sync_cluster();
    if warp::uniform(UNIT_POS / 32) == 0 && warp::elect() {
        mbarrier::arrive_expect(full, 1024u32);
        if CUBE_POS_CLUSTER == 0 {
            let map = tma::tensor_map_address::<bf16, Tiled>(tensor);
            tma::load_2d_multicast(shared_address::<u32>(&tile), map, full, 0i32, y, 3u16);
        }
    }
    mbarrier::wait(full, 0u32);
    #[unroll]
    for i in 0..2usize {
        let word = i * 128 + UNIT_POS as usize;
        out[CUBE_POS_X as usize * 256 + word] = tile[word];
    }
    sync_cube();
    mbarrier::arrive_at_if(done, 0u32, UNIT_POS == 0);
    if CUBE_POS_CLUSTER == 0 {
        mbarrier::wait_cluster(done, 0u32);
        out[512usize] = 1;
    }
    barrier::sync_cluster();
}

/// The words of a tile with swizzle; `get` is given row and column.
fn tile_words(rows: usize, get: impl Fn(usize, usize) -> bf16) -> Vec<u32> {
    let mut tile = vec![bf16::ZERO; rows * 64];
    for at in 0..tile.len() {
        tile[swizzled(at)] = get(at / 64, at % 64);
    }
    tile.chunks(2).map(|pair| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16).collect()
}

/// Loads the tile at `at` (slowest dimension first, as `shape` and `tile`) and compares it.
fn check_load(client: &Client, shape: &[usize], tile: &[usize], at: &[i32], keep: Option<tma::Keep>) {
    let values = numbers(shape.iter().product());
    let source = upload(client, &values);
    let rows: usize = tile[..tile.len() - 1].iter().product();
    let out = upload(client, &vec![u32::MAX; rows * 32]);
    let coordinate = |dim: usize| at.iter().rev().nth(dim).copied().unwrap_or(0);
    // SAFETY: the kernel writes as many words as a tile has.
    unsafe {
        load_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(128),
            map(&source, shape, tile, FloatKind::BF16),
            arg(&out, rows * 32),
            coordinate(0),
            coordinate(1),
            coordinate(2),
            Load { rank: shape.len(), rows, keep },
        );
    }
    let want = tile_words(rows, |row, column| {
        // From the place in the tile to that in the tensor.
        let (mut rest, mut flat, mut stride) = (row * 64 + column, 0, 1);
        for dim in (0..shape.len()).rev() {
            let place = at[dim] + (rest % tile[dim]) as i32;
            if place < 0 || place >= shape[dim] as i32 {
                return bf16::ZERO;
            }
            flat += place as usize * stride;
            rest /= tile[dim];
            stride *= shape[dim];
        }
        values[flat]
    });
    assert_eq!(download::<u32>(client, out), want, "{shape:?} {tile:?} {at:?}");
}

#[test]
fn loads_tiles_with_swizzle_and_zeros_outside() {
    on_hopper(|client| {
        for keep in [None, Some(tma::Keep::Shortly), Some(tma::Keep::Long)] {
            check_load(client, &[96, 192], &[64, 64], &[16, 64], keep);
            check_load(client, &[40, 72], &[64, 64], &[-3, 32], keep);
        }
        check_load(client, &[5, 20, 128], &[1, 16, 64], &[3, 4, 64], None);
        check_load(client, &[5, 20, 128], &[4, 8, 64], &[2, 15, -8], None);
    });
}

/// Stores a tile of 64 rows of 64 columns, which the units have written as it lies with swizzle.
#[cube(launch_unchecked, create_dummy_kernel)]
fn store_kernel(words: &[u32], tensor: &TensorMap<bf16, Tiled>, x: i32, y: i32) {
    let mut tile = Shared::<[u32]>::new_aligned_slice(64usize * 32, 1024usize);
    #[unroll]
    for i in 0..16usize {
        let word = i * 128 + UNIT_POS as usize;
        tile[word] = words[word];
    }
    fence::async_shared();
    sync_cube();
    if warp::uniform(UNIT_POS / 32) == 0 && warp::elect() {
        tma::store_2d(tma::tensor_map_address::<bf16, Tiled>(tensor), x, y, shared_address::<u32>(&tile));
        tma::commit_stores();
        tma::wait_for_stores(0u32);
    }
}

#[test]
fn stores_tiles_but_nothing_outside() {
    on_hopper(|client| {
        for (shape, at) in [([96, 192], [16i32, 64]), ([40, 72], [10, 32]), ([80, 128], [0, 96])] {
            let [rows, columns]: [usize; 2] = shape;
            let tile = numbers(64 * 64);
            let unwritten = bf16::from_f32(-1.0);
            let out = upload(client, &vec![unwritten; rows * columns]);
            let words = tile_words(64, |row, column| tile[row * 64 + column]);
            // SAFETY: the kernel reads as many words as a tile has, and stores none outside of the tensor.
            unsafe {
                store_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(128),
                    arg(&upload(client, &words), words.len()),
                    map(&out, &shape, &[64, 64], FloatKind::BF16),
                    at[1],
                    at[0],
                );
            }
            let stored: Vec<bf16> = download(client, out);
            for (i, value) in stored.into_iter().enumerate() {
                let (row, column) = ((i / columns) as i32 - at[0], (i % columns) as i32 - at[1]);
                let inside = (0..64).contains(&row) && (0..64).contains(&column);
                let want = if inside { tile[(row * 64 + column) as usize] } else { unwritten };
                assert_eq!(value.to_bits(), want.to_bits(), "{i} of {shape:?} {at:?}");
            }
        }
    });
}

#[test]
fn a_tile_comes_to_all_cubes_of_a_cluster() {
    on_hopper(|client| {
        let values = numbers(20 * 64);
        let source = upload(client, &values);
        let out = upload(client, &vec![0u32; 513]);
        // SAFETY: each of the two cubes writes the 256 words of a tile, the first another one.
        unsafe {
            multicast_kernel::launch_unchecked(
                client,
                CubeCount::Static(2, 1, 1),
                CubeDim::new_1d(128),
                map(&source, &[20, 64], &[8, 64], FloatKind::BF16),
                arg(&out, 513),
                5,
            );
        }
        let tile = tile_words(8, |row, column| values[(row + 5) * 64 + column]);
        let want = [tile.clone(), tile, vec![1]].concat();
        assert_eq!(download::<u32>(client, out), want);
    });
}

/// Loads 16 rows by their numbers, four at a time, and writes the memory's words as they lie.
#[cube(launch_unchecked, create_dummy_kernel)]
fn gather_kernel(tensor: &TensorMap<bf16, Tiled>, rows: &[i32], out: &mut [u32], x: i32) {
    let tile = Shared::<[u32]>::new_aligned_slice(16usize * 32, 1024usize);
    let bars = Shared::<[u64]>::new_aligned_slice(1usize, 8usize);
    let bar = shared_address::<u64>(&bars);
    if UNIT_POS == 0 {
        mbarrier::init(bar, 1u32);
        mbarrier::fence_init();
    }
    sync_cube();
    if warp::uniform(UNIT_POS / 32) == 0 && warp::elect() {
        let map = tma::tensor_map_address::<bf16, Tiled>(tensor);
        mbarrier::arrive_expect(bar, comptime!(16 * 128u32).runtime());
        #[unroll]
        for group in 0..4usize {
            let at = shared_address::<u32>(&tile) + comptime!(group as u32 * 4 * 128);
            let (row_0, row_1) = (rows[4 * group], rows[4 * group + 1]);
            tma::load_rows(at, map, bar, x, row_0, row_1, rows[4 * group + 2], rows[4 * group + 3]);
        }
    }
    mbarrier::wait(bar, 0u32);
    #[unroll]
    for i in 0..4usize {
        let word = i * 128 + UNIT_POS as usize;
        out[word] = tile[word];
    }
}

/// In any order, one several times; rows before and behind those of the tensor, and columns behind its, are zeros.
#[test]
fn gathers_rows_and_zeros_for_those_that_are_none() {
    on_blackwell(|client| {
        let (count, width) = (40, 96);
        let values = numbers(count * width);
        let source = upload(client, &values);
        let rows = [3, 39, 0, 3, -1, 7, 8, 9, 12, -1, -1, i32::MIN, 40, 11, i32::MAX, 38];
        for x in [0, 64] {
            let out = upload(client, &[u32::MAX; 16 * 32]);
            // SAFETY: the kernel reads 16 numbers and writes as many words as 16 rows of a tile have.
            unsafe {
                gather_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(128),
                    map(&source, &[count, width], &[1, 64], FloatKind::BF16),
                    arg(&upload(client, &rows), rows.len()),
                    arg(&out, 16 * 32),
                    x as i32,
                );
            }
            let want = tile_words(16, |row, column| match usize::try_from(rows[row]) {
                Ok(row) if row < count && x + column < width => values[row * width + x + column],
                _ => bf16::ZERO,
            });
            assert_eq!(download::<u32>(client, out), want, "from column {x} on");
        }
    });
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{buffer, handle};
    let source = || map(&handle(64), &[1, 1, 64], &[1, 1, 64], FloatKind::BF16);
    let source_of_rows = || map(&handle(64), &[1, 64], &[1, 64], FloatKind::BF16);
    let (one, units) = (|| CubeCount::Static(1, 1, 1), || CubeDim::new_1d(128));
    let mut entries = Vec::new();
    for (name, rank, keep) in
        [("ptx.load_2d", 2, None), ("ptx.load_2d_with", 2, Some(tma::Keep::Shortly)), ("ptx.load_3d", 3, None)]
    {
        let load = Load { rank, rows: 64, keep };
        entries.push(sm90_entry(name, move |device, target| {
            load_kernel::create_dummy_kernel(device, target, one(), units(), source(), buffer(), 0, 0, 0, load)
        }));
    }
    entries.push(sm90_entry("ptx.store_2d", move |device, target| {
        store_kernel::create_dummy_kernel(device, target, one(), units(), buffer(), source(), 0, 0)
    }));
    entries.push(sm90_entry("ptx.multicast", move |device, target| {
        multicast_kernel::create_dummy_kernel(device, target, one(), units(), source(), buffer(), 0)
    }));
    entries.push(
        crate::offline::Entry::new("ptx.load_rows", move |device, target| {
            gather_kernel::create_dummy_kernel(device, target, one(), units(), source_of_rows(), buffer(), buffer(), 0)
        })
        .on(|arch| arch == crate::offline::Arch::Sm100a)
        .unchecked(),
    );
    entries
}
