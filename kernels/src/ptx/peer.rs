//! Memory that kernels of several devices read and write, and the time that they have in common.

use cubecl::prelude::*;

use super::read;

/// Writes two words, of which others see both or none: `st.relaxed.sys` of 64 bits (PTX ISA, "Data Movement and Conversion
/// Instructions: st", and "Memory Consistency Model: Vector Data-types" for why it is not one of `.v2.b32`). sm_70.
///
/// Any thread; the address is one of global memory, of this device or of one whose memory it may access, divisible by 8.
#[cube]
pub(crate) fn store_pair(address: u64, low: u32, high: u32) {
    gpu_asm!(
        "{{\n.reg .b64 pair;\nmov.b64 pair, {{{low}, {high}}};\nst.relaxed.sys.global.b64 [{address}], pair;\n}}",
        address = in(_) read::<u64>(address),
        low = in(_) read::<u32>(low),
        high = in(_) read::<u32>(high),
        options(explicit_mem, writes_address_space global)
    );
}

/// Reads two words that [`store_pair()`] has written, both of one store: `ld.relaxed.sys` of 64 bits. sm_70.
///
/// Any thread, an address as there.
#[cube]
pub(crate) fn load_pair(address: u64) -> Vector<u32, Const<2>> {
    let pair: Vector<u32, Const<2>>;
    gpu_asm!(
        "{{\n.reg .b64 both;\nld.relaxed.sys.global.b64 both, [{address}];\nmov.b64 {pair}, both;\n}}",
        pair = out(_) pair,
        address = in(_) read::<u64>(address),
        options(explicit_mem, reads_address_space global, writes_address_space global)
    );
    pair
}

/// Reads a word that kernels of this device alone access: `ld.global`. The address is divisible by 4.
#[cube]
pub(crate) fn load_word(address: u64) -> u32 {
    let word: u32;
    gpu_asm!(
        "ld.global.b32 {word}, [{address}];",
        word = out(_) word,
        address = in(_) read::<u64>(address),
        options(explicit_mem, reads_address_space global, writes_address_space global)
    );
    word
}

/// Writes a word that kernels of this device alone access: `st.global`.
#[cube]
pub(crate) fn store_word(address: u64, word: u32) {
    gpu_asm!(
        "st.global.b32 [{address}], {word};",
        address = in(_) read::<u64>(address),
        word = in(_) read::<u32>(word),
        options(explicit_mem, writes_address_space global)
    );
}

/// The time in units of 1024 ns, modulo 2^32 of them, which is 73 minutes: `%globaltimer` (PTX ISA, "Special Registers"). How often it
/// advances is the GPU's affair.
#[cube]
pub(crate) fn time() -> u32 {
    let now: u32;
    gpu_asm!(
        "{{\n.reg .b64 nanoseconds;\nmov.u64 nanoseconds, %globaltimer;\nshr.u64 nanoseconds, nanoseconds, 10;\n",
        "cvt.u32.u64 {now}, nanoseconds;\n}}",
        now = out(_) now,
        options(explicit_mem, reads_address_space global, writes_address_space global)
    );
    now
}
