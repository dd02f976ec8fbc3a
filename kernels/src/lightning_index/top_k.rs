//! The `k` greatest ranks of each query token.

use cubecl::ir::AddressType;
use cubecl::prelude::*;

use super::border::{List, clear_end, find_border, load_tile, number};
#[cfg(feature = "offline")]
use super::form::MAX_UNITS;
use super::form::{Form, LOAD, Load, MAX_LOADS, MAX_PLANE, Output};
use super::places::Places;
use super::problem::{LightningIndexArgs, LightningIndexSizes, one_each, visible_keys};
use super::select::{MIN_CHUNK, max_units, plan, units_of, units_of_fewer};
use super::sums::{FEW, Space};
#[cfg(feature = "offline")]
use crate::common::device::UNITS;
use crate::common::keys::SequencePages;
use crate::common::launch::share;
use crate::common::plane;
use crate::compiler::names_all_sizes;

/// Query tokens up to which a cube that scores chooses, too: a launch takes 2 us however little it does, and more tokens have it hidden.
#[cfg(feature = "cuda")]
const MOST_ROWS_BEHIND_SCORES: usize = 16;
/// Keys from which on it does: each number of loads is a kernel of its own, and models score few keys for a moment only.
#[cfg(feature = "cuda")]
const LEAST_KEYS_BEHIND_SCORES: usize = 1024;

/// Units of a plane, or 1 where planes cannot be used.
fn plane_units(client: &Client) -> usize {
    Some(plane::units(client.properties())).filter(|&units| units <= MAX_PLANE).unwrap_or(1)
}

/// The forms for as many keys as these sizes have, and for fewer.
fn forms_of_fewer(client: &Client, sizes: &LightningIndexSizes, slots: bool) -> Vec<Form> {
    let (plane, last) = (plane_units(client), if slots { Output::Slots } else { Output::Positions });
    let capacity = max_units(client) * MAX_LOADS * LOAD;
    let forms = |least, most, candidates, output| {
        let units = units_of_fewer(client, least, most);
        units.into_iter().map(move |(units, loads)| Form { units, plane, loads, again: false, candidates, output })
    };
    let mut all: Vec<_> = forms(1, sizes.max_keys().min(capacity), false, last).collect();
    if sizes.max_keys() > capacity {
        // Chunks whose candidates fit, or are cut up once more.
        all.extend(forms(MIN_CHUNK.min(capacity), capacity, false, Output::Candidates));
        all.extend(forms(1, capacity, true, last));
        if plan(client, sizes).lens.len() > 2 {
            all.extend(forms(MIN_CHUNK.min(capacity), capacity, true, Output::Candidates));
        }
    }
    all
}

/// How the last of the cubes of so many units that score a query token's keys chooses among them, if it should: of few query tokens, whose
/// ranks its registers hold. Before that, what it would be of others, if all are to be named.
#[cfg(feature = "cuda")]
pub(super) fn behind_scores(
    client: &Client,
    args: &LightningIndexArgs,
    [rows, units]: [usize; 2],
) -> Vec<Option<Form>> {
    let (keys, plane) = (args.sizes.max_keys(), plane_units(client));
    let output = if args.slots { Output::Slots } else { Output::Positions };
    let form = |loads| Form { units, plane, loads, again: false, candidates: false, output };
    let loads = keys.div_ceil(units * LOAD).next_power_of_two();
    let are_few =
        rows <= MOST_ROWS_BEHIND_SCORES && (LEAST_KEYS_BEHIND_SCORES..=MAX_LOADS * units * LOAD).contains(&keys);
    let own = (are_few && plane > 1).then(|| form(loads));
    let mut all = Vec::new();
    if names_all_sizes() && plane > 1 {
        let least = LEAST_KEYS_BEHIND_SCORES / (units * LOAD);
        let all_loads = [1, 2, 4, MAX_LOADS].into_iter().filter(|&others| others >= least && others <= loads);
        all.extend(all_loads.map(|loads| Some(form(loads))));
        all.push(None);
    }
    all.push(own);
    all
}

