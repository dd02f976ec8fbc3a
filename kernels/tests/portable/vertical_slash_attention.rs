//! Lists of keys that end inside a tile, between blocks and among columns; poisoned rows where nothing may be read.

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use mla_kernels::vertical_slash_attention::{
    AttentionArgs, Layout, VerticalSlashError, VerticalSlashOptions, VerticalSlashSizes, available, launch,
};
use mla_kernels::{DeviceError, Path};
use rstest::rstest;

use crate::ragged_attention::{Host, assert_close};
use crate::support::{arg, for_each_client, random, read, skip, upload};

/// What an output holds that was not written.
const UNWRITTEN: f32 = 77.0;
/// Queries and keys of each sequence.
const LENGTHS: &[(usize, usize)] = &[(1, 1), (129, 200), (0, 5), (65, 64), (3, 0), (40, 17)];

/// Sequences, and rows that belong to none.
struct Case<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    lengths: Vec<(usize, usize)>,
    layout: Layout,
    heads: [usize; 2],
    widths: [usize; 2],
    /// M and N.
    block_size: [usize; 2],
    rows: usize,
    /// The keys of each block row, `[B, H, rows]`: first keys of blocks, and columns.
    lists: Vec<[Vec<i32>; 2]>,
    softcap: f32,
    causal: bool,
}

impl<E: Host> Case<E> {
    fn new(lengths: &[(usize, usize)], heads: [usize; 2], widths: [usize; 2], packed: bool, causal: bool) -> Self {
        let longest = |len: fn(&(usize, usize)) -> usize| lengths.iter().map(len).max().unwrap_or(0);
        let (query_stride, key_stride) = (longest(|it| it.0) + 1, longest(|it| it.1) + 2);
        let layout = if packed { Layout::Packed } else { Layout::Padded { query_stride, key_stride } };
        let block_size = [64, 64];
        let mut case = Self {
            q: vec![],
            k: vec![],
            v: vec![],
            lengths: lengths.to_vec(),
            layout,
            heads,
            widths,
            block_size,
            rows: 0,
            lists: vec![],
            softcap: 0.0,
            causal,
        };
        case.make_lists();
        let values = |seed: u32, spans: Vec<(usize, usize)>, rows: usize, width: usize, factor: f32| {
            let numbers = random(seed, rows * width);
            let held = |row: usize| spans.iter().any(|&(first, len)| (first..first + len).contains(&row));
            let number = |i: usize| if held(i / width) { numbers[i] * factor } else { f32::NAN };
            (0..rows * width).map(|i| E::from_f32(number(i))).collect::<Vec<E>>()
        };
        let [queries, keys] = case.tokens();
        let (q_spans, kv_spans): (Vec<_>, Vec<_>) = (0..lengths.len()).map(|b| case.spans(b)).unzip();
        case.q = values(1, q_spans, queries, heads[0] * widths[0], 4.0);
        case.k = values(2, kv_spans.clone(), keys, heads[1] * widths[0], 1.0);
        case.v = values(3, kv_spans, keys, heads[1] * widths[1], 1.0);
        case
    }

    /// Random blocks and columns, ascending and disjoint, some past the end of the keys.
    fn make_lists(&mut self) {
        let ([m, n], longest) = (self.block_size, self.lengths.iter().map(|it| it.0).max().unwrap_or(0));
        self.rows = longest.div_ceil(m);
        self.lists = (0..self.lengths.len() * self.heads[0] * self.rows)
            .map(|at| {
                let (mut offsets, mut columns, mut key) = (vec![], vec![], 0);
                for draw in random(90 + at as u32, 8) {
                    if draw > 0.2 {
                        offsets.push(key);
                        key += n as i32;
                    } else if draw > -0.5 {
                        columns.push(key);
                        key += 1;
                    }
                    key += (draw.abs() * 30.0) as i32;
                }
                [offsets, columns]
            })
            .collect();
    }

    /// First row and length of a sequence's queries and keys.
    fn spans(&self, b: usize) -> ((usize, usize), (usize, usize)) {
        let (q_len, kv_len) = self.lengths[b];
        match self.layout {
            Layout::Padded { query_stride, key_stride } => ((b * query_stride, q_len), (b * key_stride, kv_len)),
            Layout::Packed => {
                let before = &self.lengths[..b];
                let sum = |len: fn(&(usize, usize)) -> usize| before.iter().map(len).sum();
                ((sum(|it| it.0), q_len), (sum(|it| it.1), kv_len))
            }
        }
    }

