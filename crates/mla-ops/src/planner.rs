//! Splitting the keys of a batch over the machine, on the host.
//!
//! A split is a run of whole tiles (`tile` keys) of one sequence; each split is worked on by one cube, and the results of a
//! sequence's splits are merged. The plan says which splits there are and which cube runs which of them. The device has a
//! planner of its own with the same result; this one is what it is tested against, and serves backends without kernels.

use serde::{Deserialize, Serialize};

/// Into how many pieces the keys of a sequence are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Splits {
    /// None, if the cubes of the machine can take whole sequences without any having more than a little above its share of the
    /// batch (a sixteenth, and at most 8 tiles of keys); otherwise as few as it takes to give every cube the same share.
    #[default]
    Auto,
    /// This many for every sequence (fewer for one that has fewer tiles), near-equal in size. 0 counts as 1.
    Count(usize),
    /// Pieces of this many keys, rounded up to whole tiles and counted from key 0. How a sequence is cut, and so its result,
    /// does not depend on the rest of the batch. 0 counts as 1.
    Tokens(usize),
}

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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges(plan: &HostPlan) -> Vec<(u32, u32, u32, u32)> {
        let range = |item: &WorkItem| (item.sequence, item.split, item.first_key, item.end_key);
        plan.items.iter().map(range).collect()
    }

    fn tiles(item: &WorkItem, tile: usize) -> usize {
        ((item.end_key - item.first_key) as usize).div_ceil(tile).max(1)
    }

    /// Tiles of the cube that has the most.
    fn longest(plan: &HostPlan, tile: usize) -> usize {
        let cubes = plan.cube_ptr.windows(2);
        let load = |c: &[u32]| {
            let items = &plan.items[c[0] as usize..c[1] as usize];
            items.iter().map(|item| tiles(item, tile)).sum()
        };
        cubes.map(load).max().unwrap_or(0)
    }

    /// The best longest run over all ways to cut the list into `cubes` runs.
    fn brute_force(weights: &[usize], cubes: usize) -> usize {
        if cubes == 1 {
            return weights.iter().sum();
        }
        let cut = |at: usize| {
            let (head, tail) = weights.split_at(at);
            head.iter().sum::<usize>().max(brute_force(tail, cubes - 1))
        };
        (0..=weights.len()).map(cut).min().unwrap_or(0)
    }

    #[test]
    fn auto_cuts_where_a_cube_is_full() {
        let plan = plan_splits(&[5, 0, 17], 4, 3, Splits::Auto);
        // 2 + 1 + 5 tiles: 3 for each cube.
        let expected = [(0, 0, 0, 5), (1, 0, 0, 0), (2, 0, 0, 12), (2, 1, 12, 17)];
        assert_eq!(ranges(&plan), expected);
        assert_eq!(plan.cube_ptr, [0, 2, 3, 4]);
        assert_eq!(plan.split_ptr, [0, 1, 2, 4]);
    }

    #[test]
    fn auto_leaves_sequences_whole_where_that_costs_little() {
        // Shares of 63 tiles would cut most sequences.
        let plan = plan_splits(&[64; 63], 1, 64, Splits::Auto);
        assert_eq!((plan.items.len(), longest(&plan, 1)), (63, 64));
        assert_eq!(plan.cube_ptr[..4], [0, 1, 2, 3]);
        // Shares of 108 tiles are far less than a sequence.
        let plan = plan_splits(&[128; 64], 1, 76, Splits::Auto);
        assert_eq!((plan.split_ptr[1], longest(&plan, 1)), (2, 108));
    }

    #[test]
    fn count_cuts_near_equal_pieces() {
        let plan = plan_splits(&[17, 3], 4, 2, Splits::Count(3));
        let expected = [(0, 0, 0, 4), (0, 1, 4, 12), (0, 2, 12, 17), (1, 0, 0, 3)];
        assert_eq!(ranges(&plan), expected);
        assert_eq!(plan.cube_ptr, [0, 2, 4]);
    }

    #[test]
    fn tokens_cut_at_fixed_keys() {
        let plan = plan_splits(&[17, 8, -3], 4, 2, Splits::Tokens(7));
        let expected = [(0, 0, 0, 8), (0, 1, 8, 16), (0, 2, 16, 17), (1, 0, 0, 8), (2, 0, 0, 0)];
        assert_eq!(ranges(&plan), expected);
        assert_eq!(plan.split_ptr, [0, 3, 4, 5]);
    }

    #[test]
    fn extremes_neither_hang_nor_overflow() {
        let all = [Splits::Auto, Splits::Count(0), Splits::Tokens(0)];
        for splits in all {
            let empty = plan_splits(&[], 64, 3, splits);
            assert_eq!((empty.cube_ptr, empty.split_ptr), (vec![0; 4], vec![0]));
            assert_eq!(plan_splits(&[3], 0, 0, splits).cube_ptr.len(), 2);
        }
        let long = [i32::MAX, i32::MIN, 1];
        for splits in [Splits::Auto, Splits::Count(7), Splits::Tokens(usize::MAX), Splits::Count(usize::MAX)] {
            let plan = plan_splits(&long, 1 << 20, 5, splits);
            assert!(plan.items.len() <= max_items(3, 5, splits, i32::MAX as usize, 1 << 20));
            assert_eq!(plan_splits(&long, usize::MAX, 5, splits).items.len(), 3);
        }
        assert_eq!(max_items(2, 5, Splits::Tokens(usize::MAX), usize::MAX, 1), 2);
        assert_eq!(max_items(2, 5, Splits::Count(9), usize::MAX, 1), 18);
    }

    fn splits() -> impl Strategy<Value = Splits> {
        prop_oneof![Just(Splits::Auto), (0..9usize).prop_map(Splits::Count), (0..40usize).prop_map(Splits::Tokens),]
    }

    proptest! {
        #[test]
        fn every_key_is_covered_once_in_order(
            lens in prop::collection::vec(-2..200i32, 0..9),
            (tile, cubes, splits) in (1..20usize, 1..12usize, splits()),
        ) {
            let plan = plan_splits(&lens, tile, cubes, splits);
            prop_assert_eq!(plan.split_ptr.len(), lens.len() + 1);
            for (b, &len) in lens.iter().enumerate() {
                let len = len.max(0) as u32;
                let own = &plan.items[plan.split_ptr[b] as usize..plan.split_ptr[b + 1] as usize];
                let mut next = 0;
                for (split, item) in own.iter().enumerate() {
                    prop_assert_eq!((item.sequence, item.split), (b as u32, split as u32));
                    prop_assert_eq!(item.first_key, next);
                    prop_assert!(item.end_key > item.first_key || (len == 0 && own.len() == 1));
                    prop_assert!(item.end_key == len || (item.end_key as usize).is_multiple_of(tile));
                    next = item.end_key;
                }
                prop_assert!(!own.is_empty() && next == len);
            }
            prop_assert_eq!(plan.split_ptr[lens.len()] as usize, plan.items.len());
            prop_assert_eq!(plan.cube_ptr.len(), cubes + 1);
            prop_assert!(plan.cube_ptr[0] == 0 && plan.cube_ptr.is_sorted());
            prop_assert_eq!(plan.cube_ptr[cubes] as usize, plan.items.len());
        }

        #[test]
        fn the_longest_cube_is_as_short_as_possible(
            lens in prop::collection::vec(0..12i32, 0..4),
            (tile, cubes, splits) in (1..5usize, 1..5usize, splits()),
        ) {
            let plan = plan_splits(&lens, tile, cubes, splits);
            let weights: Vec<usize> = match splits {
                // Auto may cut anywhere, so what is dealt out are single tiles.
                Splits::Auto => {
                    let total = plan.items.iter().map(|item| tiles(item, tile)).sum();
                    vec![1; total]
                }
                _ => plan.items.iter().map(|item| tiles(item, tile)).collect(),
            };
            prop_assert_eq!(longest(&plan, tile), brute_force(&weights, cubes));
        }

        #[test]
        fn count_makes_that_many_pieces_of_near_equal_size(
            lens in prop::collection::vec(0..200i32, 1..6), tile in 1..20usize, n in 1..12usize,
        ) {
            let plan = plan_splits(&lens, tile, 3, Splits::Count(n));
            for (b, &len) in lens.iter().enumerate() {
                let own = &plan.items[plan.split_ptr[b] as usize..plan.split_ptr[b + 1] as usize];
                prop_assert_eq!(own.len(), n.min((len as usize).div_ceil(tile).max(1)));
                let sizes: Vec<usize> = own.iter().map(|item| tiles(item, tile)).collect();
                let (least, most) = (sizes.iter().min(), sizes.iter().max());
                prop_assert!(most.unwrap() - least.unwrap() <= 1);
            }
        }

        #[test]
        fn tokens_do_not_see_the_neighbours(
            lens in prop::collection::vec(0..200i32, 1..6),
            (tile, cubes, n) in (1..20usize, 1..12usize, 0..60usize),
        ) {
            let plan = plan_splits(&lens, tile, cubes, Splits::Tokens(n));
            for (b, &len) in lens.iter().enumerate() {
                let alone = plan_splits(&[len], tile, 1, Splits::Tokens(n));
                let own = &plan.items[plan.split_ptr[b] as usize..plan.split_ptr[b + 1] as usize];
                let own: Vec<WorkItem> = own.iter().map(|&i| WorkItem { sequence: 0, ..i }).collect();
                prop_assert_eq!(own, alone.items);
            }
        }

        #[test]
        fn the_capacity_suffices(
            lens in prop::collection::vec(0..200i32, 0..9),
            (tile, cubes, splits) in (1..20usize, 1..12usize, splits()),
        ) {
            let most = lens.iter().copied().max().unwrap_or(0) as usize;
            let plan = plan_splits(&lens, tile, cubes, splits);
            prop_assert!(plan.items.len() <= max_items(lens.len(), cubes, splits, most, tile));
        }
    }
}
