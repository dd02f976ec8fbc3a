//! The device's plan against a plain one, entry by entry.

use cubecl::prelude::*;
use mla_kernels::mla_plan::{self, PlanArgs, PlanError, PlanLists, SplitMode};

use super::support::{arg, for_each_client, read, upload};

/// What a plan consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub items: Vec<[i32; 4]>,
    pub cube_ptr: Vec<i32>,
    pub split_ptr: Vec<i32>,
}

/// The plan, by counting tiles one by one and trying every load.
pub fn expected(lens: &[i32], longest: usize, tile: usize, cubes: usize, mode: SplitMode) -> Plan {
    let lens: Vec<usize> = lens.iter().map(|&len| (len.max(0) as usize).min(longest)).collect();
    let tiles: Vec<usize> = lens.iter().map(|len| len.div_ceil(tile).max(1)).collect();
    let total: usize = tiles.iter().sum();
    let share = total.div_ceil(cubes);
    let bound = share + (share / 16).min(8);
    // Whole sequences where they suit the cubes.
    let whole = mode == SplitMode::Auto
        && (1..=2048).contains(&lens.len())
        && cubes <= 256
        && tiles.iter().all(|&n| n <= bound)
        && deal_under(&tiles, bound).len() <= cubes;

    let mut plan = Plan { items: Vec::new(), cube_ptr: vec![0], split_ptr: vec![0] };
    let mut weights = Vec::new();
    let mut counted = 0;
    for (b, &n) in tiles.iter().enumerate() {
        let is_cut = |at: usize| match mode {
            SplitMode::Auto => !whole && (counted + at).is_multiple_of(share),
            SplitMode::Count(pieces) => {
                let pieces = pieces.clamp(1, n);
                (0..pieces).any(|piece| piece * n / pieces == at)
            }
            SplitMode::Tokens(keys) => at.is_multiple_of(keys.max(1).div_ceil(tile)),
        };
        let mut cuts: Vec<usize> = (0..n).filter(|&at| at == 0 || is_cut(at)).collect();
        cuts.push(n);
        for (split, cut) in cuts.windows(2).enumerate() {
            if mode == SplitMode::Auto && !whole && counted + cut[0] > 0 && (counted + cut[0]).is_multiple_of(share) {
                plan.cube_ptr.push(plan.items.len() as i32);
            }
            let key = |at: usize| (at * tile).min(lens[b]) as i32;
            plan.items.push([b as i32, key(cut[0]), key(cut[1]), split as i32]);
            weights.push(cut[1] - cut[0]);
        }
        counted += n;
        plan.split_ptr.push(plan.items.len() as i32);
    }
    if whole {
        plan.cube_ptr = deal_under(&weights, bound);
    } else if mode != SplitMode::Auto {
        plan.cube_ptr = deal(&weights, cubes, total);
    }
    plan.cube_ptr.resize(cubes + 1, plan.items.len() as i32);
    plan
}

/// Where the cubes' runs start, under the smallest load that works.
fn deal(weights: &[usize], cubes: usize, total: usize) -> Vec<i32> {
    let heaviest = weights.iter().copied().max().unwrap_or(0);
    // No load below the mean can do.
    (heaviest.max(total.div_ceil(cubes))..=total)
        .map(|bound| deal_under(weights, bound))
        .find(|starts| starts.len() <= cubes)
        .expect("the total works")
}

/// Where the runs start that take as many items as fit under a load.
fn deal_under(weights: &[usize], bound: usize) -> Vec<i32> {
    let mut starts = vec![0];
    let mut load = 0;
    for (item, &weight) in weights.iter().enumerate() {
        if load + weight > bound {
            starts.push(item as i32);
            load = 0;
        }
        load += weight;
    }
    starts
}

/// A problem: lengths, the longest one that is allowed, the tile, and the number of cubes.
struct Case<'a> {
    lens: &'a [i32],
    longest: usize,
    tile: usize,
    cubes: usize,
}

