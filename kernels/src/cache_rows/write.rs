//! Rows are quantised where they are written.

use cubecl::prelude::*;

use super::encode::{encode, scale_exponent};
use super::{Fp8Layout, row_at, scale_at};
use crate::common::launch::{address_type, dummy, is_row, or_dummy};

/// Units of a cube, which has a token: a unit quantises four channels at a time.
const UNITS: usize = 128;
/// The scale of channels of which one is no number: none of them is one.
const NO_NUMBER: u32 = f32::NAN.to_bits();
/// The same as E8M0.
const NO_E8M0: u32 = 255;
/// The bits of infinity.
const INFINITE: u32 = f32::INFINITY.to_bits();

/// Arguments of [`launch_write_fp8`]; E is `elem`.
pub struct WriteFp8Args {
    /// u32 `[pages, words]`, written in place.
    pub cache: BufferArg,
    /// The parts of its rows.
    pub layout: Fp8Layout,
    /// i32 `[tokens]`: the row of each token, -1 to skip the token. No row occurs twice.
    pub slots: BufferArg,
    /// E `[tokens, first_width]`: the first channels of each row.
    pub first: BufferArg,
    /// E `[tokens, D - first_width]`: the others, if there are some.
    pub rest: Option<BufferArg>,
    /// Channels in `first`.
    pub first_width: usize,
    /// Rows of the cache: pages times page size.
    pub slot_count: usize,
    /// New tokens.
    pub tokens: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Quantises rows and writes them. A slot past the end of the cache is skipped like -1. With no tokens nothing is launched.
///
/// For all channels that share it the scale is the smallest power of two by which no code overflows. Where one of them is no
/// number, none is: the scale is a NaN, and codes need not know of it.
pub fn launch_write_fp8(client: &Client, args: WriteFp8Args) {
    let WriteFp8Args { tokens, first_width, slot_count, layout, elem, .. } = args;
    if tokens == 0 || slot_count == 0 {
        return;
    }
    let rest = args.rest.unwrap_or_else(|| dummy(client));
    write_fp8_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, tokens, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.cache, &args.first, &rest]),
        args.cache,
        args.slots,
        or_dummy(client, args.first, first_width),
        rest,
        slot_count,
        tokens,
        first_width,
        layout,
        elem,
    );
}

#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn write_fp8_kernel<E: Float>(
    cache: &mut [u32],
    slots: &[i32],
    first: &[E],
    rest: &[E],
    slot_count: usize,
    tokens: usize,
    first_width: usize,
    #[comptime] layout: Fp8Layout,
    #[define(E)] _elem: ElemType,
) {
    let unit = UNIT_POS as usize;
    let token = CUBE_POS;
    // Magnitudes as bits, in whose order what is no number is the largest.
    let mut largest = Shared::<[u32]>::new_slice(UNITS);
    if token < tokens {
        let slot = slots[token];
        let is_written = is_row(slot, slot_count);
        let slot = usize::cast_from(max(slot, 0i32));
        let row = row_at(slot, layout);
        let sharing = comptime!(layout.scaled() / 4);
        let rest_width = comptime!(layout.width()) - first_width;
        let code_words = comptime!(layout.codes / 4);
        #[unroll]
        for turn in 0..comptime!(code_words.div_ceil(UNITS)) {
            let word = unit + comptime!(turn * UNITS);
            let mut values = Array::<f32>::new(4usize);
            #[unroll]
            for i in 0..4usize {
                values[i] = 0.0f32;
                if word < code_words {
                    values[i] = channel::<E>(first, rest, token, first_width, rest_width, 4 * word + i);
                }
            }
            let mut own = 0u32;
            #[unroll]
            for i in 0..4usize {
                own = max(own, u32::reinterpret(values[i]) & 0x7fff_ffff);
            }
            largest[unit] = own;
            sync_cube();
            let mut most = 0u32;
            for i in 0..sharing {
                most = max(most, largest[unit / sharing * sharing + i]);
            }
            // All have read before the next turn writes.
            sync_cube();
            let exponent = scale_exponent(most, comptime!(layout.least_scale()));
            let inverse = f32::reinterpret((254u32 - exponent) << 23);
            if is_written && word < code_words {
                let mut codes = 0u32;
                #[unroll]
                for i in 0..4usize {
                    codes |= encode(values[i] * inverse) << comptime!(8 * i as u32);
                }
                cache[row + word] = codes;
            }
            let first_scale = comptime!(turn * UNITS * 4 / layout.scaled());
            write_scales(cache, &mut largest, slot, is_written, most, first_scale, layout);
        }
        let mut pair = unit;
        while is_written && pair < comptime!(layout.rope / 2) {
            let at = comptime!(layout.codes) + 2 * pair;
            let low = bf16_bits(channel::<E>(first, rest, token, first_width, rest_width, at));
            let high = bf16_bits(channel::<E>(first, rest, token, first_width, rest_width, at + 1));
            cache[row + comptime!(layout.rope_at()) + pair] = low | (high << 16);
            pair += UNITS;
        }
    }
}

