//! Lists of keys that end inside a tile, between blocks and among columns; poisoned rows where nothing may be read.

use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::vertical_slash_attention::{VerticalSlashError, VerticalSlashSizes, launch};
use mla_kernels::{DeviceError, Path};
use rstest::rstest;

use crate::ragged_attention::Host;
use crate::support::{for_each_client, random};
use crate::vertical_slash_case::Case;

/// Queries and keys of each sequence.
const LENGTHS: &[(usize, usize)] = &[(1, 1), (129, 200), (0, 5), (65, 64), (3, 0), (40, 17)];

#[rstest]
fn f32_matches_the_definition(
    #[values([64, 64], [80, 48], [5, 3])] widths: [usize; 2],
    #[values([1, 1], [6, 2])] heads: [usize; 2],
    #[values(false, true)] packed: bool,
    #[values(false, true)] causal: bool,
) {
    Case::<f32>::new(LENGTHS, heads, widths, packed, causal).check(1e-5);
}

#[rstest]
fn f16_matches_the_definition(
    #[values([64, 64], [80, 48], [5, 3])] widths: [usize; 2],
    #[values(false, true)] packed: bool,
    #[values(false, true)] causal: bool,
) {
    Case::<f16>::new(LENGTHS, [4, 2], widths, packed, causal).check(6e-4);
}

#[rstest]
fn bf16_matches_the_definition(#[values([64, 64], [5, 3])] widths: [usize; 2], #[values(false, true)] causal: bool) {
    Case::<bf16>::new(LENGTHS, [4, 2], widths, false, causal).check(5e-3);
}

/// Blocks around the tile of 64 queries and keys, and around the vector.
#[rstest]
fn any_block_sizes(
    #[values([1, 1], [16, 64], [64, 16], [63, 65], [200, 7], [65, 300])] block_size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    let mut case = Case::<f32>::new(LENGTHS, [2, 1], [12, 20], false, causal);
    case.block_size = block_size;
    case.make_lists();
    case.check(1e-5);
}

#[rstest]
fn softcaps(#[values(0.3, 5.0, 50.0)] softcap: f32) {
    let mut case = Case::<f32>::new(LENGTHS, [2, 1], [64, 64], false, true);
    case.softcap = softcap;
    case.check(1e-5);
}

/// The same for the matrix instructions: blocks end inside a tile of 64 places, or fill several.
#[rstest]
fn any_block_sizes_in_f16(
    #[values([1, 1], [16, 64], [63, 65], [200, 7], [65, 300])] block_size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    let mut case = Case::<f16>::new(LENGTHS, [2, 1], [64, 64], false, causal);
    case.block_size = block_size;
    case.make_lists();
    case.check(6e-4);
}

/// All widths of the matrix instructions, in rows of queries that have one list, or neighbouring ones of their own.
#[rstest]
fn all_widths_in_bf16(
    #[values([192, 128], [128, 128], [64, 64])] widths: [usize; 2],
    #[values([64, 64], [128, 64], [200, 128], [100, 48])] block_size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    let mut case = Case::<bf16>::new(&[(129, 200), (1, 70), (0, 5), (260, 300)], [2, 1], widths, true, causal);
    case.block_size = block_size;
    case.make_lists();
    case.check(5e-3);
}

/// More key blocks than are looked up at once, of which neighbouring rows have some in common, in any order and with gaps.
#[rstest]
fn long_lists_in_f16(#[values(false, true)] causal: bool, #[values(false, true)] ascending: bool) {
    let mut case = Case::<f16>::new(&[(130, 6500)], [2, 1], [64, 64], false, causal);
    for (at, list) in case.lists.iter_mut().enumerate() {
        let draws = random(7 + at as u32, 100);
        let mut blocks: Vec<i32> = (0..100).filter(|&i| draws[i as usize] < 0.7).map(|i| i * 64).collect();
        if !ascending {
            blocks.rotate_left(30 + at);
            blocks[40] = -1;
            blocks[41] = -1;
        }
        let columns = (0..90).filter(|i| draws[*i as usize] > 0.2).map(|i| 6400 + i).collect();
        *list = [blocks, columns];
    }
    let mut legal = Case::<f16>::new(&[(130, 6500)], [2, 1], [64, 64], false, causal);
    legal.lists = case.lists.iter().map(|list| [without_none(&list[0]), list[1].clone()]).collect();
    case.check_against(&legal, 6e-4);
}

