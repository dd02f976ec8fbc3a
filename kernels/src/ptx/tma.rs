//! Tiles from global to shared memory and back, copied by the tensor memory accelerator.
//!
//! `cp.async.bulk.tensor`, PTX ISA, "Data Movement and Conversion Instructions: Tensor copy". A [`tiled_map`] describes
//! the tensor and the tile; the kernel takes it as a `&TensorMap<E, Tiled>`, of which [`tensor_map_address()`] is what
//! the functions take. One thread issues a copy ([`crate::ptx::warp::elect()`]).
//!
//! Coordinates are those of the tile's first element, in elements, the fastest dimension first: the opposite of the
//! order of shapes and strides. What of a tile lies outside of the tensor is zero when it is loaded, and is not written when it
//! is stored. For a load they may be negative; a store with a negative one ends the kernel with "illegal instruction" (seen
//! on an H200 with CUDA 13).
//!
//! In shared memory a tile is packed, its fastest dimension first, and starts at an address divisible by 128; with
//! 128-byte swizzle at one divisible by 1024, and its rows have 128 bytes: then 16-byte unit `u` of row `r` lies at
//! unit `u ^ (r % 8)`.

use cubecl::prelude::*;
use cubecl::server::BufferBinding;
pub(crate) use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::read;

/// The map of a tensor that is copied in tiles.
///
/// `shape` and `strides` are those of the tensor in elements, slowest dimension first, `tile` has as many numbers. The
/// last stride is 1; all others are multiples of 16 bytes, as is the buffer's start. A dimension of the tile has at
/// most 256 elements, the last at most 128 bytes with that swizzle.
///
/// # Safety
/// The elements that shape and strides reach are in the buffer.
pub(crate) unsafe fn tiled_map(
    handle: BufferBinding,
    shape: &[usize],
    strides: &[usize],
    tile: &[usize],
    elem: ElemType,
    swizzle: TensorMapSwizzle,
) -> TensorMapArg<Tiled> {
    assert!(shape.len() == strides.len() && shape.len() == tile.len() && strides.last() == Some(&1));
    let (strides, shape) = (strides.into(), shape.into());
    let tensor = TensorArg::Handle { handle: TensorBinding { handle, strides, shape, tiling: Default::default() } };
    TensorMapArg::new(TiledArgs { tile_size: tile.into() }, tensor, elem).with_swizzle(swizzle)
}

/// Starts to fetch a map, so that the first copy does not wait for it: `prefetch.tensormap` (PTX ISA, "prefetch,
/// prefetchu").
#[cube]
pub(crate) fn prefetch(map: u64) {
    gpu_asm!("prefetch.tensormap [{map}];", map = in(_) read::<u64>(map), options(nomem));
}

