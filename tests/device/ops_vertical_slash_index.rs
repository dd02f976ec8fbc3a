//! `vertical_slash_index` against sets of keys, made from the definition.

use std::collections::BTreeSet;

use burn::tensor::{Device, Int, Tensor};
use mla_ops::{VerticalSlashIndex, VerticalSlashIndexArgs, VerticalSlashIndexOptions, vertical_slash_index};
use proptest::prelude::{ProptestConfig, prop, proptest};
use rand::RngExt;
use rstest::rstest;

use crate::devices::for_each_device;
use crate::ops_fixture::{int_values, ints, rng};
use crate::oracle::VerticalSlash;

/// Sequences and what each head attends to.
#[derive(Debug, Clone)]
pub struct Pattern {
    /// Queries and keys of each sequence.
    pub lens: Vec<(usize, usize)>,
    pub heads: usize,
    /// Nv and Ns.
    pub widths: [usize; 2],
    /// M and N.
    pub block_size: [usize; 2],
    pub causal: bool,
    /// `[B, H, Nv]`.
    pub vertical: Vec<i32>,
    /// `[B, H, Ns]`.
    pub slash: Vec<i32>,
    /// The entries that each head uses.
    pub counts: Option<[Vec<i32>; 2]>,
}

impl Pattern {
    /// Entries in no order, some of them negative, twice, or past what the sequence has.
    pub fn random(
        lens: &[(usize, usize)],
        heads: usize,
        widths: [usize; 2],
        block_size: [usize; 2],
        causal: bool,
    ) -> Self {
        let mut rng = rng(61);
        let mut entries = |width: usize, of_both: bool| {
            let mut values = Vec::new();
            for &(q_len, kv_len) in lens {
                // Without the causal mask diagonals are counted from behind the last key.
                let most = if of_both { q_len + kv_len } else { kv_len };
                values.extend((0..heads * width).map(|_| rng.random_range(-1..=most as i32 + 2)));
            }
            for list in values.chunks_exact_mut(width.max(1)).filter(|list| list.len() > 2) {
                list[2] = list[0];
            }
            values
        };
        let (vertical, slash) = (entries(widths[0], false), entries(widths[1], !causal));
        Self { lens: lens.to_vec(), heads, widths, block_size, causal, vertical, slash, counts: None }
    }

    pub fn max_query_len(&self) -> usize {
        self.lens.iter().map(|lens| lens.0).max().unwrap_or(0)
    }

    pub fn rows(&self) -> usize {
        self.max_query_len().div_ceil(self.block_size[0])
    }

    pub fn lens_i32(&self) -> (Vec<i32>, Vec<i32>) {
        self.lens.iter().map(|&(q_len, kv_len)| (q_len as i32, kv_len as i32)).unzip()
    }

    pub fn args(&self, device: &Device) -> VerticalSlashIndexArgs {
        let (batch, heads, [verticals, slashes]) = (self.lens.len(), self.heads, self.widths);
        let (q_lens, kv_lens) = self.lens_i32();
        let counts = |i: usize| self.counts.as_ref().map(|counts| ints(&counts[i], [heads], device));
        VerticalSlashIndexArgs {
            q_lens: ints(&q_lens, [batch], device),
            kv_lens: ints(&kv_lens, [batch], device),
            vertical: ints(&self.vertical, [batch, heads, verticals], device),
            slash: ints(&self.slash, [batch, heads, slashes], device),
            vertical_counts: counts(0),
            slash_counts: counts(1),
        }
    }

    pub fn options(&self) -> VerticalSlashIndexOptions {
        let ([block_size_m, block_size_n], causal) = (self.block_size, self.causal);
        VerticalSlashIndexOptions { max_query_len: self.max_query_len(), block_size_m, block_size_n, causal }
    }

    pub fn index(&self, device: &Device) -> VerticalSlashIndex {
        vertical_slash_index(self.args(device), &self.options()).unwrap_or_else(|error| panic!("{error} ({self:?})"))
    }

