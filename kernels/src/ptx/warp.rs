//! One thread of a warp, what its threads tell each other, and a counter.
//!
//! The functions name all 32 threads of the warp, which wait for each other there. CubeCL's `plane_*` take `__activemask()`: what
//! has not come back from a branch is left out, and nothing says so (PTX ISA, "activemask": it does not make threads converge).

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

/// The value that the thread `lane` has: `shfl.sync.idx` (PTX ISA, "shfl.sync"). sm_30.
///
/// All threads of a warp.
#[cube]
pub(crate) fn shuffle<T: CubePrimitive>(value: T, lane: u32) -> T {
    let other: T;
    gpu_asm!(
        "shfl.sync.idx.b32 {other}, {value}, {lane}, 31, 0xffffffff;",
        other = out(_) other,
        value = in(_) read::<T>(value),
        lane = in(_) read::<u32>(lane),
        options(nomem)
    );
    other
}

/// The value of the thread whose number differs in these bits: `shfl.sync.bfly` (PTX ISA, "shfl.sync"). sm_30.
///
/// All threads of a warp.
#[cube]
pub(crate) fn shuffle_xor<T: CubePrimitive>(value: T, #[comptime] bits: u32) -> T {
    let other: T;
    gpu_asm!(
        "shfl.sync.bfly.b32 {other}, {value}, {bits}, 31, 0xffffffff;",
        other = out(_) other,
        value = in(_) read::<T>(value),
        options(nomem)
    );
    other
}

/// The value of the thread `distance` before this one; of the first ones their own: `shfl.sync.up` (PTX ISA, "shfl.sync"). sm_30.
///
/// All threads of a warp.
#[cube]
pub(crate) fn shuffle_up<T: CubePrimitive>(value: T, #[comptime] distance: u32) -> T {
    let other: T;
    gpu_asm!(
        "shfl.sync.up.b32 {other}, {value}, {distance}, 0, 0xffffffff;",
        other = out(_) other,
        value = in(_) read::<T>(value),
        options(nomem)
    );
    other
}

/// Whether any thread says so: `vote.sync.any` (PTX ISA, "vote.sync"). sm_30.
///
/// All threads of a warp.
#[cube]
pub(crate) fn any(yes: bool) -> bool {
    let own = u32::cast_from(yes);
    let any: u32;
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {own}, 0;\nvote.sync.any.pred p, p, 0xffffffff;\nselp.u32 {any}, 1, 0, p;\n}}",
        any = out(_) any,
        own = in(_) read::<u32>(own),
        options(nomem)
    );
    any != 0u32
}

/// A bit for each thread that says so: `vote.sync.ballot` (PTX ISA, "vote.sync"). sm_30.
///
/// All threads of a warp.
#[cube]
pub(crate) fn ballot(yes: bool) -> u32 {
    let own = u32::cast_from(yes);
    let all: u32;
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {own}, 0;\nvote.sync.ballot.b32 {all}, p, 0xffffffff;\n}}",
        all = out(_) all,
        own = in(_) read::<u32>(own),
        options(nomem)
    );
    all
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
