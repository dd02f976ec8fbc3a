//! Small problems that together reach all paths of the specialised kernels. `tools/mutate.sh` records their launches and
//! sees which changes of the kernels these notice.

use burn::tensor::DType;
use mla_ops::{Path, SparseMlaArgs, SparseScope, Splits, sparse_mla};
use rstest::rstest;

use crate::devices::for_each_device;
use crate::ops_fixture::{DecodeCase, DecodeInputs, assert_state, ints, random, rng};
use crate::ops_sparse_mla::{Case as SparseCase, Inputs as SparseInputs, Pool};
use crate::ops_sparse_plan::plan_of;

/// One block of keys; an empty sequence, a split in two, a second tile of query rows that is not full; more blocks than
/// stages and two items for one cube; queries that see nothing; more pages than lanes; pages of more keys than a block.
#[rstest]
#[case(DecodeCase { lens: vec![5], heads: 3, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![140, 0, 1], query_len: 2, heads: 33, page_size: 64, splits: Splits::Tokens(64), ..latents() })]
#[case(DecodeCase { lens: vec![300, 65], heads: 16, page_size: 32, splits: Splits::Count(1), ..latents() })]
#[case(DecodeCase { lens: vec![1, 66], query_len: 4, heads: 5, page_size: 64, ..latents() })]
#[case(DecodeCase { lens: vec![1100], heads: 2, page_size: 32, splits: Splits::Count(1), ..latents() })]
#[case(DecodeCase { lens: vec![130, 33], query_len: 2, heads: 64, page_size: 128, ..latents() })]
fn ops_mutants_decode(#[case] case: DecodeCase) {
    check_fastest(&case, &ALL);
}

/// Many items for one cube, of three tiles of query rows: sequences that the first tile's rows do not see, sequences in
/// parts, the end of an item in each of the places where the next one is opened.
#[rstest]
#[case(vec![1, 5, 1, 70, 1])]
#[case(vec![5, 6, 1, 140])]
fn ops_mutants_decode_items(#[case] lens: Vec<usize>) {
    let case = DecodeCase { lens, query_len: 4, heads: 33, page_size: 64, splits: Splits::Tokens(64), ..latents() };
    check_fastest(&case, &ALL);
}

/// A last block that lacks one to five keys; rows of a tile that end at each of its keys; results and splits of twelve rows;
/// rows that see nothing among those behind the first eight; nothing but empty sequences.
#[rstest]
#[case(DecodeCase { lens: vec![63, 62, 61, 60, 59], heads: 12, page_size: 32, splits: Splits::Count(1), ..latents() })]
#[case(DecodeCase { lens: vec![16, 32], query_len: 16, heads: 1, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![32, 40], query_len: 32, heads: 1, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![64, 72], query_len: 64, heads: 1, page_size: 64, ..latents() })]
#[case(DecodeCase { lens: vec![70, 3], heads: 12, page_size: 32, splits: Splits::Tokens(64), ..latents() })]
#[case(DecodeCase { lens: vec![1, 3], query_len: 8, heads: 2, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![0, 0], heads: 12, page_size: 32, ..latents() })]
#[case(DecodeCase { lens: vec![0, 0], heads: 20, page_size: 32, ..latents() })]
fn ops_mutants_decode_ends(#[case] case: DecodeCase) {
    check_fastest(&case, &ALL);
}

/// As many items as the plan has room for, the last of them without keys: none is read behind them.
#[rstest]
fn ops_mutants_decode_last_items(#[values(0, 1, 2, 3)] with_keys: usize) {
    let lens = (0..32).map(|i| if (24..24 + with_keys).contains(&i) { 5 } else { 0 }).collect();
    check_fastest(&DecodeCase { lens, heads: 2, page_size: 32, splits: Splits::Count(1), ..latents() }, &TMA);
}

