//! Probability mass as whole numbers of 64 bits in two words: sums do not depend on the order in which they are made. Not every
//! device has such numbers.

use cubecl::prelude::*;

use super::philox::Random;

/// `high * 2^32 + low`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Mass {
    pub low: u32,
    pub high: u32,
}

#[cube]
impl Mass {
    /// The sum, which fits.
    pub fn plus(&self, other: &Mass) -> Mass {
        let low = self.low + other.low;
        Mass { low, high: self.high + other.high + u32::cast_from(low < other.low) }
    }

    /// The difference; `other` is not greater.
    pub fn minus(&self, other: &Mass) -> Mass {
        Mass { low: self.low - other.low, high: self.high - other.high - u32::cast_from(self.low < other.low) }
    }

    /// Whether this is smaller.
    pub fn is_below(&self, other: &Mass) -> bool {
        self.high < other.high || (self.high == other.high && self.low < other.low)
    }

    /// `self * part / 2^32`, rounded down.
    pub fn part(&self, part: u32) -> Mass {
        let carried = self.low.mul_hi(part);
        let low = self.high * part + carried;
        Mass { low, high: self.high.mul_hi(part) + u32::cast_from(low < carried) }
    }

    /// The same, rounded up.
    pub fn part_up(&self, part: u32) -> Mass {
        let down = self.part(part);
        down.plus(&Mass { low: u32::cast_from(self.low * part != 0), high: 0u32.runtime() })
    }

    /// `self * random / 2^64`, rounded down: one of the numbers below this one, as likely as each other. The first word of
    /// `random` is the higher one.
    pub fn draw(&self, random: &Random) -> Mass {
        // The product is a sum of two, of which the lowest words are left out.
        let lower = self.part(random.second);
        let lowest = self.low * random.first;
        let carry = carry(lowest, lower.low);
        let zero = 0u32.runtime();
        self.part(random.first).plus(&Mass { low: lower.high, high: zero }).plus(&Mass { low: carry, high: zero })
    }
}

/// What goes into the next word when `more` is added to `word`: 1 where the sum overflows.
#[cube]
pub(crate) fn carry(word: u32, more: u32) -> u32 {
    let sum = word + more;
    u32::cast_from(sum < word)
}
