//! What is planned, and how sequences are cut into items.

use cubecl::prelude::*;

/// What the kernel plans.
#[derive(CubeType, CubeLaunch)]
pub(super) struct PlanCounts {
    /// Sequences.
    pub batch: u32,
    /// Keys of the longest sequence.
    pub longest: u32,
    /// Keys of a tile.
    pub tile: u32,
    pub cubes: u32,
    /// Rows of the item list.
    pub capacity: u32,
    /// Number of pieces, or tiles of a piece.
    pub amount: u32,
    /// Tiles of an item at most.
    pub heaviest: u32,
    /// Where keys are those of two lists: entries of each at most, in whole tiles.
    pub most: u32,
    pub most_beside: u32,
}

/// What the keys of a sequence are, as far as the kernel's code depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Keys {
    /// As many as its length says.
    OfLength,
    /// The entries of two lists, each in whole tiles; `second`: the second one has a length, too.
    OfLists { second: bool },
}

/// Keys of each sequence.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lengths<'a> {
    first: &'a [i32],
    second: &'a [i32],
    /// Entries of the lists at most, in whole tiles.
    most: u32,
    most_beside: u32,
    #[cube(comptime)]
    keys: Keys,
}

#[cube]
impl<'a> Lengths<'a> {
    pub fn new(first: &'a [i32], second: &'a [i32], counts: &PlanCounts, #[comptime] keys: Keys) -> Lengths<'a> {
        Lengths::<'a> { first, second, most: counts.most, most_beside: counts.most_beside, keys }
    }
}

#[cube]
impl Lengths<'_> {
    /// Keys of a sequence.
    pub fn keys_of(&self, sequence: u32, longest: u32, tile: u32) -> u32 {
        let own = max(self.first[sequence as usize], 0i32) as u32;
        if comptime!(self.keys == Keys::OfLength) {
            min(own, longest)
        } else {
            let mut beside = self.most_beside;
            if comptime!(self.keys == Keys::OfLists { second: true }) {
                beside = min(max(self.second[sequence as usize], 0i32) as u32, beside).div_ceil(tile) * tile;
            }
            min(own, self.most).div_ceil(tile) * tile + beside
        }
    }

    /// Tiles of a sequence, at least one.
    pub fn tiles_of(&self, sequence: u32, longest: u32, tile: u32) -> u32 {
        max(self.keys_of(sequence, longest, tile).div_ceil(tile), 1u32)
    }
}

/// How a sequence is cut, as far as the kernel's code depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    /// At the multiples of the share of a cube, counted over the whole batch.
    Shares,
    /// Into a number of pieces. `wide`: the square of that number does not fit into 32 bits.
    Pieces { wide: bool },
    /// Into pieces of a fixed size.
    Sizes,
}

/// How sequences are cut.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Cut {
    /// The longest sequence.
    pub longest: u32,
    /// Keys of a tile.
    pub tile: u32,
    /// Number of pieces, or tiles of a piece.
    pub amount: u32,
    /// Tiles of a cube, if all have the same.
    pub share: u32,
    /// Sequences that a prefix sum in shared memory stands for.
    pub group: u32,
    #[cube(comptime)]
    pub rule: Rule,
}

#[cube]
impl Cut {
    /// Tiles of a sequence.
    pub fn tiles(&self, lens: &Lengths, sequence: u32) -> u32 {
        lens.tiles_of(sequence, self.longest, self.tile)
    }

    /// Items of a sequence of `tiles` tiles that has `before` tiles of the batch before it.
    pub fn count(&self, tiles: u32, before: u32) -> u32 {
        if comptime!(self.rule == Rule::Shares) {
            (before + tiles - 1) / self.share - before / self.share + 1
        } else if comptime!(self.rule == Rule::Sizes) {
            tiles.div_ceil(self.amount)
        } else {
            min(tiles, self.amount)
        }
    }

    /// The tile of the sequence at which its split starts; the number of its tiles for the one after the last split.
    pub fn tile_at(&self, tiles: u32, before: u32, split: u32) -> u32 {
        if comptime!(self.rule == Rule::Shares) {
            let mut tile = 0u32;
            if split > 0 {
                tile = min((before / self.share + split) * self.share - before, tiles);
            }
            tile
        } else if comptime!(self.rule == Rule::Sizes) {
            min(split * self.amount, tiles)
        } else {
            // floor(split * tiles / pieces), without the product of two large numbers.
            let pieces = min(tiles, self.amount);
            split * (tiles / pieces) + scaled(tiles % pieces, split, pieces, self.rule)
        }
    }

    /// How many splits of a sequence lie completely in its first `end` tiles; `end < tiles`. Not for [`Rule::Shares`].
    pub fn splits_within(&self, tiles: u32, end: u32) -> u32 {
        if comptime!(self.rule == Rule::Sizes) {
            end / self.amount
        } else {
            let mut low = 0u32;
            let mut high = min(tiles, self.amount);
            while high - low > 1 {
                let middle = (low + high) / 2;
                if self.tile_at(tiles, 0u32, middle) <= end {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            low
        }
    }
}

/// floor(a * b / c) for a < c and b <= c.
#[cube]
fn scaled(a: u32, b: u32, c: u32, #[comptime] rule: Rule) -> u32 {
    if comptime!(rule == Rule::Pieces { wide: true }) {
        // Long division, with the product built up bit by bit.
        let mut quotient = 0u32;
        let mut rest = 0u32;
        for i in 0..32u32 {
            quotient *= 2;
            rest *= 2;
            if rest >= c {
                rest -= c;
                quotient += 1;
            }
            if (b >> (31 - i)) & 1 == 1 {
                rest += a;
                if rest >= c {
                    rest -= c;
                    quotient += 1;
                }
            }
        }
        quotient
    } else {
        a * b / c
    }
}