/// Page tables without room to spare: none is read behind the last entry. The last sequence is opened as the first, second
/// or third of its cube, or when three blocks have been computed.
#[rstest]
fn ops_mutants_decode_last_pages(
    #[values(0, 1, 2, 3)] before: usize,
    #[values((16, 256), (4, 1024))] last: (usize, usize),
) {
    let (batch, len) = last;
    let lens = (0..batch - 1).map(|i| if i + before + 1 >= batch { 5 } else { 0 }).chain([len]).collect();
    check_fastest(&exact(lens), &TMA);
}

/// The same where pages are read while others are computed.
#[test]
fn ops_mutants_decode_more_pages() {
    check_fastest(&exact(vec![5, 2048]), &TMA);
}

/// Page tables of whole units of memory.
fn exact(lens: Vec<usize>) -> DecodeCase {
    let case = DecodeCase { lens, heads: 2, page_size: 32, splits: Splits::Count(1), spare_pages: 0, ..latents() };
    let entries = case.lens.len() * case.lens.iter().max().map_or(0, |len| len.div_ceil(case.page_size));
    assert_eq!(entries * 4 % 512, 0, "{case:?}");
    case
}

/// Numbers of query rows between those of the portable kernel's tiles.
#[rstest]
fn ops_mutants_decode_rows(#[values(1, 7, 10, 14, 20, 23, 27, 30, 36, 40, 44, 48, 60, 69, 74, 84, 92)] heads: usize) {
    check_fastest(&DecodeCase { lens: vec![5], heads, page_size: 32, ..latents() }, &[Path::PortableMma]);
}

/// A cube that begins without keys, or ends with its first, full tile, for each of the portable kernel's tiles.
#[rstest]
fn ops_mutants_decode_one_tile(#[values(3, 20, 40)] heads: usize, #[values(0, 16, 32)] len: usize) {
    check_fastest(&DecodeCase { lens: vec![len], heads, page_size: len.max(16), ..latents() }, &[Path::PortableMma]);
}

/// What the portable kernel does with several items of a cube, for each of its tiles: an odd and an even number of turns
/// before an item, rows that see nothing, splits that end before their sequence.
#[rstest]
fn ops_mutants_decode_turns(#[values(3, 8, 16)] heads: usize) {
    let lens = vec![5, 0, 70, 1, 33, 130, 2, 3, 0, 64, 97, 1];
    let case = DecodeCase { lens, query_len: 4, heads, page_size: 32, splits: Splits::Tokens(64), ..latents() };
    check_fastest(&case, &[Path::PortableMma]);
}

/// The last tile of keys has by far the highest score, for every row: what was added before is scaled down. With rows for all
/// lanes, for each of the portable kernel's tiles.
#[rstest]
fn ops_mutants_decode_rescaling(#[values(8, 20, 40)] heads: usize) {
    let case =
        DecodeCase { lens: vec![66], heads, page_size: 32, splits: Splits::Count(1), sharpness: 1.5, ..latents() };
    check_fastest_of(&case, &ALL, DecodeInputs::with_last_key_as_queries);
}

/// One list of rows with a ninth tile. No entry; heads of one row of a warp and of all but one; blocks that are full, and one
/// with a single entry behind them; a second tile of heads; more blocks than slots are kept of; several tokens whose lists end within
/// a block.
#[rstest]
#[case([1, 1, 1], 5)]
#[case([2, 1, 12], 0)]
#[case([3, 1, 63], 64)]
#[case([1, 1, 64], 129)]
#[case([3, 1, 65], 65)]
#[case([3, 1, 16], 330)]
#[case([6, 1, 1], 5)]
#[case([5, 1, 2], 70)]
#[case([4, 1, 3], 135)]
#[case([2, 1, 4], 45)]
#[case([2, 1, 6], 110)]
fn ops_mutants_sparse_ninth_tile(#[case] shape: [usize; 3], #[case] most: usize) {
    let pools = vec![[9, 16, most]];
    check_sparse(&SparseCase { shape, widths: [576, 512], pools, ..latent_rows() }, &[]);
}