    /// The definition, for a sequence and head.
    pub fn definition(&self, b: usize, head: usize) -> VerticalSlash<'_> {
        let list = |i: usize, values: &'_ [i32]| -> std::ops::Range<usize> {
            let first = (b * self.heads + head) * self.widths[i];
            let used = self.counts.as_ref().map_or(self.widths[i], |counts| counts[i][head] as usize);
            assert!(first + used <= values.len());
            first..first + used
        };
        VerticalSlash {
            q_len: self.lens[b].0 as i32,
            kv_len: self.lens[b].1 as i32,
            vertical: &self.vertical[list(0, &self.vertical)],
            slash: &self.slash[list(1, &self.slash)],
            block_size: self.block_size.map(|size| size as i32),
            causal: self.causal,
        }
    }

    fn check(&self, device: &Device) {
        let index = self.index(device);
        let (lists, rows) = ([self.lens.len(), self.heads], self.rows());
        let blocks = Lists::new(int_values(index.block_count.clone()), int_values(index.block_offset.clone()));
        let columns = Lists::new(int_values(index.column_count.clone()), int_values(index.column_index.clone()));
        let max_blocks = self.widths[1] * self.block_size[0].div_ceil(self.block_size[1]);
        assert_eq!(index.block_count.dims(), [lists[0], lists[1], rows]);
        assert_eq!(index.column_count.dims(), [lists[0], lists[1], rows]);
        assert_eq!(index.block_offset.dims(), [lists[0], lists[1], rows, max_blocks]);
        assert_eq!(index.column_index.dims(), [lists[0], lists[1], rows, self.widths[0]]);
        for at in 0..lists[0] * lists[1] * rows {
            let (list, row) = (at / rows, at % rows);
            let definition = self.definition(list / self.heads, list % self.heads);
            let what = format!("row {row} of list {list} on {device:?}: {self:?}");
            self.check_row(blocks.used(at), columns.used(at), &definition, row as i32, &what);
        }
    }

    /// Ascending, disjoint, and together what the definition says.
    fn check_row(&self, offsets: &[i32], columns: &[i32], definition: &VerticalSlash, row: i32, what: &str) {
        let (n, seen_end) = (self.block_size[1] as i32, definition.seen_end(row));
        assert!(offsets.windows(2).all(|pair| pair[0] + n <= pair[1]), "{what}: blocks {offsets:?}");
        assert!(columns.is_sorted_by(|a, b| a < b), "{what}: columns {columns:?}");
        let inside = |column: &i32| offsets.iter().any(|offset| (*offset..offset + n).contains(column));
        assert!(!columns.iter().any(inside), "{what}: columns {columns:?} in blocks {offsets:?}");
        // A block may end past what the row sees, but not begin there.
        assert!(offsets.iter().chain(columns).all(|&key| key < seen_end), "{what}: {offsets:?}, {columns:?}");
        let in_blocks = offsets.iter().flat_map(|offset| *offset..offset + n).filter(|&key| key < seen_end);
        let keys: BTreeSet<i32> = in_blocks.chain(columns.iter().copied()).collect();
        assert_eq!(keys, definition.keys(row), "{what}");
    }
}

/// Lists of one capacity.
struct Lists {
    counts: Vec<i32>,
    values: Vec<i32>,
}

impl Lists {
    fn new(counts: Vec<i32>, values: Vec<i32>) -> Self {
        Self { counts, values }
    }

    /// The used part; the tail must be -1.
    fn used(&self, at: usize) -> &[i32] {
        let capacity = self.values.len() / self.counts.len();
        let (used, tail) = self.values[at * capacity..][..capacity].split_at(self.counts[at] as usize);
        assert!(tail.iter().all(|&entry| entry == -1), "tail {tail:?}");
        used
    }
}

const LENS: &[(usize, usize)] = &[(1, 1), (1, 300), (129, 129), (65, 200), (0, 70), (90, 0), (128, 500), (150, 20)];

