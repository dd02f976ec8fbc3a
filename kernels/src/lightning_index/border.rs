//! The lowest rank among the `k` greatest of a list.

use cubecl::prelude::*;

use super::form::{Form, LOAD, Load};
use super::sums::{FEW, Space, UPPER, before_plane, over_cube, over_plane, plane_count, through_plane};
use crate::common::plane;

/// A guess is wrong on one side in one of 160 lists of random ranks, that is, costs a count more.
const LEAST_DEVIATIONS: f32 = 2.5;
/// What is between guesses then fits into shared memory: up to about 9 standard deviations of a sample of 1024.
const MOST_DEVIATIONS: f32 = 4.5;

/// The keys of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct List {
    /// The first load of ranks.
    pub loads: usize,
    /// The position of the first key, unless they are candidates.
    pub first: usize,
    /// Keys.
    pub count: usize,
    /// Of candidates: loads from a rank to its position.
    pub positions: usize,
}

/// The load number `i` of this unit, in tile number `tile` of a list. A plane reads consecutive loads, and its loads follow
/// those of the plane before: so neighbours read side by side, and few sums tell where a key belongs.
#[cube]
pub(super) fn load_index(tile: usize, i: usize, #[comptime] form: Form) -> usize {
    let unit = UNIT_POS as usize;
    let lane = unit % form.plane;
    (tile * form.units + unit - lane) * form.loads + i * form.plane + lane
}

/// The number at `at`, counted from a load on.
#[cube]
pub(super) fn number(numbers: &[Vector<u32, Load>], first: usize, at: usize) -> u32 {
    let four = numbers[first + at / LOAD];
    let mut number = four.extract(0usize);
    #[unroll]
    for n in 1..LOAD {
        number = select(at % LOAD == n, four.extract(n), number);
    }
    number
}

/// The ranks of a tile that belong to this unit, and of the list's end as often as units have room for them.
#[cube]
pub(super) fn load_tile(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tile: usize,
    #[comptime] form: Form,
) {
    let last = (list.count - 1) / LOAD;
    #[unroll]
    for i in 0..form.loads {
        let four = ranks[list.loads + min(load_index(tile, i, form), last)];
        #[unroll]
        for n in 0..LOAD {
            own[comptime!(i * LOAD + n)] = four.extract(n);
        }
    }
}

/// Puts 0 where a tile has no ranks. Not when they are loaded: a unit need not wait for them to guess.
#[cube]
pub(super) fn clear_end(list: &List, own: &mut Array<u32>, tile: usize, #[comptime] form: Form) {
    if (load_index(tile, comptime!(form.loads - 1).runtime(), form) + 1) * LOAD > list.count {
        #[unroll]
        for i in 0..form.loads {
            let key = load_index(tile, i, form) * LOAD;
            #[unroll]
            for n in 0..LOAD {
                let at = comptime!(i * LOAD + n);
                own[at] = select(key + n < list.count, own[at], 0u32);
            }
        }
    }
}

/// Which keys are chosen: those of rank `high` and above, and the first `ties` of those from `low` on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Border {
    pub low: u32,
    pub high: u32,
    pub ties: u32,
}

/// Finds the `k`-th greatest rank: narrows the interval in which it is, until it is known or so many ranks are above the middle
/// that it need not be. All are chosen if there are no more than `k`.
///
/// Two guesses from a sample come first. What is between them fits into shared memory as a rule, and few ranks are counted
/// from there on. Otherwise the interval is halved until it does.
#[cube]
pub(super) fn find_border(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tiles: usize,
    space: &mut Space,
    k: u32,
    #[comptime] form: Form,
) -> Border {
    let room = comptime!((FEW * form.units) as u32);
    let mut low = 0u32;
    let mut high = 0u32;
    let mut above = k;
    let mut low_guess = 0u32;
    let mut high_guess = 0u32;
    if list.count > k as usize && list.count > room as usize {
        let guess = Guess::of(ranks, list, &mut space.sums, k, form);
        low_guess = guess.low;
        high_guess = guess.high;
    }
    if comptime!(!form.again) {
        clear_end(list, own, 0usize, form);
    }
    if list.count > k as usize {
        // No rank is the greatest number.
        high = u32::MAX;
        above = 0u32;
        let mut from_low = list.count as u32;
        let mut turn = 0usize.runtime();
        let mut counts = 0u32.runtime();
        while above < k && high - low > 1 && from_low - above > room {
            let mut middle = low + (high - low) / 2;
            middle = select(counts == 0, low_guess, middle);
            middle = select(counts == 1, high_guess, middle);
            counts += 1;
            if middle > low && middle < high {
                let of_unit = count_from(ranks, list, own, tiles, middle, form);
                let total = over_cube(&mut space.sums, over_plane(of_unit, form), turn, form);
                turn = 1 - turn;
                if total > k {
                    low = middle;
                    from_low = total;
                } else {
                    high = middle;
                    above = total;
                }
            }
        }
        if above < k && high - low > 1 {
            let few = gather(ranks, list, own, tiles, space, low, high, form);
            let above_all = above;
            while above < k && high - low > 1 {
                let middle = low + (high - low) / 2;
                let mut of_plane = 0u32;
                #[unroll]
                for i in 0..FEW {
                    of_plane += plane_count(few[i] >= middle, form);
                }
                let total = above_all + over_cube(&mut space.sums, of_plane, turn, form);
                turn = 1 - turn;
                if total > k {
                    low = middle;
                } else {
                    high = middle;
                    above = total;
                }
            }
        }
    }
    Border { low, high, ties: k - above }
}