/// Two lists that have lengths, with a sink. No entry at all; tokens without rows before, between and behind those with; a first
/// list alone, a second alone, and both; ends of lists at each side of a block's, and within.
#[rstest]
#[case([5, 1, 5], [[9, 16, 128], [3, 64, 150]], [vec![0, 128, 0, 1, 0], vec![0, 150, 0, 63, 0]])]
#[case([4, 1, 16], [[9, 16, 70], [3, 64, 65]], [vec![64, 0, 65, 3], vec![0, 65, 64, 5]])]
#[case([2, 1, 1], [[9, 16, 70], [3, 64, 70]], [vec![0, 0], vec![0, 0]])]
#[case([3, 1, 64], [[9, 16, 0], [3, 64, 70]], [vec![0, 0, 0], vec![70, 0, 1]])]
#[case([3, 1, 65], [[9, 16, 66], [3, 64, 0]], [vec![66, 0, 1], vec![0, 0, 0]])]
#[case([3, 1, 63], [[9, 16, 200], [3, 64, 130]], [vec![200, 129, 128], vec![130, 129, 128]])]
#[case([8, 1, 1], [[9, 16, 128], [3, 64, 128]], [vec![0; 8], vec![0; 8]])]
#[case([8, 1, 2], [[9, 16, 128], [3, 64, 128]], [vec![0, 3, 0, 0, 0, 0, 0, 0], vec![0; 8]])]
#[case([8, 1, 3], [[9, 16, 128], [3, 64, 128]], [vec![5, 0, 0, 0, 0, 0, 0, 0], vec![0, 0, 4, 0, 0, 0, 0, 0]])]
#[case([8, 1, 4], [[9, 16, 128], [3, 64, 128]], [vec![2, 70, 0, 0, 0, 0, 0, 0], vec![70, 0, 0, 0, 0, 0, 0, 0]])]
#[case([8, 1, 5], [[9, 16, 130], [3, 64, 130]], [vec![5, 70, 0, 3, 129, 1, 66, 64], vec![7, 0, 9, 70, 0, 130, 2, 1]])]
#[case([8, 1, 6], [[9, 16, 130], [3, 64, 130]], [vec![0, 130, 1, 0, 70, 9, 0, 7], vec![1, 66, 129, 3, 0, 70, 5, 0]])]
#[case([8, 1, 7], [[9, 16, 130], [3, 64, 130]], [vec![5, 0, 3, 70, 0, 0, 9, 130], vec![0, 9, 0, 5, 130, 0, 70, 0]])]
#[case([8, 1, 8], [[9, 16, 130], [3, 64, 130]], [vec![5, 9, 0, 3, 0, 0, 9, 130], vec![0, 0, 9, 0, 130, 0, 70, 0]])]
#[case([8, 1, 9], [[9, 16, 130], [3, 64, 130]], [vec![70, 0, 3, 70, 0, 0, 9, 5], vec![0, 9, 0, 5, 130, 0, 70, 0]])]
#[case([8, 1, 10], [[9, 16, 128], [3, 64, 128]], [vec![0, 0, 0, 0, 0, 0, 0, 5], vec![0; 8]])]
#[case([8, 1, 11], [[9, 16, 128], [3, 64, 128]], [vec![0, 0, 0, 0, 0, 0, 0, 70], vec![0, 0, 0, 0, 0, 0, 0, 128]])]
#[case([4, 1, 12], [[9, 16, 128], [3, 64, 150]], [vec![40, 110, 0, 100], vec![100, 40, 45, 0]])]
#[case([6, 1, 97], [[9, 16, 130], [3, 64, 200]], [vec![64, 0, 65, 0, 130, 3], vec![1, 0, 64, 200, 129, 66]])]
#[case([3, 1, 128], [[9, 16, 400], [3, 64, 70]], [vec![400, 0, 257], vec![65, 0, 3]])]
fn ops_mutants_sparse_two_lists(#[case] shape: [usize; 3], #[case] pools: [Pool; 2], #[case] lengths: [Vec<i32>; 2]) {
    let sink = |head| if head % 8 == 1 { f32::NEG_INFINITY } else { head as f32 / 8.0 - 3.0 };
    let sink = Some((0..shape[2]).map(sink).collect());
    let case = SparseCase { shape, widths: [512, 512], pools: pools.to_vec(), lengths: true, sink, ..latent_rows() };
    check_sparse(&case, &lengths);
}

