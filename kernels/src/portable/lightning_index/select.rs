//! The `k` greatest ranks of one query token.

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::{LightningIndexArgs, one_each, visible_keys};
use crate::portable::launch::share;
use crate::portable::mla_decode::key_slot;
use crate::portable::scan::sum_before;
use crate::portable::tile_attention::UNITS;

/// Values of 8 bits.
const BINS: usize = 256;
/// Units of a cube for more than [`MANY_KEYS`], where the device has so many; otherwise [`UNITS`].
const MANY_UNITS: usize = 1024;
/// Keys that fewer units load at once, four loads each.
const MANY_KEYS: usize = 4 * UNITS * LOAD;
/// Ranks that a unit loads at once.
type Load = Const<LOAD>;
pub(super) const LOAD: usize = 4;

const _: () = assert!(BINS <= UNITS, "a unit for each value");

/// Chooses the keys of `rows` query tokens, from `first_row` on: a cube for each of them.
pub(super) fn launch(client: &Client, args: &LightningIndexArgs, address: AddressType, first_row: usize, rows: usize) {
    let (sizes, hardware) = (&args.sizes, &client.properties().hardware);
    let available = hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize;
    let many = sizes.max_keys() > MANY_KEYS && available >= MANY_UNITS;
    let units = if many { MANY_UNITS } else { UNITS };
    select_kernel::launch(
        client,
        one_each(client, rows),
        CubeDim::new_1d(units as u32),
        address,
        share(&args.scores),
        share(&args.page_table),
        share(&args.visible),
        share(&args.indices),
        first_row,
        rows,
        sizes.query_len,
        sizes.max_pages,
        sizes.max_keys() as u32,
        sizes.score_stride() / LOAD,
        sizes.slots() as u32,
        sizes.page_size.ilog2(),
        sizes.k as u32,
        units,
        args.slots,
    );
}

/// The chosen keys of one query token.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
fn select_kernel(
    ranks: &[Vector<u32, Load>],
    page_table: &[i32],
    visible: &[i32],
    indices: &mut [i32],
    first_row: usize,
    rows: usize,
    query_len: usize,
    max_pages: usize,
    max_keys: u32,
    stride: usize,
    slot_count: u32,
    page_shift: u32,
    k: u32,
    #[comptime] units: usize,
    #[comptime] slots: bool,
) {
    let row = first_row + CUBE_POS;
    if CUBE_POS < rows {
        let unit = UNIT_POS as usize;
        let most = k as usize;
        let count = visible_keys(visible, row, max_keys);
        let names = Names { table_row: row / query_len * max_pages, slot_count, page_shift, slots };
        let out = row * most;
        if count > most {
            let list = Ranks { first: CUBE_POS * stride, count };
            let mut scratch = Shared::<[u32]>::new_slice(units);
            let border = find_border(ranks, &list, &mut scratch, k, units);

            // A run of consecutive keys for each unit.
            let loads = count.div_ceil(LOAD);
            let run = loads.div_ceil(units);
            let first = min(unit * run, loads);
            let end = min(first + run, loads);
            let mut above = 0u32;
            let mut ties = 0u32;
            for at in first..end {
                let four = ranks[list.first + at];
                #[unroll]
                for n in 0..LOAD {
                    if at * LOAD + n < count {
                        let rank = four.extract(n);
                        above += u32::cast_from(rank > border.rank);
                        ties += u32::cast_from(rank == border.rank);
                    }
                }
            }
            let above_before = sum_before(&mut scratch, above, units);
            ties = sum_before(&mut scratch, ties, units);
            let mut place = (above_before + min(ties, border.ties)) as usize;
            for at in first..end {
                let four = ranks[list.first + at];
                #[unroll]
                for n in 0..LOAD {
                    let key = at * LOAD + n;
                    if key < count {
                        let rank = four.extract(n);
                        if rank > border.rank || (rank == border.rank && ties < border.ties) {
                            indices[out + place] = names.of(page_table, key);
                            place += 1;
                        }
                        ties += u32::cast_from(rank == border.rank);
                    }
                }
            }
        } else {
            let mut place = unit;
            while place < most {
                let mut name = i32::new(-1);
                if place < count {
                    name = names.of(page_table, place);
                }
                indices[out + place] = name;
                place += units;
            }
        }
    }
}

/// What the result calls a key.
#[derive(CubeType)]
struct Names {
    /// Where the sequence's page ids begin.
    table_row: usize,
    slot_count: u32,
    page_shift: u32,
    /// By its slot; otherwise by its position.
    #[cube(comptime)]
    slots: bool,
}

#[cube]
impl Names {
    fn of(&self, page_table: &[i32], key: usize) -> i32 {
        if comptime!(self.slots) {
            key_slot(page_table, self.table_row, self.page_shift, self.slot_count, key) as i32
        } else {
            key as i32
        }
    }
}

/// The ranks of a query token.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Ranks {
    /// The first load.
    first: usize,
    /// Keys.
    count: usize,
}

/// The lowest rank among the chosen.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Border {
    rank: u32,
    /// How many keys of this rank are chosen.
    ties: u32,
}

/// Finds the `k`-th greatest of more than `k` ranks.
#[cube]
fn find_border(
    ranks: &[Vector<u32, Load>],
    list: &Ranks,
    scratch: &mut Shared<[u32]>,
    k: u32,
    #[comptime] units: usize,
) -> Border {
    let histogram = Shared::<[Atomic<u32>]>::new_slice(BINS);
    let mut found = Shared::<[u32]>::new_slice(2usize);
    let unit = UNIT_POS as usize;
    let loads = list.count.div_ceil(LOAD);
    // The leading bits, which of them are known, and how many keys of these leading bits are chosen.
    let mut rank = 0u32;
    let mut known = 0u32;
    let mut wanted = k;
    for pass in 0..4u32 {
        let shift = 24 - pass * 8;
        if unit < BINS {
            histogram[unit].store(0u32);
        }
        sync_cube();
        let mut at = unit;
        while at < loads {
            let four = ranks[list.first + at];
            #[unroll]
            for n in 0..LOAD {
                let own = four.extract(n);
                if at * LOAD + n < list.count && (own & known) == rank {
                    histogram[((own >> shift) & 255) as usize].fetch_add(1u32);
                }
            }
            at += units;
        }
        sync_cube();
        // From the greatest value down.
        let mut own = 0u32;
        if unit < BINS {
            own = histogram[comptime!(BINS - 1) - unit].load();
        }
        let before = sum_before(scratch, own, units);
        if before < wanted && before + own >= wanted {
            found[0] = comptime!(BINS as u32 - 1) - UNIT_POS;
            found[1] = wanted - before;
        }
        sync_cube();
        rank |= found[0] << shift;
        known |= 255u32 << shift;
        wanted = found[1];
    }
    Border { rank, ties: wanted }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let entry = |(name, units, slots): (&str, usize, bool)| {
        let (bits, dim) = (AddressType::U32, CubeDim::new_1d(units as u32));
        let form = form!(select_kernel, dim, [bits, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, 1, units, slots]);
        Entry::new(name, form)
    };
    let forms = [
        ("lightning_index.select.positions", MANY_UNITS, false),
        ("lightning_index.select.slots", MANY_UNITS, true),
        ("lightning_index.select.few_units", UNITS, true),
    ];
    forms.map(entry).into()
}