    /// Rows of q, and of k and v: one or two more than the sequences have where they are packed.
    fn tokens(&self) -> [usize; 2] {
        match self.layout {
            Layout::Padded { query_stride, key_stride } => {
                [self.lengths.len() * query_stride, self.lengths.len() * key_stride]
            }
            Layout::Packed => [
                self.lengths.iter().map(|it| it.0).sum::<usize>() + 2,
                self.lengths.iter().map(|it| it.1).sum::<usize>() + 1,
            ],
        }
    }

    /// Counts and values of blocks or columns, with a tail that must not be read.
    fn list(&self, i: usize) -> (Vec<i32>, Vec<i32>, usize) {
        let capacity = self.lists.iter().map(|lists| lists[i].len()).max().unwrap_or(0) + 1;
        let counts = self.lists.iter().map(|lists| lists[i].len() as i32).collect();
        let padded = |lists: &[Vec<i32>; 2]| {
            let mut list = lists[i].clone();
            list.resize(capacity, 0);
            list
        };
        (counts, self.lists.iter().flat_map(padded).collect(), capacity)
    }

    fn sizes(&self) -> VerticalSlashSizes {
        let [query_tokens, key_tokens] = self.tokens();
        VerticalSlashSizes {
            layout: self.layout,
            batch: self.lengths.len(),
            query_tokens,
            key_tokens,
            heads: self.heads[0],
            kv_heads: self.heads[1],
            key_width: self.widths[0],
            value_width: self.widths[1],
            rows: self.rows,
            max_blocks: self.list(0).2,
            max_columns: self.list(1).2,
            block_size_m: self.block_size[0],
            block_size_n: self.block_size[1],
            elem: E::elem_type_native(),
        }
    }

    /// Arguments, and the buffers of out and lse.
    fn args(&self, client: &Client) -> (AttentionArgs, [Handle; 2]) {
        let buffer = |values: &[E]| arg(&upload(client, values), values.len());
        let ints = |values: &[i32]| arg(&upload(client, values), values.len());
        let rows = self.tokens()[0] * self.heads[0];
        let out = upload(client, &vec![E::from_f32(UNWRITTEN); rows * self.widths[1]]);
        let lse = upload(client, &vec![UNWRITTEN; rows]);
        let bounds = |len: fn(&(usize, usize)) -> usize| {
            let lens = self.lengths.iter().map(|it| len(it) as i32);
            match self.layout {
                Layout::Padded { .. } => lens.collect(),
                Layout::Packed => std::iter::once(0)
                    .chain(lens.scan(0, |end, len| {
                        *end += len;
                        Some(*end)
                    }))
                    .collect::<Vec<_>>(),
            }
        };
        let ((block_count, block_offset, _), (column_count, column_index, _)) = (self.list(0), self.list(1));
        let args = AttentionArgs {
            q: buffer(&self.q),
            k: buffer(&self.k),
            v: buffer(&self.v),
            q_bounds: ints(&bounds(|it| it.0)),
            kv_bounds: ints(&bounds(|it| it.1)),
            block_count: ints(&block_count),
            block_offset: ints(&block_offset),
            column_count: ints(&column_count),
            column_index: ints(&column_index),
            out: arg(&out, rows * self.widths[1]),
            lse: arg(&lse, rows),
            sizes: self.sizes(),
            options: VerticalSlashOptions { softmax_scale: self.scale(), softcap: self.softcap, causal: self.causal },
        };
        (args, [out, lse])
    }

