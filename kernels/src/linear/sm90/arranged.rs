//! Rows of tokens in the order of the experts, as products with codes want them: their channels lie so that a unit's codes are neighbours, and
//! those of bf16 that are multiplied with FP8 are f16 times a power of two (`../powers.rs`), so that an instruction makes factors of codes.

use cubecl::prelude::*;

use super::packed::channel;
use super::schedule::Place;
use super::{Form, VECTOR};
use crate::common::launch::{address_type, dummy, share};
use crate::linear::WeightFormat;
use crate::linear::powers::{larger, power};
use crate::ptx::wgmma::Elem;
use crate::ptx::{math, warp};

const UNITS: u32 = 256;
const WARPS: usize = UNITS as usize / 32;

/// F `[pairs, inputs]`, and f32 `[pairs]`, what products with each row are to be multiplied by, if they are f16 of bf16: of E `[pairs / top_k,
/// inputs]` in the `order` of the experts, or of the rows of x as they are.
pub(super) fn launch(
    client: &Client,
    x: BufferArg,
    order: Option<BufferArg>,
    [pairs, top_k, inputs]: [usize; 3],
    elem: ElemType,
    form: Form,
) -> (BufferArg, BufferArg) {
    let (len, bytes) = (pairs * inputs, pairs * inputs * elem.size());
    // SAFETY: the buffers are made for so many numbers.
    let out = unsafe { BufferArg::from_raw_parts(client.empty(bytes), len) };
    let inverses = if form.halves() {
        // SAFETY: as above.
        unsafe { BufferArg::from_raw_parts(client.empty(pairs * size_of::<f32>()), pairs) }
    } else {
        dummy(client)
    };
    let gathers = order.is_some();
    let address = address_type(client, &[&x, &out]);
    let order = order.unwrap_or_else(|| share(&inverses));
    arrange_kernel::launch(
        client,
        CubeCount::new_1d(pairs as u32),
        CubeDim::new_1d(UNITS),
        address,
        VECTOR,
        share(&x),
        x,
        order,
        share(&out),
        share(&inverses),
        pairs,
        inputs / VECTOR,
        top_k,
        gathers,
        form.format,
        form.halves(),
        form.elem(),
        elem,
    );
    (out, inverses)
}

/// A cube has a row. `numbers` are those of x, each by itself.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn arrange_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    numbers: &[E],
    order: &[i32],
    out: &mut [Vector<u32, Const<4>>],
    inverses: &mut [f32],
    pairs: usize,
    vectors: usize,
    top_k: usize,
    #[comptime] gathers: bool,
    #[comptime] format: WeightFormat,
    #[comptime] scales: bool,
    #[comptime] out_elem: Elem,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    let mut from = row;
    if comptime!(gathers) {
        from = usize::cast_from(min(u32::cast_from(order[row]), u32::cast_from(pairs) - 1)) / top_k;
    }
    let (from, to) = (from * vectors, row * vectors);
    let mut factor = 1.0f32;
    if comptime!(scales) {
        let (own, inverse) = power(largest::<E, V>(x, from, vectors));
        factor = own;
        if UNIT_POS == 0 {
            inverses[row] = inverse;
        }
    }
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let first = from * comptime!(VECTOR) + at / 4 * 32;
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            let low = f32::cast_from(numbers[first + channel(i, at % 4, 0usize, format)]);
            let high = f32::cast_from(numbers[first + channel(i, at % 4, 1usize, format)]);
            words.insert(i, math::pack(low * factor, high * factor, out_elem));
        }
        out[to + at] = words;
        at += UNITS as usize;
    }
}

/// The bits of the row's largest number, without signs, or of one a step larger. All units of the cube.
#[cube]
fn largest<E: Float, V: Size>(x: &[Vector<E, V>], from: usize, vectors: usize) -> u32 {
    let mut largest_of_warps = Shared::<[u32]>::new_slice(WARPS);
    let mut largest = 0u32;
    let mut at = UNIT_POS as usize;
    while at < vectors {
        largest = larger(largest, x[from + at]);
        at += UNITS as usize;
    }
    #[unroll]
    for step in 0..5u32 {
        largest = max(largest, warp::shuffle_xor::<u32>(largest, comptime!(1u32 << step)));
    }
    if UNIT_POS.is_multiple_of(32) {
        largest_of_warps[UNIT_POS as usize / 32] = largest;
    }
    sync_cube();
    #[unroll]
    for other in 0..WARPS {
        largest = max(largest, largest_of_warps[other]);
    }
    largest
}

/// Sums of a tile times what its rows' are to be multiplied by.
#[cube]
pub(super) fn rescale<A: Size>(
    acc: Vector<f32, A>,
    inverses: &[f32],
    place: &Place,
    #[comptime] form: Form,
) -> Vector<f32, A> {
    let count = A::value().comptime();
    let lane = UNIT_POS % 32;
    let mut sums = Sequence::<f32>::new();
    #[unroll]
    for i in 0..count {
        // A unit has two tokens of every eight, and two rows of the weights of each.
        let token = comptime!((i / 4 * 8 + i % 2) as u32) + lane % 4 * 2;
        if comptime!(i < form.tokens / 2) {
            let own = min(token, place.tokens - 1);
            sums.push(acc.extract(i) * inverses[(place.first + own) as usize]);
        } else {
            sums.push(acc.extract(i));
        }
    }
    math::vector::<f32, A>(&sums)
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use cubecl::ir::{AddressType, FloatKind};

    use crate::offline::{Arch, Entry, form};
    let elem = ElemType::Float(FloatKind::BF16);
    let entry = |name: &str, gathers: bool, format, out_elem| {
        let (cube, scales) = (CubeDim::new_1d(UNITS), format == WeightFormat::Fp8);
        let form = form!(
            arrange_kernel,
            cube,
            [AddressType::U32, VECTOR, _, _, _, _, _, 1, 1, 1, gathers, format, scales, out_elem, elem]
        );
        Entry::of(FloatKind::BF16, name, form).on(|arch| arch == Arch::Sm90a)
    };
    vec![
        entry("linear.sm90.arranged.fp8", false, WeightFormat::Fp8, Elem::F16),
        entry("linear.sm90.arranged.gathered.fp8", true, WeightFormat::Fp8, Elem::F16),
        entry("linear.sm90.arranged.gathered.fp4", true, WeightFormat::Fp4, Elem::Bf16),
    ]
}