#[rstest]
fn ops_vertical_slash_index(
    #[values(0, 1, 2, 7, 15, 32)] slashes: usize,
    #[values(0, 1, 3, 100)] verticals: usize,
    #[values(false, true)] causal: bool,
) {
    for_each_device(|device| Pattern::random(LENS, 2, [verticals, slashes], [64, 64], causal).check(device));
}

#[rstest]
fn ops_vertical_slash_index_block_sizes(
    #[values([64, 16], [16, 64], [48, 20], [1, 1], [7, 3], [65_536, 65_536])] block_size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    for_each_device(|device| Pattern::random(LENS, 2, [20, 11], block_size, causal).check(device));
}

#[test]
fn ops_vertical_slash_index_counts() {
    for_each_device(|device| {
        let mut pattern = Pattern::random(LENS, 3, [20, 11], [16, 16], true);
        pattern.counts = Some([vec![0, 3, 20], vec![11, 0, 5]]);
        pattern.check(device);
    });
}

#[test]
fn ops_vertical_slash_index_of_nothing() {
    for_each_device(|device| {
        Pattern::random(&[], 2, [3, 3], [64, 64], true).check(device);
        Pattern::random(&[(0, 5), (0, 0)], 2, [3, 3], [64, 64], true).check(device);
        Pattern::random(&[(70, 70)], 0, [3, 3], [64, 64], true).check(device);
    });
}

#[test]
fn ops_vertical_slash_index_strided() {
    for_each_device(|device| {
        let pattern = Pattern::random(LENS, 3, [20, 11], [16, 16], true);
        let lists = |index: VerticalSlashIndex| {
            let counts = [index.block_count, index.column_count].map(int_values);
            (counts, [index.block_offset, index.column_index].map(int_values))
        };
        let mut args = pattern.args(device);
        args.vertical = restrided_ints(args.vertical);
        args.slash = restrided_ints(args.slash);
        let strided = vertical_slash_index(args, &pattern.options()).expect("legal");
        assert_eq!(lists(strided), lists(pattern.index(device)));
    });
}

/// The same values, with the dimensions in another order in memory.
fn restrided_ints(tensor: Tensor<3, Int>) -> Tensor<3, Int> {
    let ([a, b, c], device) = (tensor.dims(), tensor.device());
    ints(&int_values(tensor.swap_dims(0, 2)), [c, b, a], &device).swap_dims(0, 2)
}

/// The example of the documentation.
#[test]
fn ops_vertical_slash_index_example() {
    for_each_device(|device| {
        let args = VerticalSlashIndexArgs {
            q_lens: ints(&[12], [1], device),
            kv_lens: ints(&[12], [1], device),
            vertical: ints(&[5, 0, 7], [1, 1, 3], device),
            slash: ints(&[0, 6], [1, 1, 2], device),
            vertical_counts: None,
            slash_counts: None,
        };
        let options = VerticalSlashIndexOptions { max_query_len: 12, block_size_m: 4, block_size_n: 4, causal: true };
        let index = vertical_slash_index(args, &options).expect("legal");
        assert_eq!(int_values(index.block_count), [1, 2, 2]);
        assert_eq!(int_values(index.block_offset), [0, -1, 0, 4, 2, 8]);
        assert_eq!(int_values(index.column_count), [0, 0, 2]);
        assert_eq!(int_values(index.column_index), [-1, -1, -1, -1, -1, -1, 0, 7, -1]);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ops_vertical_slash_index_of_any_entries(
        vertical in prop::collection::vec(-2..90_i32, 6),
        slash in prop::collection::vec(-2..150_i32, 6),
        (q_len, kv_len) in (0..70_usize, 0..80_usize),
        (m, n) in (1..30_usize, 1..30_usize),
        causal: bool,
    ) {
        for_each_device(|device| {
            let (vertical, slash) = (vertical.clone(), slash.clone());
            let lens = vec![(q_len, kv_len)];
            Pattern { lens, heads: 1, widths: [6, 6], block_size: [m, n], causal, vertical, slash, counts: None }
                .check(device);
        });
    }
}