impl Case<'_> {
    /// Plans on the device, with `spare` rows more than it takes, and compares.
    fn check(&self, client: &Client, mode: SplitMode, spare: usize) {
        self.check_lists(client, (mode, spare), self.lens, None);
    }

    /// `first` and what else there is of lists is what the device makes the lengths of.
    fn check_lists(
        &self,
        client: &Client,
        (mode, spare): (SplitMode, usize),
        first: &[i32],
        lists: Option<([usize; 2], Option<&[i32]>)>,
    ) {
        let Self { lens, longest, tile, cubes } = *self;
        let batch = lens.len();
        let capacity = mode.max_items(batch, cubes, longest, tile) + spare;
        let seq_lens = upload(client, if batch == 0 { &[0] } else { first });
        // One number more than the kernel may write, each.
        let garbage = |n: usize| upload(client, &vec![77_777i32; n + 1]);
        let (items, cube_ptr, split_ptr) = (garbage(capacity * 4), garbage(cubes + 1), garbage(batch + 1));
        let args = PlanArgs {
            seq_lens: arg(&seq_lens, batch),
            lists: lists
                .map(|(most, second)| PlanLists { most, second: second.map(|lens| arg(&upload(client, lens), batch)) }),
            items: arg(&items, capacity * 4),
            cube_ptr: arg(&cube_ptr, cubes + 1),
            split_ptr: arg(&split_ptr, batch + 1),
            batch,
            cubes,
            capacity,
            max_seq_len: longest,
            tile,
            mode,
        };
        mla_plan::launch(client, args).expect("launches");

        let what = format!("{batch} sequences {lens:?}, tile {tile}, {cubes} cubes, {mode:?}");
        let take = |handle, n: usize| {
            let mut values = read::<i32>(client, handle);
            assert_eq!(values[n..], [77_777], "wrote past the end: {what}");
            values.truncate(n);
            values
        };
        let plan = expected(lens, longest, tile, cubes, mode);
        assert_eq!(take(split_ptr, batch + 1), plan.split_ptr, "split_ptr: {what}");
        assert_eq!(take(cube_ptr, cubes + 1), plan.cube_ptr, "cube_ptr: {what}");
        let mut rows = plan.items.as_flattened().to_vec();
        rows.resize(capacity * 4, -1);
        assert_eq!(take(items, capacity * 4), rows, "items: {what}");
    }
}

fn lengths(seed: u32, batch: usize, longest: usize) -> Vec<i32> {
    let length = |x: f32| (x * longest as f32 * 1.2) as i32;
    // Some are negative or too long, some 0.
    super::support::random(seed, batch)
        .into_iter()
        .enumerate()
        .map(|(b, x)| if b % 7 == 3 { 0 } else { length(if b % 5 == 4 { x } else { x.abs() }) })
        .collect()
}

const MODES: [SplitMode; 9] = [
    SplitMode::Auto,
    SplitMode::Count(0),
    SplitMode::Count(1),
    SplitMode::Count(3),
    SplitMode::Count(64),
    SplitMode::Tokens(0),
    SplitMode::Tokens(64),
    SplitMode::Tokens(200),
    SplitMode::Tokens(usize::MAX),
];

#[test]
fn mla_plan_is_the_plan_of_plain_loops() {
    for_each_client(|client| {
        for (seed, batch) in [0, 1, 3, 200].into_iter().enumerate() {
            for (cubes, longest) in [(1, 200), (3, 5000), (132, 5000), (300, 1)] {
                for tile in [64, 7] {
                    let lens = lengths(seed as u32 + 9, batch, longest);
                    let case = Case { lens: &lens, longest, tile, cubes };
                    for (i, mode) in MODES.into_iter().enumerate() {
                        case.check(client, mode, i % 3);
                    }
                }
            }
        }
    });
}

/// Batches that just suit the cubes with whole sequences, and just do not.
#[test]
fn mla_plan_with_whole_sequences() {
    for_each_client(|client| {
        let equal = |batch: usize, len: i32| vec![len; batch];
        let mut one_longer = equal(64, 4096);
        one_longer[40] += 5 * 64;
        for (lens, cubes, whole) in [
            (equal(64, 4096), 66, true),
            (equal(128, 4096), 66, true),
            (equal(128, 4096), 69, false),
            (one_longer, 66, false),
            (equal(1, 4096), 1, true),
            (equal(3, 0), 5, true),
            (equal(240, 2176), 250, true),
            (equal(260, 2176), 270, false),
            (equal(2048, 704), 230, true),
            (equal(2049, 704), 230, false),
        ] {
            let plan = expected(&lens, 5000, 64, cubes, SplitMode::Auto);
            assert_eq!(plan.items.len() == lens.len(), whole, "{} sequences of {} keys", lens.len(), lens[0]);
            Case { lens: &lens, longest: 5000, tile: 64, cubes }.check(client, SplitMode::Auto, 0);
        }
    });
}