/// Two ranks between which the border probably is.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Guess {
    /// 0 if there is none.
    low: u32,
    /// The greatest number if there is none.
    high: u32,
}

#[cube]
impl Guess {
    /// From one rank of each unit. `k` is smaller than the list, which has several ranks for each unit.
    fn of(ranks: &[Vector<u32, Load>], list: &List, sums: &mut Shared<[u32]>, k: u32, #[comptime] form: Form) -> Guess {
        // From everywhere in the list, but not in step with what repeats in it.
        let step = list.count / form.units;
        let noise = (((UNIT_POS * 40_503u32) & 0xffffu32) >> 5) as usize;
        let sample = number(ranks, list.loads, UNIT_POS as usize * step + noise % step);

        // How many of the sample should be above the border.
        let units = comptime!(form.units as f32);
        let part = k as f32 / list.count as f32;
        let expected = part * units;
        let deviation = (expected * (1.0f32 - part)).sqrt();
        let low_least = (expected + LEAST_DEVIATIONS * deviation) as u32 + 1;
        let low_most = (expected + MOST_DEVIATIONS * deviation) as u32 + 2;
        let high_most = max(expected - LEAST_DEVIATIONS * deviation, 0.0f32) as u32;
        let high_least = max(expected - MOST_DEVIATIONS * deviation, 0.0f32) as u32;

        // Both are searched for at a time, each in an interval of its own.
        let mut low = 0u32;
        let mut low_end = u32::MAX.runtime();
        let mut high = u32::MAX.runtime();
        let mut high_start = 0u32;
        let mut low_open = low_least <= comptime!(form.units as u32);
        let mut high_open = high_most > 0;
        let mut turn = 0usize.runtime();
        while low_open || high_open {
            let middle_low = low + (low_end - low) / 2;
            let middle_high = high_start + (high - high_start) / 2;
            let of_plane = plane_count(sample >= middle_low, form) + plane_count(sample >= middle_high, form) * UPPER;
            let totals = over_cube(sums, of_plane, turn, form);
            turn = 1 - turn;
            if low_open {
                let total = totals % UPPER;
                if total >= low_least {
                    low = middle_low;
                } else {
                    low_end = middle_low;
                }
                low_open = (total < low_least || total > low_most) && low_end - low > 1;
            }
            if high_open {
                let total = totals / UPPER;
                if total <= high_most {
                    high = middle_high;
                } else {
                    high_start = middle_high;
                }
                high_open = (total < high_least || total > high_most) && high - high_start > 1;
            }
        }
        // Sums take turns from the beginning on again.
        sync_cube();
        Guess { low, high }
    }
}

/// How many ranks of this unit are at least this one.
#[cube]
fn count_from(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tiles: usize,
    rank: u32,
    #[comptime] form: Form,
) -> u32 {
    // More than one, which do not wait for each other.
    let mut sums = Array::<u32>::new(LOAD);
    #[unroll]
    for n in 0..LOAD {
        sums[n] = 0u32;
    }
    for tile in 0..tiles {
        if comptime!(form.again) {
            load_tile(ranks, list, own, tile, form);
            clear_end(list, own, tile, form);
        }
        #[unroll]
        for i in 0..comptime!(form.loads * LOAD) {
            sums[comptime!(i % LOAD)] += u32::cast_from(own[i] >= rank);
        }
    }
    let mut sum = 0u32;
    #[unroll]
    for n in 0..LOAD {
        sum += sums[n];
    }
    sum
}

/// The ranks from `low` on that are smaller than `high`, for which there is room in shared memory: some for each unit, and 0.
/// Without those of 0, as which also counts what is not there.
#[cube]
fn gather(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tiles: usize,
    space: &mut Space,
    low: u32,
    high: u32,
    #[comptime] form: Form,
) -> Array<u32> {
    let first = max(low, 1u32);
    let width = high - first;
    let mut filled = 0u32;
    for tile in 0..tiles {
        if comptime!(form.again) {
            load_tile(ranks, list, own, tile, form);
            clear_end(list, own, tile, form);
        }
        let mut inside = 0u32;
        #[unroll]
        for i in 0..comptime!(form.loads * LOAD) {
            inside |= select(own[i] - first < width, comptime!(1u32 << i), 0u32);
        }
        space.keys[UNIT_POS as usize] = inside;
        let of_unit = inside.count_ones();
        let mut through = of_unit;
        let mut of_plane = of_unit;
        if comptime!(form.plane > 1) {
            through = through_plane(of_unit, form);
            of_plane = plane::shuffle::<u32>(through, comptime!(form.plane as u32 - 1).runtime());
        }
        let sums = before_plane(&mut space.sums, of_plane, form);
        inside = space.keys[UNIT_POS as usize];
        let mut place = filled + sums.before + through - of_unit;
        #[unroll]
        for i in 0..comptime!(form.loads * LOAD) {
            if inside & comptime!(1u32 << i) != 0 {
                space.few[place as usize] = own[i];
                place += 1;
            }
        }
        filled += sums.all;
    }
    sync_cube();
    let mut few = Array::<u32>::new(FEW);
    #[unroll]
    for i in 0..FEW {
        let place = UNIT_POS as usize + comptime!(i * form.units);
        few[i] = 0u32;
        if place < filled as usize {
            few[i] = space.few[place];
        }
    }
    few
}