/// Of two neighbouring rows one has few keys, far apart among those of the other, or none: the tiles between them are more than have room.
#[rstest]
fn lists_that_are_far_apart(
    #[values(0, 1)] long: usize,
    #[values(vec![], vec![0, 16, 17, 39], vec![20])] blocks: Vec<i32>,
    #[values(0, 70)] columns: i32,
    #[values([64, 64], [192, 128])] widths: [usize; 2],
) {
    let mut case = Case::<bf16>::new(&[(128, 2700)], [1, 1], widths, false, false);
    case.lists = vec![[blocks.iter().map(|block| block * 64).collect(), (2600..2600 + columns).collect()]; 2];
    case.lists[long] = [(0..40).map(|block| block * 64).collect(), (2570..2570 + 10 * columns.min(9)).collect()];
    case.check(5e-3);
}

/// What altered kernels are to be noticed by: lists that end anywhere in a tile, more tiles than are looked up at once, rows with one list,
/// and neighbouring ones with much or little in common.
#[rstest]
#[case(&[(64, 64)], [1, 1], [64, 64])]
#[case(&[(129, 200), (3, 0), (40, 17)], [2, 1], [64, 64])]
#[case(&[(200, 330)], [2, 2], [64, 64])]
#[case(&[(132, 300), (1, 70)], [4, 2], [128, 64])]
#[case(&[(190, 700)], [1, 1], [64, 128])]
#[case(&[(128, 520)], [1, 1], [64, 64])]
fn mutants_of_blocks(#[case] lengths: &[(usize, usize)], #[case] heads: [usize; 2], #[case] block_size: [usize; 2]) {
    let mut case = Case::<bf16>::new(lengths, heads, [192, 128], false, true);
    case.block_size = block_size;
    case.make_lists();
    match lengths {
        [(190, _)] => {
            case.lists[1] = [(0..4).map(|block| 1 + block * 128).collect(), (570..650).collect()];
            case.lists[2] = [vec![1, 384], vec![600]];
        }
        // Tiles that are full.
        [(128, _)] => {
            case.lists[0] = [vec![70, 140], (210..274).collect()];
            case.lists[1] = [vec![70, 300, 450], (364..428).chain(514..520).collect()];
        }
        _ => {}
    }
    case.poison_what_is_not_named();
    case.check(5e-3);
}

/// The same of key blocks that are no tiles, for any keys that are looked up one by one.
#[rstest]
#[case(&[(129, 200), (0, 5), (40, 17)], [2, 1], [64, 48])]
#[case(&[(130, 500)], [1, 1], [100, 7])]
#[case(&[(64, 300), (70, 64)], [2, 2], [64, 65])]
#[case(&[(128, 520)], [1, 1], [64, 32])]
fn mutants_of_any_keys(#[case] lengths: &[(usize, usize)], #[case] heads: [usize; 2], #[case] block_size: [usize; 2]) {
    let mut case = Case::<bf16>::new(lengths, heads, [128, 128], true, false);
    case.block_size = block_size;
    case.softcap = 20.0;
    case.make_lists();
    if block_size == [64, 32] {
        case.lists[0] = [vec![70, 140, 200], (232..264).collect()];
        case.lists[1] = [vec![3, 70], (102..166).collect()];
    }
    case.poison_what_is_not_named();
    case.check(5e-3);
}

/// What altered kernels are to be noticed by once more: bounds and counts out of range stand for those in range, of empty and of full
/// sequences and lists. Of two neighbouring rows one has all key blocks and no column, the other all columns.
#[rstest]
#[case(&[(128, 140), (64, 0), (0, 20), (128, 140)], [192, 128], [64, 64], false)]
#[case(&[(0, 10), (128, 100), (10, 6)], [128, 128], [64, 48], true)]
#[case(&[(70, 0), (128, 200), (0, 6)], [128, 128], [64, 48], true)]
fn mutants_out_of_range(
    #[case] lengths: &[(usize, usize)],
    #[case] widths: [usize; 2],
    #[case] block_size: [usize; 2],
    #[case] packed: bool,
) {
    let mut case = Case::<bf16>::with_spare(lengths, [1, 1], widths, packed, !packed, [0, 0]);
    (case.block_size, case.out_of_range) = (block_size, true);
    case.softcap = if packed { 20.0 } else { 0.0 };
    // One more than there are queries for.
    case.make_lists_of(3);
    let (blocks, columns) =
        if packed { (vec![3, 57], vec![1, 9, 53, 104, 203]) } else { (vec![3, 76], vec![1, 70, 143]) };
    for (at, list) in case.lists.iter_mut().enumerate() {
        // The other way round from sequence to sequence, and in the second case.
        let of_blocks = (at / 3 + at % 3 + usize::from(lengths[0].0 == 0)).is_multiple_of(2);
        *list = if of_blocks { [blocks.clone(), vec![]] } else { [vec![], columns.clone()] };
    }
    case.check(5e-3);
}

