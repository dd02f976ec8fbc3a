//! Matrices between shared memory and the registers of a warp, and 16 or 4 bytes at a time.
//!
//! A matrix is 8 rows of 16 bytes, that is of 8 numbers with 16 bits. In registers, thread `t` has numbers
//! `2 * (t % 4)` and the next of row `t / 4`, which is also how the accumulators of `wgmma` and its register operand
//! lie.

use cubecl::prelude::*;

use super::read;
use super::wgmma::Elem;

/// Loads four matrices: `ldmatrix.x4` (PTX ISA, "Warp-level matrix load instruction: ldmatrix").
///
/// All threads of a warp. Thread `8 * m + r` has the address of row `r` of matrix `m`, divisible by 16; `offset` bytes
/// are added at no cost. Element `m` of the result is of matrix `m`. With `transposed` each matrix is transposed. Rows
/// of a matrix should lie in different banks, as they do in a tile with 128-byte swizzle.
#[cube]
pub(crate) fn load_x4(address: u32, #[comptime] offset: u32, #[comptime] transposed: bool) -> Vector<u32, Const<4>> {
    let trans = comptime!(if transposed { ".trans" } else { "" });
    let pairs: Vector<u32, Const<4>>;
    gpu_asm!(
        "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {pairs}, [{address} + {offset}];",
        pairs = out(_) pairs,
        address = in(_) read::<u32>(address),
        options(explicit_mem, reads_address_space shared)
    );
    pairs
}

/// Stores four matrices: `stmatrix.x4` (PTX ISA 9.7.14.5.16, "Warp-level matrix store instruction: stmatrix").
///
/// The opposite of [`load_x4()`], with the same addresses. Before a tile store or a `wgmma` reads them:
/// [`crate::ptx::fence::async_shared()`].
#[cube]
pub(crate) fn store_x4(
    address: u32,
    #[comptime] offset: u32,
    #[comptime] transposed: bool,
    pairs: Vector<u32, Const<4>>,
) {
    let trans = comptime!(if transposed { ".trans" } else { "" });
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{address} + {offset}], {pairs};",
        address = in(_) read::<u32>(address),
        pairs = in(_) read::<Vector<u32, Const<4>>>(pairs),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Loads 16 bytes: `ld.shared.v4` (PTX ISA, "Data Movement and Conversion Instructions: ld").
///
/// Any thread; the address plus `offset` is divisible by 16.
#[cube]
pub(crate) fn load_16(address: u32, #[comptime] offset: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.b32 {words}, [{address} + {offset}];",
        words = out(_) words,
        address = in(_) read::<u32>(address),
        options(explicit_mem, reads_address_space shared)
    );
    words
}

/// Loads 4 bytes, 2 or one into the low bits of a word, the others are zero: `ld.shared.u16`, `ld.shared.u8` (PTX ISA, "Data Movement
/// and Conversion Instructions: ld").
///
/// Any thread; the address plus `offset` is divisible by `bytes`.
#[cube]
pub(crate) fn load_low(address: u32, #[comptime] offset: u32, #[comptime] bytes: u32) -> u32 {
    let bits = comptime!(8 * bytes);
    let word: u32;
    gpu_asm!(
        "ld.shared.u{bits} {word}, [{address} + {offset}];",
        word = out(_) word,
        address = in(_) read::<u32>(address),
        options(explicit_mem, reads_address_space shared)
    );
    word
}

/// [`load_16()`] of 8 bytes, whose address is divisible by 8.
#[cube]
pub(crate) fn load_8(address: u32, #[comptime] offset: u32) -> Vector<u32, Const<2>> {
    let words: Vector<u32, Const<2>>;
    gpu_asm!(
        "ld.shared.v2.b32 {words}, [{address} + {offset}];",
        words = out(_) words,
        address = in(_) read::<u32>(address),
        options(explicit_mem, reads_address_space shared)
    );
    words
}

/// [`load_16()`] of 4 bytes, whose address is divisible by 4.
#[cube]
pub(crate) fn load_4(address: u32, #[comptime] offset: u32) -> u32 {
    load_low(address, offset, 4u32)
}

/// Adds the product of 16 rows of 16 numbers and 16 rows of 8 to `acc`: `mma.sync.m16n8k16` (PTX ISA, "Warp-level matrix instructions:
/// mma"). sm_80.
///
/// All threads of a warp. Thread `t` has numbers `2 * (t % 4)` and the next of a row as a pair. Of `a`, whose rows are added up over,
/// elements are of rows `t / 4` and `8 + t / 4`, then of the same rows eight columns on; `b` has them of column `t / 4`, then eight rows
/// down. `acc` has two numbers of row `t / 4` and two of row `8 + t / 4`.
#[cube]
pub(crate) fn multiply_add(
    acc: Vector<f32, Const<4>>,
    a: Vector<u32, Const<4>>,
    b: Vector<u32, Const<2>>,
    #[comptime] elem: Elem,
) -> Vector<f32, Const<4>> {
    let name = comptime!(elem.name());
    let sum: Vector<f32, Const<4>>;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {sum}, {a}, {b}, {acc};",
        sum = out(_) sum,
        a = in(_) read::<Vector<u32, Const<4>>>(a),
        b = in(_) read::<Vector<u32, Const<2>>>(b),
        acc = in(_) read::<Vector<f32, Const<4>>>(acc),
        options(pure, nomem)
    );
    sum
}

/// Stores 16 bytes: `st.shared.v4` (PTX ISA, "Data Movement and Conversion Instructions: st").
///
/// As [`load_16()`].
#[cube]
pub(crate) fn store_16(address: u32, #[comptime] offset: u32, words: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{address} + {offset}], {words};",
        address = in(_) read::<u32>(address),
        words = in(_) read::<Vector<u32, Const<4>>>(words),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Stores 4 bytes: `st.shared` (PTX ISA, "Data Movement and Conversion Instructions: st").
///
/// Any thread; the address plus `offset` is divisible by 4.
#[cube]
pub(crate) fn store_4(address: u32, #[comptime] offset: u32, word: u32) {
    gpu_asm!(
        "st.shared.b32 [{address} + {offset}], {word};",
        address = in(_) read::<u32>(address),
        word = in(_) read::<u32>(word),
        options(explicit_mem, writes_address_space shared)
    );
}

/// [`store_4()`] if the condition holds, without a branch, at which lanes would part.
#[cube]
pub(crate) fn store_4_if(address: u32, #[comptime] offset: u32, word: u32, condition: bool) {
    gpu_asm!(
        "{{\n.reg .pred p;\nsetp.ne.u32 p, {condition}, 0;\n@p st.shared.b32 [{address} + {offset}], {word};\n}}",
        address = in(_) read::<u32>(address),
        word = in(_) read::<u32>(word),
        condition = in(_) read::<u32>(u32::cast_from(condition)),
        options(explicit_mem, writes_address_space shared)
    );
}