    fn run(&self, client: &Client, path: Path) -> Result<(Vec<f64>, Vec<f64>), VerticalSlashError> {
        let (args, [out, lse]) = self.args(client);
        launch(client, args, path)?;
        let out = read::<E>(client, out).into_iter().map(E::to_f64).collect();
        let lse = read::<f32>(client, lse).into_iter().map(f64::from).collect();
        Ok((out, lse))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.widths[0] as f32).sqrt()
    }

    /// The keys of a row as positions.
    fn keys(&self, b: usize, head: usize, row: usize) -> Vec<usize> {
        let [offsets, columns] = &self.lists[(b * self.heads[0] + head) * self.rows + row];
        let blocks = offsets.iter().flat_map(|offset| *offset..offset + self.block_size[1] as i32);
        let keys = blocks.chain(columns.iter().copied()).map(|key| key as usize);
        keys.filter(|&key| key < self.lengths[b].1).collect()
    }

    /// Makes NaN of the rows of keys that none of the lists names. The first key is one of them, which is what a place without a key
    /// might be taken for.
    fn poison_what_is_not_named(&mut self) {
        self.lists.iter_mut().flatten().for_each(|list| list.retain(|&key| key > 0));
        let ([heads, kv_heads], [width, value_width], mut poisoned) = (self.heads, self.widths, 0);
        for (b, kv_head) in (0..self.lengths.len()).flat_map(|b| (0..kv_heads).map(move |head| (b, head))) {
            let (_, (first_key, keys)) = self.spans(b);
            let group = kv_head * (heads / kv_heads)..(kv_head + 1) * (heads / kv_heads);
            let lists = group.flat_map(|head| (0..self.rows).map(move |row| (head, row)));
            let named: Vec<usize> = lists.flat_map(|(head, row)| self.keys(b, head, row)).collect();
            for key in (0..keys).filter(|key| !named.contains(key)) {
                let row = (first_key + key) * kv_heads + kv_head;
                self.k[row * width..][..width].fill(E::from_f32(f32::NAN));
                self.v[row * value_width..][..value_width].fill(E::from_f32(f32::NAN));
                poisoned += 1;
            }
        }
        assert!(poisoned > 0, "all keys are named");
    }

    /// The definition, in f64.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|it| it.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let ([heads, kv_heads], [width, value_width]) = (self.heads, self.widths);
        let mut out = vec![0.0; self.tokens()[0] * heads * value_width];
        let mut lse = vec![f64::NEG_INFINITY; self.tokens()[0] * heads];
        for b in 0..self.lengths.len() {
            let ((first_query, q_len), (first_key, kv_len)) = self.spans(b);
            for (i, head) in (0..q_len).flat_map(|i| (0..heads).map(move |head| (i, head))) {
                let visible = |key: &usize| !self.causal || key + q_len <= i + kv_len;
                let keys: Vec<usize> = self.keys(b, head, i / self.block_size[0]).into_iter().filter(visible).collect();
                let at = (first_query + i) * heads + head;
                let row = |key: usize| (first_key + key) * kv_heads + head / (heads / kv_heads);
                let score = |key: &usize| {
                    let other = &k[row(*key) * width..][..width];
                    let product: f64 = q[at * width..][..width].iter().zip(other).map(|(a, b)| a * b).sum();
                    let (score, cap) = (product * f64::from(self.scale()), f64::from(self.softcap));
                    if cap == 0.0 { score } else { cap * (score / cap).tanh() }
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if keys.is_empty() {
                    continue;
                }
                lse[at] = max + scores.iter().map(|s| (s - max).exp()).sum::<f64>().ln();
                for (key, score) in keys.iter().zip(&scores) {
                    let (weight, value) = ((score - lse[at]).exp(), &v[row(*key) * value_width..][..value_width]);
                    out[at * value_width..][..value_width].iter_mut().zip(value).for_each(|(o, x)| *o += weight * x);
                }
            }
        }
        (out, lse)
    }

    /// On every device that has the type, with all that it has for it.
    #[track_caller]
    fn check(&self, tolerance: f64) {
        self.check_against(self.expected(), tolerance);
    }

    #[track_caller]
    fn check_against(&self, (out, lse): (Vec<f64>, Vec<f64>), tolerance: f64) {
        for_each_client(|client| {
            let paths = available(client, &self.sizes());
            if paths.is_empty() {
                // Every device has f32; f16 and bf16 are features.
                let elem = E::elem_type_native();
                assert_ne!(elem, f32::elem_type_native(), "refused");
                let refused = self.run(client, Path::Plain).map(drop);
                assert_eq!(refused, Err(DeviceError::Elem(elem).into()));
                skip(format_args!("{} has no {elem}", client.name()));
            }
            for path in paths {
                let (got_out, got_lse) = self.run(client, path.path).expect("launches");
                assert_close(&format!("out, {:?}", path.path), &got_out, &out, tolerance);
                assert_close(&format!("lse, {:?}", path.path), &got_lse, &lse, 2e-5);
            }
        });
    }
}

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
    case.check_against(legal.expected(), 6e-4);
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
#[case(&[(260, 300), (1, 70)], [4, 2], [128, 64])]
#[case(&[(190, 2700)], [1, 1], [64, 128])]
#[case(&[(128, 520)], [1, 1], [64, 64])]
fn mutants_of_blocks(#[case] lengths: &[(usize, usize)], #[case] heads: [usize; 2], #[case] block_size: [usize; 2]) {
    let mut case = Case::<bf16>::new(lengths, heads, [192, 128], false, true);
    case.block_size = block_size;
    case.make_lists();
    match lengths {
        [(190, _)] => {
            case.lists[1] = [(0..20).map(|block| 1 + block * 128).collect(), (2570..2650).collect()];
            case.lists[2] = [vec![1, 2304], vec![2600]];
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
        case.check_against(legal.expected(), tolerance);
    }
    check::<f32>(1e-5);
    check::<f16>(6e-4);
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
