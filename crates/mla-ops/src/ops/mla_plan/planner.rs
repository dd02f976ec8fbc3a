//! Splitting the keys of a batch over the machine, on the host.
//!
//! A split is a run of whole tiles (`tile` keys) of one sequence; each split is worked on by one cube, and the results of a
//! sequence's splits are merged. The plan says which splits there are and which cube runs which of them. The device has a
//! planner of its own with the same result; this one is what it is tested against, and serves backends without kernels.

use super::Splits;

/// A split: the keys `first_key..end_key` of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkItem {
    /// The sequence, an index into the batch.
    pub sequence: u32,
    /// First key; a multiple of the tile.
    pub first_key: u32,
    /// One past the last key; a multiple of the tile, or the sequence's length.
    pub end_key: u32,
    /// Which split of its sequence this is, from 0.
    pub split: u32,
}

/// Who works on what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPlan {
    /// All splits, ordered by (sequence, split). A sequence without keys has one, with an empty range, so that somebody writes
    /// its output.
    pub items: Vec<WorkItem>,
    /// [cubes + 1]: cube `c` runs `items[cube_ptr[c]..cube_ptr[c + 1]]`, possibly none.
    pub cube_ptr: Vec<u32>,
    /// [B + 1]: the splits of sequence `b` are `items[split_ptr[b]..split_ptr[b + 1]]`.
    pub split_ptr: Vec<u32>,
}

/// Cuts every sequence into splits and deals the splits out to `cubes` cubes, in order, so that the cube with the most tiles
/// has as few as possible (a sequence without keys counts as one tile).
///
/// Negative lengths count as 0; a `tile` or `cubes` of 0 counts as 1.
pub fn plan_splits(seq_lens: &[i32], tile: usize, cubes: usize, splits: Splits) -> HostPlan {
    let (tile, cubes) = (tile.max(1), cubes.max(1));
    let mut builder = PlanBuilder::new(seq_lens, tile);
    match splits {
        Splits::Auto => {
            if !builder.deal_whole(cubes) {
                builder.cut_by_share(cubes);
            }
        }
        Splits::Count(n) => {
            builder.cut_each(|tiles, split| {
                // Rounding down keeps the pieces within one tile of each other.
                let pieces = (n.max(1) as u64).min(tiles);
                (split < pieces).then(|| (split + 1) * tiles / pieces)
            });
            builder.deal(cubes);
        }
        Splits::Tokens(n) => {
            let piece = n.max(1).div_ceil(tile) as u64;
            builder.cut_each(|tiles, split| {
                let first = split.saturating_mul(piece);
                (first < tiles).then(|| first.saturating_add(piece).min(tiles))
            });
            builder.deal(cubes);
        }
    }
    builder.plan
}

/// The most items that [`plan_splits`] makes for `batch` sequences of at most `max_seq_len` keys: known without the lengths,
/// so that memory can be set aside before they are.
///
/// A `tile` or `cubes` of 0 counts as 1.
pub fn max_items(batch: usize, cubes: usize, splits: Splits, max_seq_len: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    let max_tiles = max_seq_len.div_ceil(tile).max(1);
    match splits {
        // Every cube but the last ends at most one split early, and no split is less than a tile.
        Splits::Auto => batch.saturating_add(cubes.max(1)).min(batch.saturating_mul(max_tiles)),
        Splits::Count(n) => batch.saturating_mul(n.clamp(1, max_tiles)),
        Splits::Tokens(n) => batch.saturating_mul(max_tiles.div_ceil(n.max(1).div_ceil(tile))),
    }
}

/// Tiles that a cube may have above its share for sequences to stay whole.
const MAX_SLACK: u64 = 8;

/// Up to how many sequences and cubes that is tried: what the device's planner has room for.
const MAX_WHOLE: (usize, usize) = (2048, 256);

struct PlanBuilder {
    /// Non-negative lengths, in keys.
    lens: Vec<u64>,
    /// Keys of a tile.
    tile: u64,
    /// Tiles of each item.
    weights: Vec<u64>,
    plan: HostPlan,
}

impl PlanBuilder {
    fn new(seq_lens: &[i32], tile: usize) -> Self {
        Self {
            lens: seq_lens.iter().map(|&len| len.max(0) as u64).collect(),
            tile: tile as u64,
            weights: Vec::new(),
            plan: HostPlan { items: Vec::new(), cube_ptr: vec![0], split_ptr: vec![0] },
        }
    }

    /// Tiles of a sequence; at least one.
    fn tiles(&self, sequence: usize) -> u64 {
        self.lens[sequence].div_ceil(self.tile).max(1)
    }

