//! Rows of bf16 as f16 times a power of two (`../powers.rs`), so that FP8 codes become factors by one instruction; in the order of the
//! experts, where they are not in it yet.

use cubecl::prelude::*;

use super::schedule::Place;
use super::{Form, VECTOR};
use crate::common::launch::{address_type, share};
use crate::linear::WeightFormat;
use crate::linear::powers::{halves, larger, order as order_of_codes, power};
use crate::ptx::{math, warp};

const UNITS: u32 = 256;
const WARPS: usize = UNITS as usize / 32;

/// f16 `[pairs, inputs]` and f32 `[pairs]`, what products with each row are to be multiplied by: of E `[pairs / top_k, inputs]` in the
/// `order` of the experts, or of the rows of x as they are.
pub(super) fn launch(
    client: &Client,
    x: BufferArg,
    order: Option<BufferArg>,
    [pairs, top_k, inputs]: [usize; 3],
    elem: ElemType,
) -> (BufferArg, BufferArg) {
    let (len, bytes) = (pairs * inputs, pairs * inputs * elem.size());
    // SAFETY: the buffers are made for so many numbers.
    let out = unsafe { BufferArg::from_raw_parts(client.empty(bytes), len) };
    // SAFETY: as above.
    let inverses = unsafe { BufferArg::from_raw_parts(client.empty(pairs * size_of::<f32>()), pairs) };
    let gathers = order.is_some();
    let address = address_type(client, &[&x, &out]);
    let order = order.unwrap_or_else(|| share(&inverses));
    halves_kernel::launch(
        client,
        CubeCount::new_1d(pairs as u32),
        CubeDim::new_1d(UNITS),
        address,
        VECTOR,
        x,
        order,
        share(&out),
        share(&inverses),
        pairs,
        inputs / VECTOR,
        top_k,
        gathers,
        elem,
    );
    (out, inverses)
}

/// A cube has a row.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn halves_kernel<E: Float, V: Size>(
    x: &[Vector<E, V>],
    order: &[i32],
    out: &mut [Vector<u32, Const<4>>],
    inverses: &mut [f32],
    pairs: usize,
    vectors: usize,
    top_k: usize,
    #[comptime] gathers: bool,
    #[define(E)] _elem: ElemType,
) {
    let row = CUBE_POS;
    let mut largest_of_warps = Shared::<[u32]>::new_slice(WARPS);
    let mut from = row;
    if comptime!(gathers) {
        from = usize::cast_from(min(u32::cast_from(order[row]), u32::cast_from(pairs) - 1)) / top_k;
    }
    let (from, to) = (from * vectors, row * vectors);
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
    let (factor, inverse) = power(largest);
    if UNIT_POS == 0 {
        inverses[row] = inverse;
    }
    let mut at = UNIT_POS as usize;
    while at < vectors {
        out[to + at] = halves(x[from + at], factor, comptime!(order_of_codes(WeightFormat::Fp8, true)));
        at += UNITS as usize;
    }
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
    let entry = |name: &str, gathers: bool| {
        let cube = CubeDim::new_1d(UNITS);
        let form = form!(halves_kernel, cube, [AddressType::U32, VECTOR, _, _, _, _, 1, 1, 1, gathers, elem]);
        Entry::of(FloatKind::BF16, name, form).on(|arch| arch == Arch::Sm90a)
    };
    vec![entry("linear.sm90.halves", false), entry("linear.sm90.halves.gathered", true)]
}
