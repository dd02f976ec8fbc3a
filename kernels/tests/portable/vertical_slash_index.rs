//! The index of the vertical-slash pattern against sets of keys, made from the definition key by key.

use std::collections::BTreeSet;

use cubecl::prelude::*;
use mla_kernels::vertical_slash_index::{IndexArgs, launch};
use rstest::rstest;

use crate::support::{arg, for_each_client, random, read, upload};

/// What an output holds that was not written.
const UNWRITTEN: i32 = 77;

/// A problem; `vertical` and `slash` are `[B, H, _]`.
struct Case {
    q_lens: Vec<i32>,
    kv_lens: Vec<i32>,
    heads: usize,
    vertical: Vec<i32>,
    slash: Vec<i32>,
    /// Of each head.
    counts: [Vec<i32>; 2],
    max_query_len: usize,
    /// M and N.
    block_size: [usize; 2],
    causal: bool,
}

/// What the kernel gives.
struct Index {
    block_count: Vec<i32>,
    block_offset: Vec<i32>,
    column_count: Vec<i32>,
    column_index: Vec<i32>,
}

impl Case {
    /// Random entries, some of them twice, negative, or past what the sequence has.
    fn new(lens: &[(i32, i32)], heads: usize, widths: [usize; 2], block_size: [usize; 2], causal: bool) -> Self {
        let longest = lens.iter().map(|(q, kv)| q + kv).max().unwrap_or(0) as f32;
        let entries = |seed: u32, width: usize| -> Vec<i32> {
            let values = random(seed, lens.len() * heads * width);
            values.iter().map(|x| (x.mul_add(0.55, 0.45) * longest) as i32).collect()
        };
        let (q_lens, kv_lens): (Vec<i32>, Vec<i32>) = lens.iter().copied().unzip();
        let max_query_len = *q_lens.iter().max().unwrap_or(&0) as usize;
        let counts = widths.map(|width| vec![width as i32; heads]);
        let (vertical, slash) = (entries(1, widths[0]), entries(2, widths[1]));
        Self { q_lens, kv_lens, heads, vertical, slash, counts, max_query_len, block_size, causal }
    }

    fn widths(&self) -> [usize; 2] {
        let lists = (self.q_lens.len() * self.heads).max(1);
        [self.vertical.len() / lists, self.slash.len() / lists]
    }

    fn rows(&self) -> usize {
        self.max_query_len.div_ceil(self.block_size[0])
    }

    fn run(&self, client: &Client) -> Index {
        let ([verticals, slashes], [m, n]) = (self.widths(), self.block_size);
        let buffer = |values: &[i32]| arg(&upload(client, values), values.len());
        let unwritten = |len: usize| (upload(client, &vec![UNWRITTEN; len]), len);
        let rows = self.q_lens.len() * self.heads * self.rows();
        let outputs = [1, slashes * m.div_ceil(n), 1, verticals].map(|len| unwritten(rows * len));
        let [block_count, block_offset, column_count, column_index] = [0, 1, 2, 3].map(|i| {
            let (handle, len) = &outputs[i];
            arg(handle, *len)
        });
        let args = IndexArgs {
            q_lens: buffer(&self.q_lens),
            kv_lens: buffer(&self.kv_lens),
            vertical: buffer(&self.vertical),
            slash: buffer(&self.slash),
            vertical_counts: buffer(&self.counts[0]),
            slash_counts: buffer(&self.counts[1]),
            sorted_vertical: buffer(&self.vertical),
            sorted_slash: buffer(&self.slash),
            block_count,
            block_offset,
            column_count,
            column_index,
            batch: self.q_lens.len(),
            heads: self.heads,
            verticals,
            slashes,
            max_query_len: self.max_query_len,
            block_size_m: m,
            block_size_n: n,
            causal: self.causal,
        };
        launch(client, args);
        let [block_count, block_offset, column_count, column_index] = outputs.map(|(handle, _)| read(client, handle));
        Index { block_count, block_offset, column_count, column_index }
    }

    /// Queries and keys of a sequence.
    fn lens(&self, b: usize) -> (i32, i32) {
        (self.q_lens[b].clamp(0, self.max_query_len as i32), self.kv_lens[b].max(0))
    }

    /// The keys before this one are those that some query of the row sees.
    fn seen_end(&self, b: usize, row: usize) -> i32 {
        let (q_len, kv_len) = self.lens(b);
        let row_end = ((row + 1) * self.block_size[0]) as i32;
        if self.causal { kv_len.min(row_end + kv_len - q_len) } else { kv_len }
    }

    /// The keys that a row attends to, from the definition.
    fn keys(&self, b: usize, head: usize, row: usize) -> BTreeSet<i32> {
        let [m, n] = self.block_size.map(|size| size as i32);
        let (q_len, kv_len) = self.lens(b);
        let first = row as i32 * m;
        if first >= q_len {
            return BTreeSet::new();
        }
        let used = |i: usize, entries: &[i32]| -> BTreeSet<i32> {
            let width = self.widths()[i];
            let list = &entries[(b * self.heads + head) * width..][..(self.counts[i][head] as usize).min(width)];
            list.iter().copied().filter(|&entry| entry >= 0).collect()
        };
        let position = |query: i32| if self.causal { query + kv_len - q_len } else { query + kv_len };
        let mut keys = BTreeSet::new();
        // From the lowest band up: the greatest diagonal first.
        for diagonal in used(1, &self.slash).into_iter().rev() {
            let mut band = (first..first + m).map(|query| position(query) - diagonal);
            if let Some(from) = band.find(|key| *key >= 0 && !keys.contains(key)) {
                keys.extend(from..from + (m + n - 1) / n * n);
            }
        }
        keys.extend(used(0, &self.vertical));
        keys.retain(|&key| key < self.seen_end(b, row));
        keys
    }