/// Writes the scales of a row from number `first` on, as many as the units of the cube have channels of; `most` is the largest magnitude
/// among those that share one. A whole cube.
#[cube]
fn write_scales(
    cache: &mut [u32],
    exchanged: &mut Shared<[u32]>,
    slot: usize,
    is_written: bool,
    most: u32,
    #[comptime] first: usize,
    #[comptime] layout: Fp8Layout,
) {
    let unit = UNIT_POS as usize;
    let sharing = comptime!(layout.scaled() / 4);
    let count = comptime!((layout.codes.div_ceil(layout.scaled()) - first).min(UNITS / sharing));
    let is_scale = unit.is_multiple_of(sharing) && unit / sharing < count;
    let exponent = scale_exponent(most, comptime!(layout.least_scale()));
    if comptime!(layout.is_f32()) {
        if is_written && is_scale {
            cache[scale_at(slot, first + unit / sharing, layout)] = select(most > INFINITE, NO_NUMBER, exponent << 23);
        }
    } else {
        // Four of them are a word.
        if is_scale {
            exchanged[unit / sharing] = select(most > INFINITE, NO_E8M0, exponent);
        }
        sync_cube();
        if is_written && unit < comptime!(count.div_ceil(4)) {
            let mut four = 0u32;
            #[unroll]
            for i in 0..4usize {
                if 4 * unit + i < count {
                    four |= exchanged[4 * unit + i] << comptime!(8 * i as u32);
                }
            }
            cache[scale_at(slot, first + 4 * unit, layout)] = four;
        }
        // All have read before others are written.
        sync_cube();
    }
}

/// A channel of a row in two parts.
#[cube]
fn channel<E: Float>(
    first: &[E],
    rest: &[E],
    token: usize,
    first_width: usize,
    rest_width: usize,
    channel: usize,
) -> f32 {
    let mut value = E::from_int(0);
    if channel < first_width {
        value = first[token * first_width + channel];
    }
    if channel >= first_width {
        value = rest[token * rest_width + channel - first_width];
    }
    f32::cast_from(value)
}

/// The bits of the nearest bf16, of two the even one. What is no number stays none.
#[cube]
fn bf16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    select((bits & 0x7fff_ffff) > 0x7f80_0000, (bits >> 16) | 0x40, rounded)
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use super::{OFFLINE_FP8, OFFLINE_FP8_KEYS, OFFLINE_FP8_V4, RowFormat};
    use crate::offline::{Entry, FLOATS, form};
    let entry = |name, kind, format| {
        let RowFormat::Fp8(layout) = format else { unreachable!("all are FP8") };
        let (cube, bits) = (CubeDim::new_1d(UNITS as u32), AddressType::U32);
        let form = form!(write_fp8_kernel, cube, [bits, _, _, _, _, 1, 1, 1, layout, ElemType::Float(kind)]);
        Entry::of(kind, name, form)
    };
    let v3 = FLOATS.map(|kind| entry("write_fp8", kind, OFFLINE_FP8));
    let v4 = FLOATS.map(|kind| entry("write_fp8_e8m0", kind, OFFLINE_FP8_V4));
    let keys = FLOATS.map(|kind| entry("write_fp8_keys", kind, OFFLINE_FP8_KEYS));
    v3.into_iter().chain(v4).chain(keys).collect()
}