/// Lists that are split among four multiprocessors, by how long they may be: splits without blocks, of blocks of both lists, of
/// several tiles for one cube, of a token without rows.
#[rstest]
#[case([1, 1, 16], [[9, 16, 200], [3, 64, 130]], [vec![200], vec![130]])]
#[case([1, 1, 65], [[9, 16, 130], [3, 64, 256]], [vec![65], vec![200]])]
#[case([2, 1, 5], [[9, 16, 320], [3, 64, 128]], [vec![60, 0], vec![0, 0]])]
#[case([1, 1, 127], [[9, 16, 450], [3, 64, 128]], [vec![300], vec![128]])]
#[case([5, 1, 9], [[9, 16, 1024], [3, 64, 512]], [vec![200, 0, 64, 0, 3], vec![64, 0, 0, 65, 5]])]
#[case([5, 1, 10], [[9, 16, 1024], [3, 64, 512]], [vec![128, 64, 0, 129, 128], vec![64, 130, 192, 64, 128]])]
#[case([5, 1, 2], [[9, 16, 1024], [3, 64, 512]], [vec![1000, 1, 517, 63, 100], vec![3, 500, 0, 129, 65]])]
#[case([5, 1, 3], [[9, 16, 1024], [3, 64, 512]], [vec![5, 0, 700, 65, 33], vec![130, 1, 0, 511, 3]])]
#[case([5, 1, 4], [[9, 16, 1024], [3, 64, 512]], [vec![1000, 64, 0, 3, 70], vec![500, 0, 0, 0, 65]])]
#[case([5, 1, 5], [[9, 16, 1024], [3, 64, 512]], [vec![9, 13, 22, 17, 5], vec![11, 7, 3, 21, 30]])]
#[case([5, 1, 6], [[9, 16, 1024], [3, 64, 512]], [vec![90, 0, 22, 170, 0], vec![0, 70, 133, 21, 0]])]
#[case([5, 1, 7], [[9, 16, 1024], [3, 64, 512]], [vec![0, 9, 70, 0, 33], vec![130, 200, 0, 65, 0]])]
#[case([5, 1, 8], [[9, 16, 1024], [3, 64, 512]], [vec![180, 5, 0, 0, 0], vec![380, 0, 0, 0, 0]])]
#[case([5, 1, 11], [[9, 16, 1024], [3, 64, 512]], [vec![40, 0, 300, 110, 1000], vec![0, 45, 100, 60, 40]])]
fn ops_mutants_sparse_splits(#[case] shape: [usize; 3], #[case] pools: [Pool; 2], #[case] lengths: [Vec<i32>; 2]) {
    let case = SparseCase { shape, widths: [576, 512], pools: pools.to_vec(), lengths: true, ..latent_rows() };
    check_sparse(&case, &lengths);
}

/// Lists whose splits clusters of eight cubes, of four and of two merge, on a GPU of 36 multiprocessors: as many splits as cubes and fewer,
/// splits without blocks, two tiles of heads, tokens without rows, with a sink and without.
#[rstest]
#[case([1, 1, 64], [[9, 16, 130], [3, 64, 64]], [vec![130], vec![64]])]
#[case([1, 1, 33], [[9, 16, 400], [3, 64, 64]], [vec![400], vec![64]])]
#[case([1, 1, 5], [[9, 16, 128], [3, 64, 512]], [vec![70], vec![3]])]
#[case([2, 1, 65], [[9, 16, 70], [3, 64, 64]], [vec![70, 0], vec![64, 0]])]
#[case([3, 1, 67], [[9, 16, 130], [3, 64, 64]], [vec![130, 0, 1], vec![3, 0, 64]])]
#[case([5, 1, 1], [[9, 16, 130], [3, 64, 300]], [vec![130, 9, 0, 64, 70], vec![300, 0, 0, 65, 129]])]
#[case([9, 1, 3], [[9, 16, 70], [3, 64, 130]], [vec![70, 0, 5, 64, 0, 1, 65, 0, 70], vec![0, 130, 64, 0, 0, 1, 65, 3, 130]])]
fn ops_mutants_sparse_clusters(#[case] shape: [usize; 3], #[case] pools: [Pool; 2], #[case] lengths: [Vec<i32>; 2]) {
    let case = with_sink(shape, &pools);
    let sink = case.sink.filter(|_| shape[2] > 5);
    check_sparse(&SparseCase { widths: [512, 512], sink, ..case }, &lengths);
}