/// Block rows that end before the queries, and work that does not fill a round of cubes. What would be behind the last list is not in
/// memory.
#[rstest]
#[case(&[(40, 17), (17, 30), (0, 20), (9, 0), (30, 128)], [192, 128], [8, 64], false)]
#[case(&[(17, 40), (5, 64), (0, 7), (20, 0), (21, 128)], [128, 128], [8, 48], true)]
fn mutants_of_short_rows(
    #[case] lengths: &[(usize, usize)],
    #[case] widths: [usize; 2],
    #[case] block_size: [usize; 2],
    #[case] packed: bool,
) {
    let spare = if packed { [2, 1] } else { [0, 0] };
    let mut case = Case::<bf16>::with_spare(lengths, [1, 1], widths, packed, !packed, spare);
    case.block_size = block_size;
    case.softcap = if packed { 20.0 } else { 0.0 };
    case.make_lists_of(1);
    case.lists[1] = [vec![0], vec![29, 30]];
    // With a place for one more, 512 bytes.
    case.lists[4] = [vec![], (0..127).collect()];
    case.check(5e-3);
}

/// Key blocks of two tiles, more than are looked up at once: no block, a block at the first key and one that ends with the sequence, in
/// any place.
#[test]
fn mutants_of_long_lists() {
    let mut case = Case::<bf16>::new(&[(128, 260)], [1, 1], [192, 128], false, true);
    case.block_size = [64, 128];
    case.make_lists();
    for (row, list) in case.lists.iter_mut().enumerate() {
        let row = row as i32;
        let offset = |i: i32| match i {
            0 | 16 | 33 => 0,
            2 => 128,
            18 | 34 => 132 - row,
            _ if i % 3 == 0 => 260 + i % 2,
            _ => -1,
        };
        *list = [(0..35 + row).map(offset).collect(), vec![]];
    }
    case.check(5e-3);
}

/// Columns in any order, so that the only place that a row does not see is anywhere in a tile; lists without key blocks; more queries
/// than keys.
#[test]
fn mutants_of_columns() {
    let mut case = Case::<bf16>::new(&[(128, 300), (100, 70)], [2, 1], [192, 128], false, true);
    // The first query sees 173 keys, that of the second row 237.
    let mut columns: Vec<i32> = (0..192).map(|i| 10 + i % 96).collect();
    [5, 64 + 7, 128 + 40].into_iter().for_each(|place| columns[place] = 173);
    case.lists[0] = [vec![], columns];
    let columns = (0..64).map(|i| if i == 40 { 237 } else { 100 + i });
    case.lists[1] = [vec![], columns.chain([5, 300, 17, 299]).collect()];
    case.lists[2] = [vec![], vec![9, 300, 7]];
    case.lists[3] = [vec![64, 128], vec![]];
    case.lists[4] = [vec![0], (0..17).collect()];
    case.lists[6] = [vec![0], (0..17).rev().collect()];
    case.poison();
    case.check(5e-3);
}

/// One of two neighbouring rows has few keys, far apart among those of the other, in key blocks and in columns.
#[test]
fn mutants_of_rows_that_are_far_apart() {
    let mut case = Case::<bf16>::new(&[(128, 800)], [2, 1], [192, 128], false, true);
    let long = [(0..7).map(|block| block * 64).collect(), (448..768).collect()];
    let short = |first: i32| [vec![first, 384], vec![450]];
    case.lists = vec![long.clone(), short(0), short(192), long];
    case.poison();
    case.check(5e-3);
}

/// The same of key blocks that are no tiles, after rows of one tile each.
#[test]
fn mutants_of_any_keys_that_are_far_apart() {
    let mut case = Case::<bf16>::new(&[(128, 560)], [3, 1], [128, 128], true, false);
    (case.block_size, case.softcap) = ([64, 48], 20.0);
    let long = [(0..10).map(|block| block * 48).collect(), (480..561).collect()];
    let short = |first: i32| [vec![first], vec![300, 560, 301]];
    case.lists = vec![short(96), short(0), long.clone(), short(49), short(0), long];
    case.check(5e-3);
}

/// Tiles of which one half has no keys.
#[test]
fn mutants_of_half_tiles() {
    let mut case = Case::<bf16>::new(&[(128, 130)], [2, 1], [128, 128], true, false);
    (case.block_size, case.softcap) = ([64, 32], 20.0);
    case.lists = vec![
        [vec![-1, 70, -1, 3], vec![]],
        [vec![70], vec![]],
        [vec![70, 2, 35], vec![]],
        [vec![130, 2, 140, 35], vec![]],
    ];
    case.poison();
    case.check(5e-3);
}

