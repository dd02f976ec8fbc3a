//! The place of the largest number of each row: the next token of greedy decoding.
//!
//! A cube has a row. Each unit goes over its vectors in order, several loads at a time, and the best of all units is found in
//! shared memory.

mod select;

use cubecl::prelude::*;

use self::select::{AHEAD, Shape};
use crate::common::launch::address_type;

/// Arguments of [`launch`]; E is `elem`.
pub struct ArgmaxArgs {
    /// E `[rows, width]`.
    pub x: BufferArg,
    /// i32 `[rows]`, written: the first place of the largest number; -1 where a row has neither a finite one nor plus infinity.
    pub places: BufferArg,
    /// Rows.
    pub rows: usize,
    /// Numbers of a row.
    pub width: usize,
    /// f32, f16 or bf16.
    pub elem: ElemType,
}

/// Writes `places`. Without elements nothing is launched.
pub fn launch(client: &Client, args: ArgmaxArgs) {
    let ArgmaxArgs { rows, width, elem, .. } = args;
    if rows * width == 0 {
        return;
    }
    let Shape { units, vector } = select::choose(client.properties(), width, elem);
    argmax_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, rows, CubeDim::new_single()),
        CubeDim::new_1d(units as u32),
        address_type(client, &[&args.x]),
        vector,
        args.x,
        args.places,
        rows,
        width / vector,
        units,
        elem,
    );
}

/// A cube per row, of `vectors` vectors.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn argmax_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    places: &mut [i32],
    rows: usize,
    vectors: usize,
    #[comptime] units: usize,
    #[define(E)] _elem: ElemType,
) {
    let lanes = N::value().comptime();
    let row = CUBE_POS;
    let mut best = f32::MIN.runtime();
    let mut place = -1i32.runtime();
    if row < rows {
        let mut column = UNIT_POS as usize;
        while column < vectors {
            let mut loaded = Sequence::<Vector<f32, N>>::new();
            #[unroll]
            for i in 0..AHEAD {
                // Past the end, the last one again: it is as good as it was.
                let at = min(column + comptime!(i * units), vectors - 1);
                loaded.push(Vector::cast_from(x[row * vectors + at]));
            }
            #[unroll]
            for i in 0..AHEAD {
                let first = min(column + comptime!(i * units), vectors - 1) * lanes;
                #[unroll]
                for lane in 0..lanes {
                    let mut value = loaded[i].extract(lane);
                    if value > f32::MAX {
                        value = f32::MAX.runtime();
                    }
                    // What is not a number is never larger.
                    if value > best || (place < 0 && value >= f32::MIN) {
                        best = value;
                        place = i32::cast_from(first + lane);
                    }
                }
            }
            column += comptime!(AHEAD * units);
        }
    }
    let mut values = Shared::<[f32]>::new_slice(units);
    let mut found = Shared::<[i32]>::new_slice(units);
    let unit = UNIT_POS as usize;
    values[unit] = best;
    found[unit] = place;
    sync_cube();
    let mut distance = comptime!(units / 2).runtime();
    while distance > 0 {
        if unit < distance {
            let (value, place) = (values[unit + distance], found[unit + distance]);
            let (own, own_place) = (values[unit], found[unit]);
            let is_better = value > own || own_place < 0 || (value == own && place < own_place);
            if place >= 0 && is_better {
                values[unit] = value;
                found[unit] = place;
            }
        }
        sync_cube();
        distance /= 2;
    }
    if row < rows && UNIT_POS == 0 {
        places[row] = found[0];
    }
}

/// The vocabulary of DeepSeek-V3, and short rows.
#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Arch, Entry, FLOATS, form};
    let device = Arch::Sm90a.properties();
    let forms = FLOATS.into_iter().flat_map(|kind| {
        let elem = ElemType::Float(kind);
        [("argmax", 129_280), ("argmax.short", 1024)].map(|(name, width)| {
            let Shape { units, vector } = select::choose(&device, width, elem);
            let cube = CubeDim::new_1d(units as u32);
            Entry::of(kind, name, form!(argmax_kernel, cube, [AddressType::U32, vector, _, _, 1, 1, units, elem]))
        })
    });
    forms.collect()
}
