//! One thread of a warp, values that are the same in all of a warp, and a counter.

use cubecl::prelude::*;

use super::read;

/// True in one thread of the warp, always the same: `elect.sync` (PTX ISA, "elect.sync").
///
/// All threads of a warp. What a single thread issues (copies, mbarriers) is chosen with this, in a warp chosen with
/// [`uniform()`]: ptxas then knows that one thread runs, where a comparison with `UNIT_POS` makes it loop over the
/// warp.
#[cube]
pub(crate) fn elect() -> bool {
    let elected: u32;
    gpu_asm!(
        "{{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 {elected}, 1, 0, p;\n}}",
        elected = out(_) elected,
        options(nomem)
    );
    elected != 0u32
}

/// The value that the warp's first thread has: `shfl.sync.idx` (PTX ISA, "shfl.sync").
///
/// All threads of a warp. For indices of warps and warpgroups: ptxas then keeps them in uniform registers and branches
/// by them without masks.
#[cube]
pub(crate) fn uniform(value: u32) -> u32 {
    let first: u32;
    gpu_asm!(
        "shfl.sync.idx.b32 {first}, {value}, 0, 31, 0xffffffff;",
        first = out(_) first,
        value = in(_) read::<u32>(value),
        options(nomem)
    );
    first
}

/// `count + 1`, which the compiler cannot see through.
///
/// It takes a loop whose body is assembly for a small one and unrolls it four times. A loop that counts with this has
/// no number of rounds that it knows.
#[cube]
pub(crate) fn next(count: u32) -> u32 {
    let sum: u32;
    gpu_asm!(
        "add.u32 {sum}, {count}, 1;",
        sum = out(_) sum,
        count = in(_) read::<u32>(count),
        options(nomem)
    );
    sum
}