/// Loads a tile of a matrix into `shared`: `cp.async.bulk.tensor.2d`.
///
/// One thread. The copy adds its bytes to those that have come to the mbarrier `bar`, which the same or another thread
/// has announced ([`crate::ptx::mbarrier::arrive_expect()`]). The memory is the copy's own until a wait for that phase
/// has returned; before, threads that have read or written it must have synchronised with this one.
#[cube]
pub(crate) fn load_2d(shared: u32, map: u64, bar: u32, x: i32, y: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        " [{shared}], [{map}, {{{x}, {y}}}], [{bar}];",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`load_2d()`] of a tensor of rank 3: `cp.async.bulk.tensor.3d`.
#[cube]
pub(crate) fn load_3d(shared: u32, map: u64, bar: u32, x: i32, y: i32, z: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        " [{shared}], [{map}, {{{x}, {y}, {z}}}], [{bar}];",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        z = in(_) read::<i32>(z),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`load_2d()`] of a tensor of rank 5: `cp.async.bulk.tensor.5d`.
#[cube]
#[allow(clippy::too_many_arguments, reason = "the coordinates of the instruction")]
pub(crate) fn load_5d(shared: u32, map: u64, bar: u32, x: i32, y: i32, z: i32, u: i32, v: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        " [{shared}], [{map}, {{{x}, {y}, {z}, {u}, {v}}}], [{bar}];",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        z = in(_) read::<i32>(z),
        u = in(_) read::<i32>(u),
        v = in(_) read::<i32>(v),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// Loads `bytes` bytes, those that `source` begins with, into `shared`: `cp.async.bulk` (PTX ISA, "Data Movement and Conversion
/// Instructions: cp.async.bulk").
///
/// As [`load_2d()`], without a map: both addresses and the number of bytes are multiples of 16.
#[cube]
pub(crate) fn load_bytes<T: CubePrimitive>(shared: u32, source: &[T], bytes: u32, bar: u32) {
    let source = source.as_ptr();
    gpu_asm!(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{shared}], [{source}], {bytes}, [{bar}];",
        shared = in(_) read::<u32>(shared),
        source = mem_in(_) source,
        bytes = in(_) read::<u32>(bytes),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// Loads four rows of a matrix, one below the other in `shared`, from column `x` on: `cp.async.bulk.tensor.2d` in the mode
/// `.tile::gather4` (PTX ISA, "Tensors: tiled mode, gather4"). sm_100a.
///
/// As [`load_2d()`], with a map whose tiles have one row. A row that the tensor has not, such as -1, is zero; its bytes count.
#[cube]
#[allow(clippy::too_many_arguments, reason = "the coordinates of the instruction")]
pub(crate) fn load_rows(shared: u32, map: u64, bar: u32, x: i32, row_0: i32, row_1: i32, row_2: i32, row_3: i32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes",
        " [{shared}], [{map}, {{{x}, {row_0}, {row_1}, {row_2}, {row_3}}}], [{bar}];",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        row_0 = in(_) read::<i32>(row_0),
        row_1 = in(_) read::<i32>(row_1),
        row_2 = in(_) read::<i32>(row_2),
        row_3 = in(_) read::<i32>(row_3),
        bar = in(_) read::<u32>(bar),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// How long the L2 cache should keep what is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Keep {
    /// Read once: goes first.
    Shortly,
    /// Read again by others: goes last.
    Long,
}

/// A cache policy for the loads with a hint: `createpolicy.fractional` (PTX ISA, "createpolicy").
///
/// Any thread, once, before the loop with the loads.
#[cube]
pub(crate) fn cache_policy(#[comptime] keep: Keep) -> u64 {
    let priority = comptime!(match keep {
        Keep::Shortly => "evict_first",
        Keep::Long => "evict_last",
    });
    let policy: u64;
    gpu_asm!("createpolicy.fractional.L2::{priority}.b64 {policy}, 1.0;", policy = out(_) policy, options(nomem));
    policy
}

/// [`load_2d()`] with a [`cache_policy()`].
#[cube]
pub(crate) fn load_2d_with(shared: u32, map: u64, bar: u32, x: i32, y: i32, policy: u64) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint",
        " [{shared}], [{map}, {{{x}, {y}}}], [{bar}], {policy};",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        bar = in(_) read::<u32>(bar),
        policy = in(_) read::<u64>(policy),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`load_2d()`] into several cubes of the cluster: `.multicast::cluster`.
///
/// One thread of one cube. Bit `c` of `cubes` stands for the cube with rank `c`: the tile comes to the address `shared`
/// of each, and its bytes to the mbarrier at `bar` of each, where each has to announce them itself. All their mbarriers
/// must be initialised, and all must be done with the memory, before.
#[cube]
pub(crate) fn load_2d_multicast(shared: u32, map: u64, bar: u32, x: i32, y: i32, cubes: u16) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster",
        " [{shared}], [{map}, {{{x}, {y}}}], [{bar}], {cubes};",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        bar = in(_) read::<u32>(bar),
        cubes = in(_) read::<u16>(cubes),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// [`load_2d_multicast()`] of a tensor of rank 3.
#[cube]
#[allow(clippy::too_many_arguments, reason = "the coordinates of the instruction")]
pub(crate) fn load_3d_multicast(shared: u32, map: u64, bar: u32, x: i32, y: i32, z: i32, cubes: u16) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster",
        " [{shared}], [{map}, {{{x}, {y}, {z}}}], [{bar}], {cubes};",
        shared = in(_) read::<u32>(shared),
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        z = in(_) read::<i32>(z),
        bar = in(_) read::<u32>(bar),
        cubes = in(_) read::<u16>(cubes),
        options(explicit_mem, reads_address_space global, writes_address_space shared)
    );
}

/// Writes a tile of `shared` to a matrix: `cp.async.bulk.tensor.2d`.
///
/// One thread. All threads that have written the tile must have done
/// [`crate::ptx::fence::async_shared()`] and synchronised with it. The copy belongs to this thread's next
/// [`commit_stores()`], and until the [`wait_for_stores()`] after that the tile must stay as it is.
#[cube]
pub(crate) fn store_2d(map: u64, x: i32, y: i32, shared: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{map}, {{{x}, {y}}}], [{shared}];",
        map = in(_) read::<u64>(map),
        x = in(_) read::<i32>(x),
        y = in(_) read::<i32>(y),
        shared = in(_) read::<u32>(shared),
        options(explicit_mem, reads_address_space shared, writes_address_space global)
    );
}

/// Makes a group of the stores that this thread has started since its last group: `cp.async.bulk.commit_group`.
#[cube]
pub(crate) fn commit_stores() {
    gpu_asm!(
        "cp.async.bulk.commit_group;",
        options(explicit_mem, reads_address_space shared, writes_address_space global)
    );
}

/// Waits until all but the last `pending` groups of this thread have been written: `cp.async.bulk.wait_group`.
///
/// The thread that has started the stores. Others may write the shared memory anew when they have synchronised with it.
#[cube]
pub(crate) fn wait_for_stores(#[comptime] pending: u32) {
    gpu_asm!(
        "cp.async.bulk.wait_group {pending};",
        options(explicit_mem, reads_address_space shared, writes_address_space global)
    );
}
