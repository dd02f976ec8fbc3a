use burn::backend::{Flex, tensor::IntTensor};
use burn::tensor::{Int, Tensor};

use super::backend::{BackendEntries, VerticalSlashIndexBackend};
use super::{MAX_TOKENS, VerticalSlashIndexOptions};
use crate::reference::{IntoFlex, device_i32, host, tensor};

impl VerticalSlashIndexBackend for Flex {
    fn vertical_slash_index(
        q_lens: IntTensor<Self>,
        kv_lens: IntTensor<Self>,
        vertical: BackendEntries<Self>,
        slash: BackendEntries<Self>,
        options: VerticalSlashIndexOptions,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let (vertical, slash) = (Entries::new(vertical), Entries::new(slash));
        let ([block_count, column_count], [block_offset, column_index]) =
            vertical_slash_index(tensor(q_lens), tensor(kv_lens), &vertical, &slash, &options);
        (block_count, block_offset, column_count, column_index).into_flex()
    }
}

/// The entries of `vertical` or `slash`, on the host.
struct Entries {
    values: Vec<i32>,
    counts: Vec<i32>,
    /// `[B, H, width]`.
    dims: [usize; 3],
}

impl Entries {
    /// `values [B, H, width]`, of which head `h` uses the first `counts[h]`.
    fn new(entries: BackendEntries<Flex>) -> Self {
        let (values, counts): (Tensor<3, Int>, Tensor<1, Int>) = (tensor(entries.values), tensor(entries.counts));
        let dims = values.dims();
        Self { values: host(values), counts: host(counts), dims }
    }

    /// The set of a sequence and head, ascending.
    fn set(&self, b: usize, head: usize) -> Vec<i32> {
        let [_, heads, width] = self.dims;
        let used = (self.counts[head].max(0) as usize).min(width);
        let list = &self.values[(b * heads + head) * width..][..used];
        let mut set: Vec<i32> = list.iter().copied().filter(|&value| value >= 0).collect();
        set.sort_unstable();
        set.dedup();
        set
    }
}

/// block_count and column_count `[B, H, rows]`, block_offset and column_index `[B, H, rows, _]`.
fn vertical_slash_index(
    q_lens: Tensor<1, Int>,
    kv_lens: Tensor<1, Int>,
    vertical: &Entries,
    slash: &Entries,
    options: &VerticalSlashIndexOptions,
) -> ([Tensor<3, Int>; 2], [Tensor<4, Int>; 2]) {
    let device = q_lens.device();
    let [batch, heads, columns] = vertical.dims;
    let (rows, blocks) = (options.rows(), slash.dims[2] * options.blocks_per_band());
    let clamped = |lens: Tensor<1, Int>, most: usize| host(lens).into_iter().map(move |len| len.clamp(0, most as i32));
    let lens = clamped(q_lens, options.max_query_len).zip(clamped(kv_lens, MAX_TOKENS));

    let (mut block_list, mut column_list) = (Lists::new(blocks), Lists::new(columns));
    for (b, (q_len, kv_len)) in lens.enumerate() {
        for head in 0..heads {
            let (columns, diagonals) = (vertical.set(b, head), slash.set(b, head));
            for first in (0..rows).map(|row| (row * options.block_size_m) as i32) {
                let (mut offsets, mut rest) = (Vec::new(), Vec::new());
                if first < q_len {
                    let row = BlockRow::new(first, q_len, kv_len, options);
                    offsets = row.key_blocks(&diagonals, options);
                    rest = row.columns(&columns, &offsets, options);
                }
                block_list.push(offsets);
                column_list.push(rest);
            }
        }
    }
    let count = |lists: &Lists| device_i32(lists.counts.clone(), [batch, heads, rows], &device);
    let values = |lists: Lists| device_i32(lists.values, [batch, heads, rows, lists.capacity], &device);
    ([count(&block_list), count(&column_list)], [values(block_list), values(column_list)])
}

/// Lists of one capacity, with -1 in their tails.
struct Lists {
    capacity: usize,
    counts: Vec<i32>,
    values: Vec<i32>,
}

impl Lists {
    fn new(capacity: usize) -> Self {
        Self { capacity, counts: Vec::new(), values: Vec::new() }
    }

    fn push(&mut self, list: Vec<i32>) {
        self.counts.push(list.len() as i32);
        self.values.extend(list);
        self.values.resize(self.counts.len() * self.capacity, -1);
    }
}

/// The key positions of the queries of a block row.
struct BlockRow {
    /// Behind the band of diagonal 0.
    end: i32,
    /// Behind the last key that a query of the row sees.
    limit: i32,
}

impl BlockRow {
    /// Of the queries from `first` on, one of which there is at least.
    fn new(first: i32, q_len: i32, kv_len: i32, options: &VerticalSlashIndexOptions) -> Self {
        let row_end = first + options.block_size_m as i32;
        if options.causal {
            let end = row_end + kv_len - q_len;
            return Self { end, limit: end.min(kv_len) };
        }
        Self { end: row_end + kv_len, limit: kv_len }
    }

    /// The first keys of the key blocks.
    fn key_blocks(&self, diagonals: &[i32], options: &VerticalSlashIndexOptions) -> Vec<i32> {
        let (m, n, blocks) =
            (options.block_size_m as i32, options.block_size_n as i32, options.blocks_per_band() as i32);
        let mut offsets = Vec::new();
        let mut covered = 0;
        // The greatest diagonal is the lowest band.
        for band_end in diagonals.iter().rev().map(|diagonal| self.end - diagonal) {
            if band_end > covered {
                let from = (band_end - m).max(covered);
                offsets.extend((0..blocks).map(|i| from + i * n).take_while(|&offset| offset < self.limit));
                covered = from + blocks * n;
            }
        }
        offsets
    }

    /// The columns that some query sees and that are in no key block.
    fn columns(&self, columns: &[i32], offsets: &[i32], options: &VerticalSlashIndexOptions) -> Vec<i32> {
        let in_block = |column: i32| {
            let blocks_before = offsets.partition_point(|&offset| offset <= column);
            blocks_before > 0 && column - offsets[blocks_before - 1] < options.block_size_n as i32
        };
        columns.iter().copied().filter(|&column| column < self.limit && !in_block(column)).collect()
    }
}
