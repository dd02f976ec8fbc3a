//! Products of matrices by a cube or a pair of cubes, with accumulators in tensor memory: `tcgen05`, on `sm_100a`.
//!
//! PTX ISA 9.7.16, "TensorCore 5th Generation Family Instructions". `D[m, n] = A[m, k] B[k, n]`, added to D or not, where
//! A and B are bf16 or f16, D is f32, and an instruction takes 16 terms (a step).
//!
//! Tensor memory has 128 lanes and 512 columns of 32 bits. An address is a lane in its upper and a column in its lower 16
//! bits. Warp `w` reaches the lanes `32 * (w % 4) ..` and 31 more. Where a product's rows lie (9.7.16.10.5, "Data Path
//! Layout Organization"):
//! * One cube, `m` 64 (layout F): row `r` in lane `32 * (r / 16) + r % 16` plus the lane of D's address, 0 or 16. So two such
//!   matrices share columns. A in tensor memory lies likewise, with the same lane: both halves read a copy of their own.
//! * A pair, `m` 128 (layout B): each cube has 64 rows, row `r` in lane `r` with the first half of the columns and in lane
//!   `64 + r` with the second.
//!
//! Everything is asynchronous, and says so in its own way:
//! * Products run in the order in which their thread issues them. What they read and write may be touched again after a
//!   wait for the mbarrier of [`commit()`].
//! * [`load()`] waits for itself. After [`store()`], [`wait_for_stores()`].
//! * mbarriers and barriers order nothing of this by themselves: [`fence_before()`] comes before the arrival and
//!   [`fence_after()`] after the wait.
//! * Products read shared memory through the asynchronous proxy: after plain stores, [`crate::ptx::fence::async_shared()`].

mod mma;

use cubecl::prelude::*;

pub(crate) use self::mma::{Layout, Mma, Source, commit, commit_pair, descriptor, mma_ss, mma_ts};
use super::read;

/// The lane 16 of an address, and the distance of neighbouring lanes.
pub(crate) const LANE: u32 = 1 << 16;

/// Whose tensor cores and memories an instruction uses. All of a kernel's instructions name the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Cubes {
    /// The own cube's: `.cta_group::1`.
    One,
    /// Those of the cube and of the other one whose rank in the cluster differs in the last bit: `.cta_group::2`.
    Pair,
}

impl Cubes {
    const fn count(self) -> usize {
        match self {
            Cubes::One => 1,
            Cubes::Pair => 2,
        }
    }
}

/// Takes `columns` columns of tensor memory, a power of two from 32 on, and writes their address to shared memory:
/// `tcgen05.alloc` and `tcgen05.relinquish_alloc_permit` (9.7.16.7).
///
/// One whole warp, for a pair one in each cube. It waits until there are as many: a cube that has none left waits for the
/// end of another one on its multiprocessor. Others read the address when they have synchronised with the warp. Nothing more
/// is taken afterwards, and all is given back before the kernel ends.
#[cube]
pub(crate) fn allocate(to: u32, #[comptime] columns: u32, #[comptime] cubes: Cubes) {
    let group = comptime!(cubes.count());
    gpu_asm!(
        "tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [{to}], {columns};\n",
        "tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;",
        to = in(_) read::<u32>(to),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Gives the columns back: `tcgen05.dealloc` (9.7.16.7).
///
/// The warp that took them, for a pair both. Everyone else is done with them, and has synchronised with the warp after
/// [`fence_before()`].
#[cube]
pub(crate) fn deallocate(address: u32, #[comptime] columns: u32, #[comptime] cubes: Cubes) {
    let group = comptime!(cubes.count());
    gpu_asm!(
        "tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {address}, {columns};",
        address = in(_) read::<u32>(address),
        options(nomem)
    );
}

/// What of tensor memory a warp loads or stores at once (9.7.16.2.3, "Data Movement Shape").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shape {
    /// Thread `t` has all columns of lane `t`: `.32x32b`.
    Lanes,
    /// Of 16 lanes; numbers `2 * i + j` of thread `t` are in column `4 * i + t % 4` of lane `t / 4 + 8 * j`: `.16x128b`. Pairs
    /// of 16-bit numbers of a matrix then lie as [`Shape::Pairs`] has its single ones.
    Singles,
    /// Of 16 lanes; numbers `4 * i + 2 * j + h` of thread `t` are in column `8 * i + 2 * (t % 4) + h` of lane `t / 4 + 8 * j`,
    /// as `wgmma` has its accumulators: `.16x256b`.
    Pairs,
}

impl Shape {
    /// As the instructions write it, with the number of times that fills so many registers.
    fn name(self, registers: usize) -> String {
        let (shape, each) = match self {
            Shape::Lanes => ("32x32b", 1),
            Shape::Singles => ("16x128b", 2),
            Shape::Pairs => ("16x256b", 4),
        };
        let times = registers / each;
        assert!(times.is_power_of_two() && times * each == registers && registers <= 128, "{registers} by {shape}");
        format!("{shape}.x{times}")
    }
}

/// Loads numbers of a warp's lanes and waits for them: `tcgen05.ld` and `tcgen05.wait::ld` (9.7.16.8).
///
/// A whole warp with one address: the warp's first lane, or 16 above, and the first column.
#[cube]
pub(crate) fn load<N: Size>(address: u32, #[comptime] shape: Shape) -> Vector<f32, N> {
    let registers = N::value().comptime();
    let name = comptime!(shape.name(registers));
    let numbers: Vector<f32, N>;
    gpu_asm!(
        "tcgen05.ld.sync.aligned.{name}.b32 {numbers}, [{address}];\ntcgen05.wait::ld.sync.aligned;",
        numbers = out(_) numbers,
        address = in(_) read::<u32>(address),
        options(nomem)
    );
    numbers
}

/// Stores numbers into a warp's lanes: `tcgen05.st` (9.7.16.8).
///
/// As [`load()`], but without waiting.
#[cube]
pub(crate) fn store<T: Scalar, N: Size>(address: u32, numbers: Vector<T, N>, #[comptime] shape: Shape) {
    let registers = N::value().comptime();
    let name = comptime!(shape.name(registers));
    gpu_asm!(
        "tcgen05.st.sync.aligned.{name}.b32 [{address}], {numbers};",
        address = in(_) read::<u32>(address),
        numbers = in(_) read::<Vector<T, N>>(numbers),
        options(nomem)
    );
}

/// Waits until what this thread has stored is there: `tcgen05.wait::st` (9.7.16.8.5).
///
/// A whole warp.
#[cube]
pub(crate) fn wait_for_stores() {
    gpu_asm!("tcgen05.wait::st.sync.aligned;", options(nomem));
}

/// Orders what this thread has done in tensor memory before what others do there after it has synchronised with them:
/// `tcgen05.fence::before_thread_sync` (9.7.16.11).
///
/// Every thread, after its waits for loads and stores and before it arrives.
#[cube]
pub(crate) fn fence_before() {
    gpu_asm!("tcgen05.fence::before_thread_sync;", options(nomem));
}

/// Orders what this thread will do in tensor memory after what others did there before it synchronised with them:
/// `tcgen05.fence::after_thread_sync` (9.7.16.11).
#[cube]
pub(crate) fn fence_after() {
    gpu_asm!("tcgen05.fence::after_thread_sync;", options(nomem));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_fill_registers() {
        assert_eq!(Shape::Pairs.name(128), "16x256b.x32");
        assert_eq!(Shape::Singles.name(16), "16x128b.x8");
        assert_eq!(Shape::Lanes.name(64), "32x32b.x64");
    }
}
