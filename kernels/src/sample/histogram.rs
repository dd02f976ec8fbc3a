//! How many tokens have which digits, and what they weigh; and the digit at which so many, or so much, is reached.

use cubecl::prelude::*;

use super::mass::{Mass, carry};
use super::select::{Form, GROUP};

/// Counts of tokens, then the lower and the upper words of their weights.
pub(crate) type Bins = Shared<[Atomic<u32>]>;

/// Adds a token, or several that weigh so much together. There are `bins` bins.
#[cube]
pub(crate) fn add(histogram: &[Atomic<u32>], bin: usize, count: u32, mass: &Mass, bins: usize) {
    histogram[bin].fetch_add(count);
    let before = histogram[bins + bin].fetch_add(mass.low);
    // Whoever makes the lower word overflow carries.
    let high = mass.high + carry(before, mass.low);
    if high != 0 {
        histogram[2 * bins + bin].fetch_add(high);
    }
}

/// Puts the best of all units' keys to place 0 and its token to place `units`, of several the first token. Called by all units of a
/// cube, a power of two, for each of which there are two places.
#[cube]
pub(crate) fn best_of(space: &mut Shared<[u32]>, key: u32, token: u32, #[comptime] units: usize) {
    let unit = UNIT_POS as usize;
    space[unit] = key;
    space[units + unit] = token;
    sync_cube();
    let mut distance = comptime!(units / 2).runtime();
    while distance > 0 {
        if unit < distance {
            let (other, place) = (space[unit + distance], space[units + unit + distance]);
            let own = space[unit];
            if other > own || (other == own && place < space[units + unit]) {
                space[unit] = other;
                space[units + unit] = place;
            }
        }
        sync_cube();
        distance /= 2;
    }
}

/// The same of the `chunks` parts of a row, whose keys and tokens are in `maxima`.
#[cube]
pub(crate) fn best_of_row(
    space: &mut Shared<[u32]>,
    maxima: &[u32],
    row: usize,
    chunks: usize,
    #[comptime] units: usize,
) {
    let mut key = 0u32;
    let mut token = u32::MAX.runtime();
    let mut chunk = UNIT_POS as usize;
    while chunk < chunks {
        let at = (row * chunks + chunk) * 2;
        let other = maxima[at];
        // Later parts have later tokens.
        if other > key {
            key = other;
            token = maxima[at + 1];
        }
        chunk += units;
    }
    best_of(space, key, token, units);
}

/// Sums over a histogram.
#[derive(CubeType)]
pub(crate) struct Sums {
    pub bins: Bins,
    /// Of the bins of each unit: counts, lower words, upper words.
    pub units: Shared<[u32]>,
    /// Of the units of each group.
    groups: Shared<[u32]>,
}

/// A bin, in the order from the highest to the lowest.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Found {
    pub bin: u32,
    /// Tokens in the bins above, and their weight.
    pub above: u32,
    pub above_low: u32,
    pub above_high: u32,
    /// Tokens in this one, and their weight.
    pub inside: u32,
    pub inside_low: u32,
    pub inside_high: u32,
}

#[cube]
impl Found {
    pub fn above_mass(&self) -> Mass {
        Mass { low: self.above_low, high: self.above_high }
    }

    pub fn inside_mass(&self) -> Mass {
        Mass { low: self.inside_low, high: self.inside_high }
    }
}

#[cube]
impl Sums {
    pub fn new(#[comptime] form: Form) -> Sums {
        Sums {
            bins: Shared::new_slice(comptime!(3 * form.bins())),
            units: Shared::new_slice(comptime!(3 * form.units)),
            groups: Shared::new_slice(comptime!(3 * form.units / GROUP)),
        }
    }

    /// Empties all bins. Called by all units of a cube, which have waited for each other then.
    pub fn clear(&mut self, #[comptime] form: Form) {
        sync_cube();
        let mut bin = UNIT_POS as usize;
        while bin < comptime!(3 * form.bins()) {
            self.bins[bin].store(0u32);
            bin += form.units;
        }
        sync_cube();
    }

