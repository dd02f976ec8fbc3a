//! Page lists against those of the host.

use mla_kernels::kv_indices::{KvIndicesOut, launch_kv_indices};
use rstest::rstest;

use super::page_table::{HostBatch, lengths};
use super::support::{arg, for_each_client, random, read, upload};

/// What no list holds.
const UNWRITTEN: i32 = 77_777;

#[track_caller]
fn check(batch: &HostBatch, capacity: usize) {
    let pages = batch.pages();
    let mut indptr = vec![0];
    indptr.extend(pages.iter().scan(0, |total, pages| {
        *total += pages.len() as i32;
        Some(*total)
    }));
    let needed = indptr[pages.len()] as usize;
    let mut indices = pages.concat();
    indices.resize(capacity, -1);
    let last_page_len: Vec<i32> =
        batch.seq_lens.iter().map(|&len| if len <= 0 { 0 } else { (len - 1) % batch.page_size as i32 + 1 }).collect();

    for_each_client(|client| {
        let count = pages.len();
        // Longer than the capacity, to see that nothing is written past it.
        let lens = [count + 1, capacity, count, 1];
        let buffers = lens.map(|len| upload(client, &vec![UNWRITTEN; len + 40]));
        launch_kv_indices(
            client,
            batch.upload(client),
            KvIndicesOut {
                indptr: arg(&buffers[0], lens[0]),
                indices: arg(&buffers[1], lens[1]),
                last_page_len: arg(&buffers[2], lens[2]),
                overflow: arg(&buffers[3], lens[3]),
                capacity,
            },
        );
        let overflow = [i32::from(needed > capacity)];
        let wanted: [&[i32]; 4] = [&indptr, &indices, &last_page_len, &overflow];
        let names = ["indptr", "indices", "last_page_len", "overflow"];
        for ((buffer, wanted), name) in buffers.into_iter().zip(wanted).zip(names) {
            let values: Vec<i32> = read(client, buffer);
            let (values, rest) = values.split_at(wanted.len());
            if let Some(at) = (0..wanted.len()).find(|&at| values[at] != wanted[at]) {
                panic!("{name}[{at}]: {}, not {}", values[at], wanted[at]);
            }
            assert!(rest.iter().all(|&value| value == UNWRITTEN), "{name} is written past its end");
        }
    });
}

/// Pages that a batch needs.
fn needed(batch: &HostBatch) -> usize {
    batch.pages().iter().map(Vec::len).sum()
}

/// A batch per unit of the scan and fewer and more; capacities below, at and above what is needed.
#[rstest]
fn lists_of_a_batch(
    #[values(1, 4, 64)] page_size: usize,
    #[values(1, 2, 27, 256, 257, 700)] batch: usize,
    #[values(-5, 0, 300)] spare: isize,
) {
    let batch = HostBatch::new(page_size, &lengths(page_size, batch));
    check(&batch, needed(&batch).saturating_add_signed(spare));
}

/// Many sequences, most of them empty, so that bisection meets long stretches of equal entries.
#[test]
fn a_large_batch_with_empty_sequences() {
    let lens: Vec<i32> = random(3, 100_003).into_iter().map(|x| ((x - 0.7).max(0.0) * 30.0) as i32).collect();
    let batch = HostBatch::new(2, &lens);
    check(&batch, needed(&batch) + 1);
    check(&batch, needed(&batch) - 1);
}

/// A million sequences.
#[test]
fn a_million_sequences() {
    let lens = lengths(1, 1_000_001);
    let batch = HostBatch::new(1, &lens);
    check(&batch, needed(&batch));
}

#[test]
fn no_sequences() {
    let batch = HostBatch::new(16, &[]);
    check(&batch, 5);
    check(&batch, 0);
}

#[test]
fn no_pages() {
    let batch = HostBatch::new(16, &[0, 0, -3, 0]);
    check(&batch, 3);
    check(&batch, 0);
}

/// Unchecked rows and starts give -1, and the rest of the list stands.
#[test]
fn tokens_outside_the_map() {
    let mut batch = HostBatch::new(4, &[8, 9, 8, 7, 8]);
    batch.req_rows[0] = -1;
    batch.req_rows[2] = batch.requests as i32;
    batch.kv_start[4] = i32::MAX - 3;
    check(&batch, 20);
}
