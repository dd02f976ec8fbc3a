//! Rows of queries that see nothing.

use cubecl::prelude::*;

use super::problem::AttentionArgs;
use crate::common::device::UNITS;
use crate::common::launch::share;
use crate::tiles::attention::NEG_INFINITY_BITS;

/// Writes every row of `out` and `lse` so.
pub(super) fn launch(client: &Client, args: &AttentionArgs, address: AddressType) {
    let (value_width, elem) = (args.sizes.value_width, args.sizes.elem);
    let elements = args.sizes.query_tokens * args.sizes.heads * value_width;
    let dim = CubeDim::new_1d(UNITS as u32);
    let count = cubecl::calculate_cube_count_elemwise(client, elements, dim);
    let (out, lse) = (share(&args.out), share(&args.lse));
    clear_rows::launch(client, count, dim, address, out, lse, elements, value_width, elem);
}

/// A unit per element.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn clear_rows<E: Float>(
    out: &mut [E],
    lse: &mut [f32],
    elements: usize,
    value_width: usize,
    #[define(E)] _elem: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < elements {
        let column = at % value_width;
        out[at] = E::from_int(0);
        if column == 0 {
            lse[at / value_width] = f32::from_bits(NEG_INFINITY_BITS);
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, FLOATS, form};
    let clear = FLOATS.map(|kind| {
        let (elem, dim) = (ElemType::Float(kind), CubeDim::new_1d(UNITS as u32));
        let form = form!(clear_rows, dim, [AddressType::U32, _, _, 1, 1, elem]);
        Entry::of(kind, "vertical_slash_attention.clear", form)
    });
    clear.into()
}
