//! Instructions of NVIDIA's GPUs that CubeCL has no function for, each as a `#[cube]` function. Only kernels use them,
//! and nothing else in the tree writes assembly.
//!
//! The sections that the docs of the functions name are those of NVIDIA's manual "Parallel Thread Execution ISA". Words
//! that mean the same: unit and thread, plane and warp, cube and CTA. A warpgroup is four neighbouring warps, the first
//! of which has a number divisible by four. A kernel with these functions needs `sm_90a` unless a function says
//! otherwise; what is in [`mod@tcgen05`] is for `sm_100a`, and [`mod@wgmma`] for `sm_90a` alone.
//!
//! Shared memory is addressed by a `u32` from [`shared_address()`]: it is what the instructions take, and to add to it
//! costs one instruction. CubeCL does not see what is read and written through such an address. It keeps shared memory
//! for the whole kernel, but a kernel that reads with CubeCL's own slices what an instruction has written needs a
//! barrier in between, as for another thread's writes.
//!
//! What assembly in CubeCL needs, and these functions do:
//! * Inputs are read first ([`read()`]): of a mutable variable `in(_)` passes the address.
//! * Options state what memory is read and written. Without them, a block counts as writing to every buffer.
//! * Every operand occurs in the text; those that are written by number do so in a comment at its end.
//! * Labels are in a scope of their own, since a function is inlined wherever it is called.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

pub(crate) mod atomic;
pub(crate) mod barrier;
pub(crate) mod cluster;
pub(crate) mod copy;
pub(crate) mod fence;
pub(crate) mod math;
pub(crate) mod matrix;
pub(crate) mod mbarrier;
pub(crate) mod peer;
pub(crate) mod registers;
pub(crate) mod tcgen05;
#[cfg(test)]
mod tests;
pub(crate) mod tma;
pub(crate) mod warp;
pub(crate) mod wgmma;

/// The value of a variable, where assembly would be given its address; of a field, a copy that later assignments do not change.
#[cube]
pub(crate) fn read<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}

/// The address of shared memory within the cube's shared memory, as instructions with `.shared` take it.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(memory: &Shared<[T]>) -> u32 {
    generic_to_shared::<T>(memory.as_slice().as_ptr())
}
