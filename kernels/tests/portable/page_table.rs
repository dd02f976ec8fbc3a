//! Page tables against the map on the host.

use cubecl::prelude::*;
use mla_kernels::page_table::{PagedBatch, launch_page_table};
use rstest::rstest;

use super::support::{arg, for_each_client, random, read, upload};

/// A request-to-token map and a batch of it, on the host.
pub struct HostBatch {
    pub req_to_token: Vec<i32>,
    pub req_rows: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub kv_start: Vec<i32>,
    pub requests: usize,
    pub tokens: usize,
    pub page_size: usize,
}

/// What the map holds where no token is: such slots must not reach a result.
const NO_SLOT: i32 = 2_147_480_000;

impl HostBatch {
    /// Sequences of these lengths, starting at page 0, 1 and 2 alternately, whose pages are anywhere in the pool.
    pub fn new(page_size: usize, seq_lens: &[i32]) -> Self {
        let starts: Vec<i32> = (0..seq_lens.len()).map(|b| (b % 3 * page_size) as i32).collect();
        let ends = seq_lens.iter().zip(&starts).map(|(len, start)| len + start);
        let tokens = ends.max().unwrap_or(0).max(1) as usize + 1;
        let (batch, requests) = (seq_lens.len(), seq_lens.len() + 2);
        let page_of = random(5, requests * tokens);
        let mut req_to_token = vec![NO_SLOT; requests * tokens];
        // Row `batch + 1 - b` belongs to sequence `b`: not the order of the batch, and rows 0 and 1 to none.
        let req_rows: Vec<i32> = (0..batch).map(|b| (batch + 1 - b) as i32).collect();
        for ((&row, &len), &start) in req_rows.iter().zip(seq_lens).zip(&starts) {
            for token in 0..(start + len.max(0)) as usize {
                let page = (page_of[row as usize * tokens + token / page_size].abs() * 1e3) as usize;
                req_to_token[row as usize * tokens + token] = (page * page_size + token % page_size) as i32;
            }
        }
        Self { req_to_token, req_rows, seq_lens: seq_lens.to_vec(), kv_start: starts, requests, tokens, page_size }
    }

    pub fn upload(&self, client: &Client) -> PagedBatch {
        let buffer = |values: &[i32]| arg(&upload(client, values), values.len());
        PagedBatch {
            req_to_token: buffer(&self.req_to_token),
            req_rows: buffer(&self.req_rows),
            seq_lens: buffer(&self.seq_lens),
            kv_start: buffer(&self.kv_start),
            requests: self.requests,
            tokens: self.tokens,
            batch: self.req_rows.len(),
            page_size: self.page_size,
        }
    }

    /// The pages of each sequence.
    pub fn pages(&self) -> Vec<Vec<i32>> {
        let pages = |b: usize| {
            let firsts = (0..self.seq_lens[b].max(0)).step_by(self.page_size);
            firsts.map(|first| self.page(b, first)).collect()
        };
        (0..self.req_rows.len()).map(pages).collect()
    }

    /// The page of a token of a sequence, -1 outside the map and at a slot that begins no page.
    fn page(&self, b: usize, token: i32) -> i32 {
        let (row, start) = (self.req_rows[b], self.kv_start[b]);
        let token = i64::from(start) + i64::from(token);
        if start < 0 || token >= self.tokens as i64 || !(0..self.requests as i32).contains(&row) {
            return -1;
        }
        let (slot, size) = (self.req_to_token[row as usize * self.tokens + token as usize], self.page_size as i32);
        if slot >= 0 && slot % size == 0 { slot / size } else { -1 }
    }
}

/// Lengths around those of whole pages.
pub fn lengths(page_size: usize, count: usize) -> Vec<i32> {
    let size = page_size as i32;
    let some = [0, 1, size - 1, size, size + 1, 5 * size - 2, 3 * size, -1, 2 * size + 1];
    some.iter().copied().cycle().take(count).collect()
}

