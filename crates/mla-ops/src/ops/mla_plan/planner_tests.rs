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