    /// The lists of a row are ascending and disjoint, and their keys are those of the definition.
    fn check_row(&self, index: &Index, at: usize) {
        let (list, row) = (at / self.rows(), at % self.rows());
        let expected = self.keys(list / self.heads, list % self.heads, row);
        let [verticals, slashes] = self.widths();
        let capacity = slashes * self.block_size[0].div_ceil(self.block_size[1]);
        let part = |values: &[i32], count: i32, capacity: usize| {
            let (used, tail) = values[at * capacity..][..capacity].split_at(count as usize);
            assert!(tail.iter().all(|&entry| entry == -1), "row {at}: tail {tail:?}");
            used.to_vec()
        };
        let offsets = part(&index.block_offset, index.block_count[at], capacity);
        let columns = part(&index.column_index, index.column_count[at], verticals);
        let n = self.block_size[1] as i32;
        assert!(offsets.windows(2).all(|pair| pair[0] + n <= pair[1]), "row {at}: blocks overlap: {offsets:?}");
        assert!(columns.is_sorted_by(|a, b| a < b), "row {at}: columns {columns:?}");
        let inside = |column: &i32| offsets.iter().any(|offset| (*offset..offset + n).contains(column));
        assert!(!columns.iter().any(inside), "row {at}: columns {columns:?} in blocks {offsets:?}");
        // Past the last key that the row sees a block may go on, but not begin.
        let seen_end = self.seen_end(list / self.heads, row);
        assert!(offsets.iter().all(|&offset| offset < seen_end), "row {at}: {offsets:?} of {seen_end} keys");
        let blocks = offsets.iter().flat_map(|offset| *offset..offset + n);
        let keys: BTreeSet<i32> = blocks.filter(|&key| key < seen_end).chain(columns).collect();
        assert_eq!(keys, expected, "row {at} of {:?}", (&self.q_lens, &self.kv_lens, self.block_size, self.causal));
    }

    #[track_caller]
    fn check(&self) {
        for_each_client(|client| {
            let index = self.run(client);
            for at in 0..self.q_lens.len() * self.heads * self.rows() {
                self.check_row(&index, at);
            }
        });
    }
}

const LENGTHS: &[(i32, i32)] = &[(1, 1), (1, 300), (129, 129), (65, 200), (0, 70), (90, 0), (128, 500), (150, 20)];

#[rstest]
fn sets_of_the_definition(
    #[values(0, 1, 2, 7, 32)] slashes: usize,
    #[values(0, 1, 3, 40)] verticals: usize,
    #[values(false, true)] causal: bool,
) {
    Case::new(LENGTHS, 3, [verticals, slashes], [64, 64], causal).check();
}

/// Key blocks that are smaller or larger than block rows, and that do not divide them.
#[rstest]
fn any_block_sizes(
    #[values([64, 16], [16, 64], [48, 20], [1, 1], [1, 64], [33, 1], [7, 3], [65_536, 65_536])] size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    Case::new(LENGTHS, 2, [20, 11], size, causal).check();
}

/// Heads that use fewer entries than there are; unchecked counts are taken as in range.
#[test]
fn counts_of_heads() {
    let mut case = Case::new(LENGTHS, 4, [20, 11], [16, 16], true);
    case.counts = [vec![0, 3, 20, 25], vec![11, 0, 5, 1]];
    case.check();
}

#[test]
fn lengths_out_of_range() {
    let mut case = Case::new(&[(40, 60), (30, 80)], 1, [9, 5], [16, 16], true);
    (case.max_query_len, case.kv_lens[1]) = (33, -3);
    case.check();
}

/// Sums of such positions and diagonals stay within 32 bits.
#[rstest]
fn long_sequences(#[values(false, true)] causal: bool) {
    let mut case = Case::new(&[(20, 1 << 29)], 1, [3, 4], [16, 16], causal);
    case.vertical = vec![(1 << 29) - 1, 0, i32::MAX];
    case.slash = vec![0, i32::MAX, 1 << 29, i32::MIN];
    case.check();
}

/// More entries than a cube has units, in no order.
#[test]
fn many_entries() {
    Case::new(&[(300, 9000)], 2, [900, 700], [64, 64], true).check();
}

#[test]
fn nothing_to_index() {
    Case::new(&[], 2, [0, 0], [64, 64], true).check();
    Case::new(&[(0, 5), (0, 0)], 2, [3, 3], [64, 64], true).check();
}

/// As in the documentation of the operation.
#[test]
fn the_example() {
    let counts = [vec![3], vec![2]];
    let (vertical, slash) = (vec![5, 0, 7], vec![0, 6]);
    let (q_lens, kv_lens) = (vec![12], vec![12]);
    let case = Case {
        q_lens,
        kv_lens,
        heads: 1,
        vertical,
        slash,
        counts,
        max_query_len: 12,
        block_size: [4, 4],
        causal: true,
    };
    for_each_client(|client| {
        let index = case.run(client);
        assert_eq!(index.block_count, [1, 2, 2]);
        assert_eq!(index.block_offset, [0, -1, 0, 4, 2, 8]);
        assert_eq!(index.column_count, [0, 0, 2]);
        assert_eq!(index.column_index, [-1, -1, -1, -1, -1, -1, 0, 7, -1]);
    });
}