/// Each list in whole tiles, one behind the other; no list counts more entries than it has room for.
#[test]
fn mla_plan_of_lists() {
    for_each_client(|client| {
        for (batch, cubes) in [(1, 66), (5, 132), (70, 9), (3000, 44)] {
            for (most, tile) in [([2048, 0], 64), ([128, 600], 64), ([0, 70], 64), ([90, 33], 7)] {
                let [first, second] = [0, 1].map(|list| lengths(batch as u32 + list, batch, most[list as usize]));
                let in_tiles = |len: i32, most: usize| (len.max(0) as usize).min(most).next_multiple_of(tile) as i32;
                let longest = most.map(|most| most.next_multiple_of(tile)).iter().sum();
                for of_second in [None, Some(second.as_slice())] {
                    let second = |b: usize| of_second.map_or(most[1] as i32, |lens| lens[b]);
                    let sum = |(b, &len): (usize, &i32)| in_tiles(len, most[0]) + in_tiles(second(b), most[1]);
                    let lens: Vec<i32> = first.iter().enumerate().map(sum).collect();
                    let case = Case { lens: &lens, longest, tile, cubes };
                    case.check_lists(client, (SplitMode::Auto, 2), &first, Some((most, of_second)));
                }
            }
        }
    });
}

/// More sequences than there are prefix sums in shared memory, so that each stands for several.
#[test]
fn mla_plan_of_many_sequences() {
    for_each_client(|client| {
        let lens = lengths(5, 5001, 900);
        let case = Case { lens: &lens, longest: 900, tile: 64, cubes: 132 };
        for mode in [SplitMode::Auto, SplitMode::Count(3), SplitMode::Tokens(128)] {
            case.check(client, mode, 0);
        }
    });
}

/// More pieces than 16 bits count: their product with the number of tiles does not fit into 32.
#[test]
fn mla_plan_of_many_pieces() {
    for_each_client(|client| {
        let case = Case { lens: &[350_004, 17, 350_003], longest: 350_004, tile: 1, cubes: 5 };
        let lens = case.lens;
        let mode = SplitMode::Count(70_001);
        let capacity = mode.max_items(lens.len(), case.cubes, case.longest, case.tile);
        let (items, cube_ptr, split_ptr) =
            (client.empty(capacity * 16), client.empty((case.cubes + 1) * 4), client.empty((lens.len() + 1) * 4));
        let args = PlanArgs {
            seq_lens: arg(&upload(client, lens), lens.len()),
            lists: None,
            items: arg(&items, capacity * 4),
            cube_ptr: arg(&cube_ptr, case.cubes + 1),
            split_ptr: arg(&split_ptr, lens.len() + 1),
            batch: lens.len(),
            cubes: case.cubes,
            capacity,
            max_seq_len: case.longest,
            tile: case.tile,
            mode,
        };
        mla_plan::launch(client, args).expect("launches");
        assert_eq!(read::<i32>(client, split_ptr), [0, 70_001, 70_018, 140_019]);
        let rows = read::<i32>(client, items);
        for (row, item) in rows.chunks_exact(4).take(70_001).enumerate() {
            let key = |split: usize| (split as u64 * 350_004 / 70_001) as i32;
            assert_eq!(item, [0, key(row), key(row + 1), row as i32]);
        }
        let starts = read::<i32>(client, cube_ptr);
        let last = starts[case.cubes];
        assert!(starts[0] == 0 && last == 140_019 && starts.is_sorted(), "{starts:?}");
    });
}

#[test]
fn mla_plan_refuses_what_does_not_fit() {
    for_each_client(|client| {
        let buffer = upload(client, &[0i32; 64]);
        let args = |cubes, capacity, max_seq_len, tile, mode| PlanArgs {
            seq_lens: arg(&buffer, 3),
            lists: None,
            items: arg(&buffer, 16),
            cube_ptr: arg(&buffer, 4),
            split_ptr: arg(&buffer, 4),
            batch: 3,
            cubes,
            capacity,
            max_seq_len,
            tile,
            mode,
        };
        let error = |args| mla_plan::launch(client, args).expect_err("refused");
        assert_eq!(error(args(0, 4, 9, 4, SplitMode::Auto)), PlanError::Zero("cubes"));
        assert_eq!(error(args(3, 6, 9, 0, SplitMode::Auto)), PlanError::Zero("tile"));
        let needed = PlanError::Capacity { capacity: 5, needed: 6 };
        assert_eq!(error(args(3, 5, 9, 4, SplitMode::Auto)), needed);
        let max_seq_len = i32::MAX as usize;
        let too_large = PlanError::TooLarge { batch: 3, max_seq_len, tile: 1 };
        assert_eq!(error(args(3, 6, max_seq_len, 1, SplitMode::Auto)), too_large);
    });
}
