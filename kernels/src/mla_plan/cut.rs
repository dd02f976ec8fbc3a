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
    pub fn tiles(&self, seq_lens: &[i32], sequence: u32) -> u32 {
        tiles_of(seq_lens, sequence, self.longest, self.tile)
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

/// Keys of a sequence.
#[cube]
pub(super) fn keys_of(seq_lens: &[i32], sequence: u32, longest: u32) -> u32 {
    min(max(seq_lens[sequence as usize], 0i32) as u32, longest)
}

/// Tiles of a sequence, at least one.
#[cube]
pub(super) fn tiles_of(seq_lens: &[i32], sequence: u32, longest: u32, tile: u32) -> u32 {
    max(keys_of(seq_lens, sequence, longest).div_ceil(tile), 1u32)
}