    /// The highest bin with which so many tokens, or where `by_mass` says so, so much weight is reached: of the first `used` ones.
    /// The lowest, if it is not. Called by all units of a cube.
    pub fn find(&mut self, used: u32, by_mass: bool, count: u32, mass: &Mass, #[comptime] form: Form) -> Found {
        self.sum_units(used, form);
        let units = comptime!(form.units);
        let groups = comptime!(form.units / GROUP);
        let per_unit = used.div_ceil(comptime!(form.units as u32)) as usize;
        let mut above = 0u32;
        let mut above_low = 0u32;
        let mut above_high = 0u32;

        let mut place = 0usize.runtime();
        let mut end = comptime!(groups - 1).runtime();
        // First a group, then a unit of it, then a bin of that.
        for level in 0..3u32 {
            let mut goes_on = true;
            while goes_on {
                let mut inside = 0u32;
                let mut low = 0u32;
                let mut high = 0u32;
                if level == 0 {
                    inside += self.groups[place];
                    low += self.groups[groups + place];
                    high += self.groups[2 * groups + place];
                } else if level == 1 {
                    inside += self.units[place];
                    low += self.units[units + place];
                    high += self.units[2 * units + place];
                } else {
                    let bin = used as usize - 1 - place;
                    inside += self.bins[bin].load();
                    low += self.bins[form.bins() + bin].load();
                    high += self.bins[2 * form.bins() + bin].load();
                }
                let through = Mass { low: above_low, high: above_high }.plus(&Mass { low, high });
                let is_reached = (by_mass && !through.is_below(mass)) || (!by_mass && above + inside >= count);
                goes_on = !is_reached && place < end;
                if goes_on {
                    above += inside;
                    above_low = through.low;
                    above_high = through.high;
                    place += 1;
                }
            }
            if level == 0 {
                place *= GROUP;
                end = place + comptime!(GROUP - 1);
            } else if level == 1 {
                end = min(place * per_unit + per_unit, used as usize) - 1;
                place = min(place * per_unit, used as usize - 1);
            }
        }
        let bin = used as usize - 1 - place;
        Found {
            bin: bin as u32,
            above,
            above_low,
            above_high,
            inside: self.bins[bin].load(),
            inside_low: self.bins[form.bins() + bin].load(),
            inside_high: self.bins[2 * form.bins() + bin].load(),
        }
    }

    /// The sums of the units' bins, and of groups of units. A unit has neighbouring bins, the first unit the highest.
    fn sum_units(&mut self, used: u32, #[comptime] form: Form) {
        sync_cube();
        let unit = UNIT_POS as usize;
        let per_unit = used.div_ceil(comptime!(form.units as u32)) as usize;
        let mut count = 0u32;
        let mut low = 0u32;
        let mut high = 0u32;
        for i in 0..per_unit {
            let place = unit * per_unit + i;
            if place < used as usize {
                let bin = used as usize - 1 - place;
                let through = Mass { low, high }.plus(&Mass {
                    low: self.bins[form.bins() + bin].load(),
                    high: self.bins[2 * form.bins() + bin].load(),
                });
                count += self.bins[bin].load();
                low = through.low;
                high = through.high;
            }
        }
        self.units[unit] = count;
        self.units[form.units + unit] = low;
        self.units[2 * form.units + unit] = high;
        sync_cube();
        let groups = comptime!(form.units / GROUP);
        if unit < groups {
            let mut count = 0u32;
            let mut low = 0u32;
            let mut high = 0u32;
            for i in 0..GROUP {
                let other = unit * GROUP + i;
                let through = Mass { low, high }
                    .plus(&Mass { low: self.units[form.units + other], high: self.units[2 * form.units + other] });
                count += self.units[other];
                low = through.low;
                high = through.high;
            }
            self.groups[unit] = count;
            self.groups[groups + unit] = low;
            self.groups[2 * groups + unit] = high;
        }
        sync_cube();
    }

    /// The sums over all bins, after [`Self::find`].
    pub fn total(&self, #[comptime] form: Form) -> Found {
        let groups = comptime!(form.units / GROUP);
        let mut inside = 0u32;
        let mut low = 0u32;
        let mut high = 0u32;
        for group in 0..groups {
            let through = Mass { low, high }
                .plus(&Mass { low: self.groups[groups + group], high: self.groups[2 * groups + group] });
            inside += self.groups[group];
            low = through.low;
            high = through.high;
        }
        let zero = 0u32.runtime();
        Found { bin: zero, above: zero, above_low: zero, above_high: zero, inside, inside_low: low, inside_high: high }
    }
}
