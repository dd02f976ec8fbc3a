//! Lists of slots without their gaps.
//!
//! A list may have -1 anywhere, which names no row. The others move up, in their order. The list is then the page table of a
//! sequence with pages of one row, which the kernels of `mla_decode` read.

use cubecl::prelude::*;

use crate::common::launch::{address_type, or_dummy};
use crate::common::scan::sum_before;

/// Units of a cube, which has a list. Every runtime has this many.
const UNITS: usize = 256;

/// Arguments of [`launch`], all i32.
pub struct CompactSlotsArgs {
    /// `[lists, width]`: slots, negative for none.
    pub slots: BufferArg,
    /// `[lists]`: only so many entries of a list count.
    pub lengths: BufferArg,
    /// `[lists, width]`, written: the slots of each list. What is behind them is not written.
    pub compact: BufferArg,
    /// `[lists]`, written: how many there are.
    pub counts: BufferArg,
    /// Lists.
    pub lists: usize,
    /// Entries of a list.
    pub width: usize,
}

/// Compacts all lists. Without lists nothing is launched.
pub fn launch(client: &Client, args: CompactSlotsArgs) {
    let CompactSlotsArgs { lists, width, .. } = args;
    if lists == 0 {
        return;
    }
    compact_slots_kernel::launch(
        client,
        cubecl::calculate_cube_count_elemwise(client, lists, CubeDim::new_single()),
        CubeDim::new_1d(UNITS as u32),
        address_type(client, &[&args.slots]),
        or_dummy(client, args.slots, width),
        args.lengths,
        or_dummy(client, args.compact, width),
        args.counts,
        lists,
        width,
        UNITS,
    );
}

/// A cube for a list. Each unit owns a run of consecutive entries, and learns from a scan where its own begin.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn compact_slots_kernel(
    slots: &[i32],
    lengths: &[i32],
    compact: &mut [i32],
    counts: &mut [i32],
    lists: usize,
    width: usize,
    #[comptime] units: usize,
) {
    let list = CUBE_POS;
    if list < lists {
        let length = min(usize::cast_from(max(lengths[list], 0i32)), width);
        let unit = UNIT_POS as usize;
        let run = width.div_ceil(units);
        let first = min(unit * run, length);
        let end = min(first + run, length);
        let start = list * width;
        let mut own = 0u32;
        for entry in first..end {
            own += u32::cast_from(slots[start + entry] >= 0);
        }
        let mut scratch = Shared::<[u32]>::new_slice(units);
        let mut place = sum_before(&mut scratch, own, units) as usize;
        for entry in first..end {
            let slot = slots[start + entry];
            if slot >= 0 {
                compact[start + place] = slot;
                place += 1;
            }
        }
        if unit == units - 1 {
            counts[list] = i32::cast_from(place);
        }
    }
}

#[cfg(feature = "offline")]
pub(crate) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let cube = CubeDim::new_1d(UNITS as u32);
    let bits = AddressType::U32;
    vec![Entry::new("compact_slots", form!(compact_slots_kernel, cube, [bits, _, _, _, _, 1, 1, UNITS]))]
}