    /// Auto, first: whole sequences, if with them no cube has much more than its share.
    fn deal_whole(&mut self, cubes: usize) -> bool {
        let tiles: Vec<u64> = (0..self.lens.len()).map(|b| self.tiles(b)).collect();
        let share = tiles.iter().sum::<u64>().div_ceil(cubes as u64);
        let bound = share + (share / 16).min(MAX_SLACK);
        let fits = (1..=MAX_WHOLE.0).contains(&tiles.len())
            && cubes <= MAX_WHOLE.1
            && tiles.iter().all(|&tiles| tiles <= bound)
            && runs_under(&tiles, bound) <= cubes;
        if fits {
            self.cut_each(|tiles, split| (split == 0).then_some(tiles));
            self.deal_under(bound, cubes);
        }
        fits
    }

    /// Auto, else: every cube takes the next `ceil(total / cubes)` tiles, and sequences are cut where a cube is full.
    fn cut_by_share(&mut self, cubes: usize) {
        let total: u64 = (0..self.lens.len()).map(|b| self.tiles(b)).sum();
        let share = total.div_ceil(cubes as u64);
        let mut room = share;
        for sequence in 0..self.lens.len() {
            let tiles = self.tiles(sequence);
            let mut first = 0;
            while first < tiles {
                let end = tiles.min(first + room);
                self.push(sequence, first, end);
                room -= end - first;
                first = end;
                if room == 0 {
                    self.close_cube();
                    room = share;
                }
            }
            self.close_sequence();
        }
        self.close_rest(cubes);
    }

    /// Cuts each sequence on its own: `end_of(tiles, split)` is the tile at which the split ends, `None` after the last one.
    fn cut_each(&mut self, end_of: impl Fn(u64, u64) -> Option<u64>) {
        for sequence in 0..self.lens.len() {
            let tiles = self.tiles(sequence);
            let (mut first, mut split) = (0, 0);
            while let Some(end) = end_of(tiles, split) {
                self.push(sequence, first, end);
                (first, split) = (end, split + 1);
            }
            self.close_sequence();
        }
    }

    /// Deals the items out as they are, in order. Every cube takes what fits under the smallest bound for which the cubes
    /// suffice.
    fn deal(&mut self, cubes: usize) {
        self.deal_under(smallest_bound(&self.weights, cubes), cubes);
    }

    fn deal_under(&mut self, bound: u64, cubes: usize) {
        let mut load = 0;
        for (item, &weight) in self.weights.iter().enumerate() {
            if load + weight > bound {
                self.plan.cube_ptr.push(item as u32);
                load = 0;
            }
            load += weight;
        }
        self.close_rest(cubes);
    }

    fn push(&mut self, sequence: usize, first_tile: u64, end_tile: u64) {
        let len = self.lens[sequence];
        let split_start = self.plan.split_ptr[sequence];
        self.weights.push(end_tile - first_tile);
        // The casts keep the values: lengths come from i32.
        self.plan.items.push(WorkItem {
            sequence: sequence as u32,
            first_key: (first_tile * self.tile).min(len) as u32,
            end_key: end_tile.saturating_mul(self.tile).min(len) as u32,
            split: self.plan.items.len() as u32 - split_start,
        });
    }

    fn close_sequence(&mut self) {
        self.plan.split_ptr.push(self.plan.items.len() as u32);
    }

    fn close_cube(&mut self) {
        self.plan.cube_ptr.push(self.plan.items.len() as u32);
    }

    /// The cubes after the last one that has work end where the items end.
    fn close_rest(&mut self, cubes: usize) {
        let end = self.plan.items.len() as u32;
        self.plan.cube_ptr.resize(cubes + 1, end);
    }
}

/// The smallest load such that `cubes` consecutive runs of items, none heavier than it, take up all items.
fn smallest_bound(weights: &[u64], cubes: usize) -> u64 {
    let total: u64 = weights.iter().sum();
    let heaviest = weights.iter().copied().max().unwrap_or(0);
    let (mut low, mut high) = (heaviest.max(total.div_ceil(cubes as u64)), total);
    while low < high {
        let middle = low + (high - low) / 2;
        if runs_under(weights, middle) <= cubes {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// How many runs it takes if each takes as many items as fit under `bound` (which no single item exceeds).
fn runs_under(weights: &[u64], bound: u64) -> usize {
    let (mut runs, mut load) = (1, 0);
    for &weight in weights {
        if load + weight > bound {
            runs += 1;
            load = 0;
        }
        load += weight;
    }
    runs
}

#[cfg(test)]
#[path = "planner_tests.rs"]
mod tests;
