//! The lowest rank among the `k` greatest of a list.

use cubecl::prelude::*;

use super::select::{ABOVE, Form, LOAD, Load};

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

/// The ranks of a tile that belong to this unit; 0 where there are none.
#[cube]
pub(super) fn load_tile(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tile: usize,
    #[comptime] form: Form,
) {
    #[unroll]
    for i in 0..form.loads {
        let at = load_index(tile, i, form);
        let mut four = Vector::<u32, Load>::new(0u32);
        let left = list.count - min(at * LOAD, list.count);
        if left > 0 {
            four = ranks[list.loads + at];
        }
        #[unroll]
        for n in 0..LOAD {
            own[comptime!(i * LOAD + n)] = select(n < left, four.extract(n), 0u32);
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

#[cube]
impl Border {
    /// What the keys of this unit are.
    pub fn kinds(&self, own: &Array<u32>, #[comptime] form: Form) -> Kinds {
        let mut above = 0u32;
        let mut from = 0u32;
        #[unroll]
        for i in 0..comptime!(form.loads * LOAD) {
            above |= select(own[i] >= self.high, comptime!(1u32 << i), 0u32);
            from |= select(own[i] >= self.low, comptime!(1u32 << i), 0u32);
        }
        Kinds { above, ties: from ^ above }
    }
}

/// What the keys of a unit are, a bit for each: these numbers take the place of the ranks in the unit's registers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Kinds {
    /// Chosen for sure.
    pub above: u32,
    /// Chosen if they are among the first.
    pub ties: u32,
}

#[cube]
impl Kinds {
    /// Those of a load.
    pub fn of_load(&self, i: usize) -> Kinds {
        let shift = (i * LOAD) as u32;
        let mask = comptime!((1u32 << LOAD) - 1);
        Kinds { above: (self.above >> shift) & mask, ties: (self.ties >> shift) & mask }
    }

    /// How many: those above in the upper 16 bits, ties in the lower ones.
    pub fn sum(&self) -> u32 {
        self.above.count_ones() * ABOVE + self.ties.count_ones()
    }
}

/// Finds the `k`-th greatest rank: halves the interval in which it is, until it is known or so many ranks are above the middle
/// that it need not be. All are chosen if there are no more than `k`.
#[cube]
pub(super) fn find_border(
    ranks: &[Vector<u32, Load>],
    list: &List,
    own: &mut Array<u32>,
    tiles: usize,
    k: u32,
    #[comptime] form: Form,
) -> Border {
    let mut low = 0u32;
    let mut high = 0u32;
    let mut above = k;
    if list.count > k as usize {
        let mut highest = 0u32;
        let mut lowest_negated = 0u32;
        for tile in 0..tiles {
            if comptime!(form.again) {
                load_tile(ranks, list, own, tile, form);
            }
            #[unroll]
            for i in 0..comptime!(form.loads * LOAD) {
                highest = max(highest, own[i]);
                // Of all but 0, as which also counts what is not there.
                lowest_negated = max(lowest_negated, 0u32 - own[i]);
            }
        }
        let mut parts = Shared::<[u32]>::new_slice(comptime!(2 * form.planes()));
        // No rank is the greatest number.
        high = over_cube(&mut parts, highest, 0usize, Reduction::Max, form) + 1;
        let mut middle = 0u32 - over_cube(&mut parts, lowest_negated, 1usize, Reduction::Max, form);
        above = 0u32;
        let mut turn = 0usize.runtime();
        while above < k && high - low > 1 {
            let own_total = count_from(ranks, list, own, tiles, middle, form);
            let total = over_cube(&mut parts, own_total, turn, Reduction::Sum, form);
            turn = 1 - turn;
            if total > k {
                low = middle;
            } else {
                high = middle;
                above = total;
            }
            middle = low + (high - low) / 2;
        }
    }
    Border { low, high, ties: k - above }
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

/// What becomes of the numbers of all units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Reduction {
    Sum,
    Max,
}

#[cube]
fn combine(a: u32, b: u32, #[comptime] reduction: Reduction) -> u32 {
    if comptime!(reduction == Reduction::Sum) { a + b } else { max(a, b) }
}

#[cube]
fn over_plane(value: u32, #[comptime] reduction: Reduction, #[comptime] form: Form) -> u32 {
    let mut all = value;
    #[unroll]
    for i in 0..comptime!(form.plane.ilog2()) {
        all = combine(all, plane_shuffle_xor(all, comptime!(1u32 << i).runtime()), reduction);
    }
    all
}

/// The reduction over a cube. `parts` has two numbers for each plane; calls take turns with 0 and 1, so that none writes what
/// another still reads.
#[cube]
fn over_cube(
    parts: &mut Shared<[u32]>,
    value: u32,
    turn: usize,
    #[comptime] reduction: Reduction,
    #[comptime] form: Form,
) -> u32 {
    let planes = comptime!(form.planes());
    let unit = UNIT_POS as usize;
    let lane = unit % form.plane;
    let first = turn * planes;
    let of_plane = over_plane(value, reduction, form);
    if lane == 0 {
        parts[first + unit / form.plane] = of_plane;
    }
    sync_cube();
    let mut all = 0u32;
    if comptime!(form.plane > 1) {
        #[unroll]
        for i in 0..comptime!(planes.div_ceil(form.plane)) {
            let at = lane + comptime!(i * form.plane);
            if at < planes {
                all = combine(all, parts[first + at], reduction);
            }
        }
        all = over_plane(all, reduction, form);
    } else {
        let mut distance = comptime!(form.units / 2).runtime();
        while distance > 0 {
            if unit < distance {
                parts[first + unit] = combine(parts[first + unit], parts[first + unit + distance], reduction);
            }
            sync_cube();
            distance /= 2;
        }
        all = parts[first];
    }
    all
}