/// A key far behind the others in its list that outweighs all that came before it, for every query. With 128 columns every query sees all
/// of the list.
#[rstest]
#[case([192, 128], [64, 64], false, false)]
#[case([128, 128], [64, 48], true, false)]
#[case([192, 128], [64, 64], false, true)]
#[case([128, 128], [64, 48], true, true)]
fn mutants_of_sums_that_are_scaled(
    #[case] widths: [usize; 2],
    #[case] block_size: [usize; 2],
    #[case] packed: bool,
    #[case] whole: bool,
) {
    let mut case = Case::<bf16>::new(&[(64, 130)], [1, 1], widths, packed, !packed);
    (case.block_size, case.softcap) = (block_size, if packed { 20.0 } else { 0.0 });
    case.lists[0] =
        if whole { [vec![], (0..64).chain((3..67).rev()).collect()] } else { [vec![0], (60..130).rev().collect()] };
    case.q.iter_mut().step_by(widths[0]).for_each(|first| *first = bf16::from_f32(4.0));
    case.k[64 * widths[0]] = bf16::from_f32(60.0);
    case.check(5e-3);
}

/// Queries that end anywhere in a tile of 64, with which the memory ends; more places than are looked up at once, and the first key in
/// any block.
#[rstest]
fn mutants_of_ends(#[values(7, 27, 35, 61)] queries: usize, #[values(false, true)] packed: bool) {
    let widths = if packed { [128, 128] } else { [192, 128] };
    let mut case = Case::<bf16>::with_spare(&[(queries, 70)], [4, 1], widths, packed, !packed, [0, 0]);
    case.block_size = [64, if packed { 48 } else { 64 }];
    case.softcap = if packed { 20.0 } else { 0.0 };
    case.make_lists();
    case.lists[0] = [vec![11, 0, 20, 0], vec![]];
    case.check(5e-3);
}

fn without_none(list: &[i32]) -> Vec<i32> {
    list.iter().copied().filter(|&first| first >= 0).collect()
}

/// What a sequence has for keys that none of its lists names may be anything.
#[rstest]
fn keys_that_no_list_names(#[values(false, true)] packed: bool, #[values(false, true)] causal: bool) {
    let mut case = Case::<f16>::new(LENGTHS, [4, 2], [128, 128], packed, causal);
    case.poison_what_is_not_named();
    case.check(6e-4);
}

/// Unchecked counts and bounds are taken as in range, and keys before the first are none.
#[test]
fn values_out_of_range() {
    fn check<E: Host>(tolerance: f64) {
        let new = || Case::<E>::new(&[(70, 90), (10, 20)], [2, 2], [64, 64], false, false);
        let (mut case, mut legal) = (new(), new());
        case.lists[0] = [vec![-1, -70, i32::MAX - 3], vec![-1, i32::MAX, i32::MIN, 3]];
        legal.lists[0] = [vec![], vec![3]];
        case.check_against(&legal, tolerance);
    }
    check::<f32>(1e-5);
    check::<f16>(6e-4);
}

/// A sequence without keys begins where the memory of the keys ends.
#[rstest]
fn queries_without_keys_at_the_end(#[values([128, 128], [64, 64])] widths: [usize; 2]) {
    let mut case = Case::<f16>::with_spare(&[(64, 128), (10, 0)], [1, 1], widths, true, false, [0, 0]);
    case.make_lists_of(1);
    case.lists[1] = [vec![], vec![3]];
    case.check(6e-4);
}

#[test]
fn nothing_to_attend() {
    Case::<f32>::new(&[], [2, 1], [8, 8], true, true).check(0.0);
    Case::<f32>::new(&[(0, 0)], [2, 1], [8, 8], true, true).check(0.0);
    Case::<f32>::new(&[(70, 0)], [2, 1], [8, 8], false, true).check(0.0);
    Case::<f32>::new(&[(70, 0)], [2, 1], [8, 8], true, false).check(0.0);
}

#[test]
fn what_the_kernel_cannot_do_is_an_error() {
    for_each_client(|client| {
        let refused = |change: fn(&mut VerticalSlashSizes)| {
            let (mut args, _) = Case::<f32>::new(&[(1, 1)], [1, 1], [1, 1], true, false).args(client);
            change(&mut args.sizes);
            launch(client, args, Path::Plain).expect_err("refused")
        };
        let int = i32::elem_type_native();
        assert_eq!(refused(|sizes| sizes.elem = i32::elem_type_native()), DeviceError::Elem(int).into());
        let error = refused(|sizes| sizes.key_width = 0);
        assert_eq!(error, VerticalSlashError::Width { key_width: 0, value_width: 1 });
        let error = refused(|sizes| (sizes.heads, sizes.kv_heads) = (3, 2));
        assert_eq!(error, VerticalSlashError::Heads { heads: 3, kv_heads: 2 });
        let error = refused(|sizes| sizes.rows = usize::MAX);
        assert!(matches!(error, VerticalSlashError::Cubes { .. }), "{error}");
    });
}