/// Chooses the keys of `rows` query tokens, from `first_row` on: a cube for each of them and chunk of keys.
pub(super) fn launch(client: &Client, args: &LightningIndexArgs, address: AddressType, first_row: usize, rows: usize) {
    let sizes = &args.sizes;
    let plan = plan(client, sizes);
    // Candidates are written where the level before has read.
    let (mut from, mut to) = (&args.scores, &args.candidates);
    let (mut stride, mut next_stride) = (sizes.score_stride(), plan.candidate_stride());
    for (level, &len) in plan.lens.iter().enumerate() {
        let next = plan.lens.get(level + 1);
        let output = match next {
            Some(_) => Output::Candidates,
            None if args.slots => Output::Slots,
            None => Output::Positions,
        };
        let chunk = if next.is_some() { plan.chunk } else { len };
        let chunks = if next.is_some() { len.div_ceil(chunk) } else { 1 };
        let (units, loads) = units_of(client, chunk);
        let own = Form { units, plane: plane_units(client), loads, again: false, candidates: level > 0, output };
        let own = Form { again: chunk > own.capacity(), ..own };
        // Of fewer keys there are as many levels, or fewer.
        let others = if names_all_sizes() { forms_of_fewer(client, sizes, args.slots) } else { Vec::new() };
        for form in others.into_iter().chain([own]) {
            // SAFETY: the buffers have the sizes that the arguments state, no list is longer than its plan says, and slots are
            // clamped to the cache.
            unsafe {
                select_kernel::launch_unchecked(
                    client,
                    one_each(client, rows * chunks),
                    CubeDim::new_1d(form.units as u32),
                    address,
                    share(from),
                    share(&args.page_table),
                    share(&args.visible),
                    share(if next.is_some() { to } else { &args.indices }),
                    first_row,
                    rows,
                    sizes.query_len,
                    sizes.max_pages,
                    sizes.max_keys() as u32,
                    sizes.slots() as u32,
                    sizes.page_size.ilog2(),
                    sizes.k as u32,
                    level,
                    plan.chunk,
                    chunks,
                    stride / LOAD,
                    len.div_ceil(LOAD),
                    next_stride,
                    next.map_or(0, |len| len.next_multiple_of(LOAD)),
                    form,
                );
            }
        }
        (from, to) = (to, from);
        (stride, next_stride) = (next_stride, stride);
    }
}

/// The chosen keys of a chunk, ascending in position: cube `r * chunks + c` takes chunk `c` of query token `r`.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
fn select_kernel(
    ranks: &[Vector<u32, Load>],
    page_table: &[i32],
    visible: &[i32],
    out: &mut [i32],
    first_row: usize,
    rows: usize,
    query_len: usize,
    max_pages: usize,
    max_keys: u32,
    slot_count: u32,
    page_shift: u32,
    k: u32,
    level: usize,
    chunk: usize,
    chunks: usize,
    stride: usize,
    positions: usize,
    next_stride: usize,
    next_positions: usize,
    #[comptime] form: Form,
) {
    let own_row = CUBE_POS / chunks;
    let first = CUBE_POS % chunks * chunk;
    if own_row < rows {
        let row = first_row + own_row;
        let most = k as usize;
        let seen = visible_keys(visible, row, max_keys);
        let pages = SequencePages { table_row: row / query_len * max_pages, page_shift, slot_count };
        let names = Names { pages, form };
        let mut out_first = row * most;
        if comptime!(form.output == Output::Candidates) {
            out_first = own_row * next_stride + CUBE_POS % chunks * most;
        }
        if seen > most {
            // On this level.
            let mut len = seen;
            for _ in 0..level {
                len = len / chunk * most + min(len % chunk, most);
            }
            if first < len {
                let mut count = len - first;
                if comptime!(form.output == Output::Candidates) {
                    count = min(count, chunk);
                }
                let list = List { loads: own_row * stride + first / LOAD, first, count, positions };
                let target = Target { first: out_first, positions: next_positions };
                choose(ranks, page_table, out, &list, &names, &target, k, form);
                if comptime!(form.output == Output::Candidates) {
                    // Whole loads for the next level, too.
                    let next = len / chunk * most + min(len % chunk, most);
                    let place = next + UNIT_POS as usize;
                    if first + chunk >= len && place < next.div_ceil(LOAD) * LOAD {
                        out[own_row * next_stride + place] = 0i32;
                    }
                }
            }
        } else if comptime!(form.output != Output::Candidates) {
            names.all(page_table, out, out_first, seen, most);
        }
    }
}

/// Chooses the keys of query token `row`, which sees `seen`, by its ranks, that are there from load number `loads` on. Called by all units
/// of a cube.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn choose_of_row(
    ranks: &[Vector<u32, Load>],
    page_table: &[i32],
    out: &mut [i32],
    row: usize,
    seen: usize,
    loads: usize,
    pages: SequencePages,
    k: u32,
    #[comptime] form: Form,
) {
    let most = k as usize;
    let names = Names { pages, form };
    if seen > most {
        let list = List { loads, first: 0usize.runtime(), count: seen, positions: 0usize.runtime() };
        let target = Target { first: row * most, positions: 0usize.runtime() };
        choose(ranks, page_table, out, &list, &names, &target, k, form);
    } else {
        names.all(page_table, out, row * most, seen, most);
    }
}

/// What the result calls a key.
#[derive(CubeType)]
struct Names {
    pages: SequencePages,
    #[cube(comptime)]
    form: Form,
}

#[cube]
impl Names {
    fn of(&self, page_table: &[i32], position: usize) -> i32 {
        if comptime!(self.form.output == Output::Slots) {
            self.pages.slot(page_table, position) as i32
        } else {
            position as i32
        }
    }

    /// Writes the names of all keys that are seen, and -1 behind them.
    fn all(&self, page_table: &[i32], out: &mut [i32], first: usize, seen: usize, most: usize) {
        let mut place = UNIT_POS as usize;
        while place < most {
            let mut name = i32::new(-1);
            if place < seen {
                name = self.of(page_table, place);
            }
            out[first + place] = name;
            place += self.form.units;
        }
    }
}

