//! The lists of an index: what they must fulfil.

use super::{VerticalSlashIndex, check_block_size};
use crate::MlaError;
use crate::check::{Check, read_i32};

impl VerticalSlashIndex {
    /// The most queries of a sequence that there are rows for.
    pub(in crate::ops) fn queries(&self) -> usize {
        self.block_count.dims()[2].saturating_mul(self.block_size_m)
    }

    /// As an argument of the attention of `batch` sequences and `heads` heads.
    pub(in crate::ops) fn check(&self, check: &Check, batch: usize, heads: usize) -> Result<(), MlaError> {
        check_block_size(check, "index.block_size_m", self.block_size_m)?;
        check_block_size(check, "index.block_size_n", self.block_size_n)?;
        check.int("index.block_count", &self.block_count)?;
        check.int("index.block_offset", &self.block_offset)?;
        check.int("index.column_count", &self.column_count)?;
        check.int("index.column_index", &self.column_index)?;
        let [_, _, rows] = self.block_count.dims();
        let words = || format!("[B, H, rows] with B = {batch}, H = {heads}");
        check.dims("index.block_count", self.block_count.dims(), [Some(batch), Some(heads), None], words)?;
        let words = || format!("[B, H, rows] = [{batch}, {heads}, {rows}], the shape of `index.block_count`");
        check.dims("index.column_count", self.column_count.dims(), [Some(batch), Some(heads), Some(rows)], words)?;
        let words =
            || format!("[B, H, rows, _] with B = {batch}, H = {heads}, rows = {rows}, as in `index.block_count`");
        let list = [Some(batch), Some(heads), Some(rows), None];
        check.dims("index.block_offset", self.block_offset.dims(), list, words)?;
        check.dims("index.column_index", self.column_index.dims(), list, words)
    }

    /// Reads the lists back. Those of rows that have a query must be ascending, and no two may have a key in common.
    pub(in crate::ops) fn validate_values(&self, op: &'static str, q_lens: &[i32]) -> Result<(), MlaError> {
        let [_, heads, rows] = self.block_count.dims();
        let ([.., max_blocks], [.., max_columns]) = (self.block_offset.dims(), self.column_index.dims());
        let block_count = read_i32(op, "index.block_count", &self.block_count)?;
        let block_offset = read_i32(op, "index.block_offset", &self.block_offset)?;
        let column_count = read_i32(op, "index.column_count", &self.column_count)?;
        let column_index = read_i32(op, "index.column_index", &self.column_index)?;
        for (b, &q_len) in q_lens.iter().enumerate() {
            let used_rows = (q_len.max(0) as usize).div_ceil(self.block_size_m).min(rows);
            for place in (0..heads).flat_map(|head| (0..used_rows).map(move |row| [b, head, row])) {
                let at = (b * heads + place[1]) * rows + place[2];
                let names = ["index.block_count", "index.block_offset"];
                let values = &block_offset[at * max_blocks..][..max_blocks];
                let blocks = List::new(op, names, place, block_count[at], values)?;
                blocks.check(self.block_size_n)?;
                let names = ["index.column_count", "index.column_index"];
                let values = &column_index[at * max_columns..][..max_columns];
                let columns = List::new(op, names, place, column_count[at], values)?;
                columns.check(1)?;
                columns.check_outside(blocks.entries, self.block_size_n)?;
            }
        }
        Ok(())
    }
}

/// The entries of one block row, on the host.
struct List<'a> {
    op: &'static str,
    argument: &'static str,
    /// Sequence, head and row.
    place: [usize; 3],
    entries: &'a [i32],
}

impl<'a> List<'a> {
    /// The first `count` of the values; `names` are those of the counts and of the values.
    fn new(
        op: &'static str,
        names: [&'static str; 2],
        place: [usize; 3],
        count: i32,
        values: &'a [i32],
    ) -> Result<Self, MlaError> {
        match usize::try_from(count).ok().and_then(|count| values.get(..count)) {
            Some(entries) => Ok(Self { op, argument: names[1], place, entries }),
            None => {
                let expected = format!("0 to {}, the capacity of `{}`", values.len(), names[1]);
                Err(MlaError::DeviceValue { op, argument: names[0], index: place.to_vec(), actual: count, expected })
            }
        }
    }

    /// Every entry is at least `step` greater than the one before; the first is not negative.
    fn check(&self, step: usize) -> Result<(), MlaError> {
        let mut least = 0;
        for (i, &entry) in self.entries.iter().enumerate() {
            if i64::from(entry) < least {
                return Err(self.error(i, format!("at least {least} (ascending, and no key twice)")));
            }
            least = i64::from(entry) + step as i64;
        }
        Ok(())
    }

    /// No entry is in one of the blocks, which are ascending.
    fn check_outside(&self, blocks: &[i32], block_size: usize) -> Result<(), MlaError> {
        for (i, &entry) in self.entries.iter().enumerate() {
            let before = &blocks[..blocks.partition_point(|&offset| offset <= entry)];
            if before.last().is_some_and(|&offset| ((entry - offset) as usize) < block_size) {
                return Err(self.error(i, "a key outside the row's key blocks".into()));
            }
        }
        Ok(())
    }

    fn error(&self, i: usize, expected: String) -> MlaError {
        let index = [&self.place[..], &[i]].concat();
        MlaError::DeviceValue { op: self.op, argument: self.argument, index, actual: self.entries[i], expected }
    }
}