/// Lists that a plan divides: whole lists and several of a cube, lists of two cubes, cubes without any, lists without entries.
#[rstest]
#[case([1, 1, 9], [[9, 16, 70], [3, 64, 70]], [vec![0], vec![0]])]
#[case([3, 1, 5], [[9, 16, 70], [3, 64, 70]], [vec![65, 0, 3], vec![1, 64, 0]])]
#[case([2, 1, 65], [[9, 16, 300], [3, 64, 128]], [vec![300, 1], vec![128, 0]])]
#[case([6, 1, 13], [[9, 16, 128], [3, 64, 300]], [vec![128, 0, 64, 0, 1, 70], vec![300, 65, 0, 0, 0, 1]])]
#[case([6, 1, 9], [[9, 16, 130], [3, 64, 130]], [vec![0, 5, 0, 0, 0, 70], vec![0, 0, 0, 9, 0, 130]])]
#[case([6, 1, 10], [[9, 16, 130], [3, 64, 130]], [vec![0, 0, 0, 5, 0, 70], vec![0, 9, 0, 0, 0, 130]])]
#[case([4, 1, 9], [[9, 16, 130], [3, 64, 130]], [vec![3, 0, 0, 130], vec![9, 0, 0, 5]])]
#[case([1, 1, 9], [[9, 16, 130], [3, 64, 130]], [vec![70], vec![9]])]
#[case([3, 1, 9], [[9, 16, 70], [3, 64, 70]], [vec![5, 3, 7], vec![0, 0, 0]])]
#[case([3, 1, 10], [[9, 16, 70], [3, 64, 70]], [vec![5, 0, 0], vec![0, 3, 7]])]
#[case([1, 1, 11], [[9, 16, 130], [3, 64, 130]], [vec![129], vec![9]])]
#[case([4, 1, 12], [[9, 16, 130], [3, 64, 130]], [vec![40, 100, 0, 104], vec![104, 40, 45, 0]])]
#[case([5, 1, 66], [[9, 16, 300], [3, 64, 200]], [vec![65, 0, 300, 3, 0], vec![200, 0, 128, 70, 1]])]
fn ops_mutants_sparse_planned(#[case] shape: [usize; 3], #[case] pools: [Pool; 2], #[case] lengths: [Vec<i32>; 2]) {
    check_sparse_of(&with_sink(shape, &pools), &lengths, Some(0));
}

/// By a plan for lists that were longer when it was made.
#[rstest]
#[case([vec![3, 64, 0], vec![65, 0, 1]])]
#[case([vec![3, 2, 1, 0, 5], vec![0, 0, 3, 2, 1]])]
fn ops_mutants_sparse_planned_for_longer_lists(#[case] lengths: [Vec<i32>; 2]) {
    check_sparse_of(&with_sink([lengths[0].len(), 1, 9], &[[9, 16, 300], [3, 64, 230]]), &lengths, Some(150));
}

fn with_sink(shape: [usize; 3], pools: &[Pool]) -> SparseCase {
    let sink = Some((0..shape[2]).map(|head| head as f32 / 8.0 - 3.0).collect());
    SparseCase { shape, widths: [576, 512], pools: pools.to_vec(), lengths: true, sink, ..latent_rows() }
}

fn check_sparse(case: &SparseCase, lengths: &[Vec<i32>]) {
    check_sparse_of(case, lengths, None);
}