/// Where the chosen keys are written.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Target {
    /// The first place.
    first: usize,
    /// Of candidates: from a rank to its position.
    positions: usize,
}

/// Writes the `k` best keys of a list, or all if it has fewer.
#[cube]
fn choose(
    ranks: &[Vector<u32, Load>],
    page_table: &[i32],
    out: &mut [i32],
    list: &List,
    names: &Names,
    target: &Target,
    k: u32,
    #[comptime] form: Form,
) {
    let mut own = Array::<u32>::new(comptime!(form.loads * LOAD));
    let mut tiles = 1usize.runtime();
    if comptime!(form.again) {
        tiles = list.count.div_ceil(form.units * form.loads * LOAD);
    } else {
        load_tile(ranks, list, &mut own, 0usize, form);
    }
    let mut space = Space::new(form);
    let border = find_border(ranks, list, &mut own, tiles, &mut space, k, form);

    let last = min(list.count as u32, k);
    // In the tiles before.
    let mut written = 0u32;
    let mut ties_left = border.ties;
    for tile in 0..tiles {
        if comptime!(form.again) {
            load_tile(ranks, list, &mut own, tile, form);
            clear_end(list, &mut own, tile, form);
        }
        let mut chosen = keys_from(&own, border.high, form);
        if border.ties > 0 {
            let ties = keys_from(&own, border.low, form) ^ chosen;
            let places = Places::of(ties, &mut space, form);
            chosen |= places.first_keys(&space, ties_left);
            ties_left -= min(ties_left, places.all);
        }
        let places = Places::of(chosen, &mut space, form);
        // Whatever is not there comes last.
        let end = min(written + places.all, last);
        let mut first = written;
        while first < end {
            places.put(first - written, &mut space, tile);
            sync_cube();
            write(ranks, page_table, out, list, names, target, &space, first, end, form);
            sync_cube();
            first += comptime!((FEW * form.units) as u32);
        }
        written = end;
    }
}

/// The keys of this unit that have at least this rank, a bit for each.
#[cube]
fn keys_from(own: &Array<u32>, rank: u32, #[comptime] form: Form) -> u32 {
    let mut keys = 0u32;
    #[unroll]
    for i in 0..comptime!(form.loads * LOAD) {
        keys |= select(own[i] >= rank, comptime!(1u32 << i), 0u32);
    }
    keys
}

/// Writes what is asked for of the keys in shared memory, which belong to places from `first` on and before `end`.
#[cube]
fn write(
    ranks: &[Vector<u32, Load>],
    page_table: &[i32],
    out: &mut [i32],
    list: &List,
    names: &Names,
    target: &Target,
    space: &Space,
    first: u32,
    end: u32,
    #[comptime] form: Form,
) {
    // All are read before one is written, and without a branch: so a unit waits for memory once.
    let mut numbers = Array::<i32>::new(FEW);
    let mut positions = Array::<i32>::new(FEW);
    #[unroll]
    for i in 0..FEW {
        let place = min(UNIT_POS + comptime!((i * form.units) as u32), end - first - 1);
        let key = space.few[place as usize] as usize;
        let mut position = list.first + key;
        if comptime!(form.candidates) {
            position = number(ranks, list.loads + list.positions, key) as usize;
        }
        if comptime!(form.output == Output::Candidates) {
            numbers[i] = i32::cast_from(number(ranks, list.loads, key));
            positions[i] = position as i32;
        } else {
            numbers[i] = names.of(page_table, position);
        }
    }
    #[unroll]
    for i in 0..FEW {
        let place = first + UNIT_POS + comptime!((i * form.units) as u32);
        if place < end {
            let at = target.first + place as usize;
            out[at] = numbers[i];
            if comptime!(form.output == Output::Candidates) {
                out[at + target.positions] = positions[i];
            }
        }
    }
}

#[cfg(feature = "offline")]
pub(super) fn offline() -> Vec<crate::offline::Entry> {
    use crate::offline::{Entry, form};
    let entry = |(name, form): (&str, Form)| {
        let (bits, dim) = (AddressType::U32, CubeDim::new_1d(form.units as u32));
        let form = form!(select_kernel, dim, [bits, _, _, _, _, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, form]);
        Entry::new(name, form).unchecked()
    };
    let full =
        Form { units: MAX_UNITS, plane: 32, loads: MAX_LOADS, again: false, candidates: false, output: Output::Slots };
    let forms = [
        ("lightning_index.select.positions", Form { output: Output::Positions, ..full }),
        ("lightning_index.select.slots", full),
        ("lightning_index.select.first_level", Form { units: 512, output: Output::Candidates, ..full }),
        ("lightning_index.select.last_level", Form { units: 512, candidates: true, ..full }),
        ("lightning_index.select.few_units", Form { units: UNITS, ..full }),
        ("lightning_index.select.again", Form { again: true, ..full }),
    ];
    forms.map(entry).into()
}
