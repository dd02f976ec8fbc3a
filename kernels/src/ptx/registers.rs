//! How many registers a warpgroup has.
//!
//! `setmaxnreg`, PTX ISA, "Miscellaneous Instructions: setmaxnreg". A kernel starts with as many registers for each
//! thread as it was compiled with. A warpgroup that only copies gives some back, those that compute take them.
//!
//! All warps of a warpgroup execute the same instruction, at most once unless they synchronise in between. The count is
//! a multiple of 8 from 24 to 256. Over all warpgroups the sum must not exceed what the cube was launched with, else
//! `more` waits for ever.
//!
//! ptxas has to know how many registers a cube is launched with. On `sm_90a` it knows for a kernel with `wgmma`, from
//! the number of threads in CubeCL's launch bounds. Where it does not, it says C7508 and ignores the instruction; so it
//! does on `sm_100a`, whose launch bounds would have to state the number of cubes of a multiprocessor, too.

use cubecl::prelude::*;

/// Takes registers, up to `count` for each thread, waiting until they have been given back: `setmaxnreg.inc`.
#[cube]
pub(crate) fn more(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.inc.sync.aligned.u32 {count};", options(nomem));
}

/// Gives registers back, down to `count` for each thread: `setmaxnreg.dec`.
#[cube]
pub(crate) fn fewer(#[comptime] count: u32) {
    gpu_asm!("setmaxnreg.dec.sync.aligned.u32 {count};", options(nomem));
}