/// Checks a case whose lists have these lengths on GPUs that have a kernel of their own for it; `planned`: by a plan for lists that are
/// as much longer.
fn check_sparse_of(case: &SparseCase, lengths: &[Vec<i32>], planned: Option<i32>) {
    for_each_device(|device| {
        if case.own_kernel(device).is_some() {
            let mut inputs = case.inputs();
            for (scope, lengths) in inputs.scopes.iter_mut().zip(lengths) {
                scope.lengths = Some(lengths.clone());
                let most = scope.indices.len() / lengths.len();
                for (token, length) in lengths.iter().enumerate() {
                    // Behind a length are slots of rows, too.
                    let behind = &mut scope.indices[token * most..(token + 1) * most][*length as usize..];
                    behind.iter_mut().filter(|slot| **slot < 0).for_each(|slot| *slot = 1);
                }
            }
            fill(&mut inputs, case);
            let mut args = inputs.args(device);
            // Behind the lengths are others, so many that narrowing copies nothing (whole units of memory), and behind such lists is no
            // memory: nothing is read there.
            for (scope, lengths) in [Some(&mut args.scope), args.second.as_mut()].into_iter().flatten().zip(lengths) {
                let more = [lengths.as_slice(), &[i32::MAX; 128]].concat();
                let tensor = ints(&more, [more.len(), 1], device);
                scope.lengths = Some(tensor.narrow(0, 0, lengths.len()));
            }
            args.plan = planned.map(|more| {
                let longer = |scope: &SparseScope| {
                    let lengths = scope.lengths.clone().map(|lengths| lengths.add_scalar(more));
                    SparseScope { lengths, ..scope.clone() }
                };
                let (scope, second) = (longer(&args.scope), args.second.as_ref().map(longer));
                plan_of(&SparseMlaArgs { scope, second, ..args.clone() })
            });
            let state = sparse_mla(args, &case.options()).expect("legal");
            assert_state(&format!("{case:?} with {lengths:?} on {device:?}"), state, &inputs.expected());
        }
    });
}

/// New rows for the slots that tokens see, NaN for all others, of which slot 0 is always one: it would be read for a gap. The last
/// rows that the last of several tokens sees are its queries: their scores are by far the highest, and what was added before is
/// scaled down.
fn fill(inputs: &mut SparseInputs, case: &SparseCase) {
    let ([batch, query_len, heads], width, mut rng) = (case.shape, case.widths[0], rng(31));
    let tokens = batch * query_len;
    for scope in &mut inputs.scopes {
        scope.indices.iter_mut().filter(|slot| **slot == 0).for_each(|slot| *slot = -1);
        scope.rows.fill(f64::NAN);
        for token in 0..tokens {
            for slot in scope.slots(token) {
                scope.rows[slot * width..][..width].copy_from_slice(&random(&mut rng, width, case.dtype));
            }
        }
        if tokens > 1 {
            for (head, slot) in scope.slots(tokens - 1).into_iter().rev().take(heads).enumerate() {
                let query = &inputs.q[((tokens - 1) * heads + head) * width..][..width];
                scope.rows[slot * width..][..width].copy_from_slice(query);
            }
        }
    }
}

fn latent_rows() -> SparseCase {
    SparseCase { dtype: DType::BF16, ..Default::default() }
}

/// Kernels that load by TMA.
const TMA: [Path; 2] = [Path::Sm90, Path::Sm100];
const ALL: [Path; 3] = [Path::Sm90, Path::Sm100, Path::PortableMma];

/// Checks a case where the fastest kernel is one of these.
fn check_fastest(case: &DecodeCase, of: &[Path]) {
    check_fastest_of(case, of, |inputs| inputs);
}

/// The same of altered inputs.
fn check_fastest_of(case: &DecodeCase, of: &[Path], alter: impl Fn(DecodeInputs) -> DecodeInputs) {
    for_each_device(|device| {
        let fastest = case.paths(device)[0];
        if of.contains(&fastest) {
            alter(DecodeCase { path: Some(fastest), ..case.clone() }.inputs(21)).check(device);
        }
    });
}

fn latents() -> DecodeCase {
    DecodeCase { widths: (576, 512), dtype: DType::BF16, ..Default::default() }
}