#[track_caller]
fn check(batch: &HostBatch, max_pages: usize) {
    for_each_client(|client| {
        let count = batch.req_rows.len();
        let entries = (count * max_pages).max(1);
        let table = upload(client, &vec![77; entries]);
        let overflow = upload(client, &vec![77; count]);
        let [to_table, to_overflow] = [arg(&table, entries), arg(&overflow, count)];
        launch_page_table(client, batch.upload(client), to_table, to_overflow, max_pages);
        let table: Vec<i32> = read(client, table);
        let pages_of = batch.pages();
        let too_many = pages_of.iter().map(|pages| i32::from(pages.len() > max_pages));
        assert_eq!(read::<i32>(client, overflow), too_many.collect::<Vec<_>>(), "{:?}", batch.seq_lens);
        for (b, pages) in pages_of.iter().enumerate() {
            let mut wanted = pages.clone();
            wanted.resize(max_pages, -1);
            assert_eq!(table[b * max_pages..][..max_pages], wanted, "sequence {b} of {:?}", batch.seq_lens);
        }
    });
}

/// With room to spare, with none, and with too little, where the table ends before the sequence.
#[rstest]
fn pages_of_a_batch(
    #[values(1, 2, 16, 64)] page_size: usize,
    #[values(0, 1, 4, 7, 130)] max_pages: usize,
    #[values(1, 9, 31)] batch: usize,
) {
    check(&HostBatch::new(page_size, &lengths(page_size, batch)), max_pages);
}

/// More pages than there are tokens in 32 bits: lengths decide, not products of page numbers.
#[test]
fn tables_wider_than_the_map() {
    check(&HostBatch::new(1 << 20, &[3, 1 << 20]), 5000);
}

/// Unchecked rows, starts and lengths name no token, and nothing else is read for them.
#[test]
fn tokens_outside_the_map() {
    let mut batch = HostBatch::new(4, &[8, 8, 8, 8, 8, 8]);
    batch.req_rows[0] = -1;
    batch.req_rows[1] = batch.requests as i32;
    batch.req_rows[2] = i32::MAX;
    batch.kv_start[3] = -4;
    batch.kv_start[4] = i32::MAX - 3;
    batch.seq_lens[5] = 24;
    check(&batch, 6);
}

/// Slots that are negative, or inside of a page: none of them is page 0.
#[test]
fn slots_that_begin_no_page() {
    let mut batch = HostBatch::new(4, &[8, 8, 8, 8]);
    for (b, slot) in [-1, -4, 6, i32::MIN].into_iter().enumerate() {
        let (row, start) = (batch.req_rows[b] as usize, batch.kv_start[b] as usize);
        batch.req_to_token[row * batch.tokens + start + b % 2 * 4] = slot;
    }
    assert_eq!(batch.pages().concat().iter().filter(|&&page| page == -1).count(), 4);
    check(&batch, 3);
}

/// Pages of one token, so that a sequence ends right behind the last column of the map.
#[test]
fn sequences_longer_than_the_map() {
    let mut batch = HostBatch::new(1, &[3, 5, 2]);
    let tokens = batch.tokens as i32;
    for (len, start) in batch.seq_lens.iter_mut().zip(&batch.kv_start) {
        *len = tokens - start + 2;
    }
    check(&batch, batch.tokens + 3);
}

#[test]
fn empty_tables() {
    for_each_client(|client| {
        let (table, overflow) = (upload(client, &[77]), upload(client, &[77]));
        let (to_table, to_overflow) = (|| arg(&table, 1), |len| arg(&overflow, len));
        launch_page_table(client, HostBatch::new(4, &[]).upload(client), to_table(), to_overflow(1), 3);
        assert_eq!(read::<i32>(client, overflow.clone()), [77]);
        launch_page_table(client, HostBatch::new(4, &[3]).upload(client), to_table(), to_overflow(1), 0);
        assert_eq!((read::<i32>(client, table.clone()), read::<i32>(client, overflow.clone())), (vec![77], vec![1]));
    });
}
