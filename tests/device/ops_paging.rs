//! `page_table`, `kv_indices` and `write_latent` against brute force, and what permuting pages and batches may change.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::cache::{Pool, new_pool};
use mla_ops::{KvIndices, MlaError, PageTable, PagedBatchArgs, WriteLatentArgs, kv_indices, page_table, write_latent};
use proptest::prelude::{Just, ProptestConfig, Strategy, prop, proptest};
use rand::seq::SliceRandom;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{DecodeCase, DecodeInputs, UNUSED_PAGE, bits, floats, int_values, ints, random, rng};
use crate::oracle;

/// Requests on random pages, and a batch of some of them.
struct Batch {
    page_size: usize,
    /// R rows of T slots; past a request's length they hold `UNUSED_PAGE`.
    map: Vec<Vec<i32>>,
    rows: Vec<i32>,
    starts: Vec<i32>,
    /// From `starts` on.
    lens: Vec<i32>,
}

impl Batch {
    /// Lengths on both sides of the ends of pages; the rows of the map in no order, one of them twice, one not at all.
    fn new(page_size: usize, with_start: bool) -> Self {
        let lens = [0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + 3, 1];
        let mut rng = rng(41);
        let longest = 9 * page_size;
        let mut pages: Vec<i32> = (0..9 * 9).collect();
        pages.shuffle(&mut rng);
        let slot = |request: usize, token: usize| {
            pages[request * 9 + token / page_size] * page_size as i32 + (token % page_size) as i32
        };
        let mut map: Vec<Vec<i32>> = (0..9).map(|r| (0..longest).map(|token| slot(r, token)).collect()).collect();
        let mut rows: Vec<i32> = (0..8).collect();
        rows.shuffle(&mut rng);
        rows.truncate(lens.len() - 1);
        rows.push(rows[5]);
        let starts: Vec<usize> = (0..lens.len()).map(|b| if with_start { b % 4 * page_size } else { 0 }).collect();
        for (b, row) in rows[..lens.len() - 1].iter().enumerate() {
            let end = starts[b] + lens[b];
            map[*row as usize][end..].fill(UNUSED_PAGE);
        }
        let to_i32 = |values: &[usize]| values.iter().map(|&value| value as i32).collect();
        Self { page_size, map, rows, starts: to_i32(&starts), lens: to_i32(&lens) }
    }

    fn args(&self, device: &Device) -> PagedBatchArgs {
        let batch = self.rows.len();
        let starts = self.starts.iter().any(|&start| start > 0);
        PagedBatchArgs {
            req_to_token: ints(&self.map.concat(), [self.map.len(), self.map[0].len()], device),
            req_rows: ints(&self.rows, [batch], device),
            seq_lens: ints(&self.lens, [batch], device),
            kv_start: starts.then(|| ints(&self.starts, [batch], device)),
            page_size: self.page_size,
        }
    }

    /// Page ids of each sequence.
    fn pages(&self) -> Vec<Vec<i32>> {
        let sequences = self.rows.iter().zip(self.starts.iter().zip(&self.lens));
        let pages = |(&row, (&start, &len)): (&i32, (&i32, &i32))| {
            oracle::pages(&self.map[row as usize], start as usize, len as usize, self.page_size)
        };
        sequences.map(pages).collect()
    }
}

#[rstest]
fn ops_page_table(#[values(1, 2, 16, 64)] page_size: usize, #[values(false, true)] with_start: bool) {
    for_each_device(|device| {
        let batch = Batch::new(page_size, with_start);
        // No column, fewer than the longest sequence needs, as many, and more than the map has pages.
        for max_pages in [0, 3, 5 + 3_usize.div_ceil(page_size), 23] {
            let (mut expected, mut too_many) = (Vec::new(), Vec::new());
            for mut pages in batch.pages() {
                too_many.push(i32::from(pages.len() > max_pages));
                pages.resize(max_pages, -1);
                expected.extend(pages);
            }
            let PageTable { table, overflow } = page_table(batch.args(device), max_pages).expect("legal");
            assert_eq!(table.dims(), [batch.rows.len(), max_pages]);
            assert_eq!(int_values(table), expected, "max_pages {max_pages}");
            assert_eq!(int_values(overflow), too_many, "max_pages {max_pages}");
        }
    });
}

#[rstest]
fn ops_kv_indices(#[values(1, 2, 16, 64)] page_size: usize, #[values(false, true)] with_start: bool) {
    for_each_device(|device| {
        let batch = Batch::new(page_size, with_start);
        let pages = batch.pages();
        let all = pages.concat();
        let mut indptr = vec![0];
        for pages in &pages {
            indptr.push(indptr[indptr.len() - 1] + pages.len() as i32);
        }
        let last_page_len: Vec<i32> =
            batch.lens.iter().map(|&len| if len == 0 { 0 } else { (len - 1) % page_size as i32 + 1 }).collect();
        for capacity in [0, 1, all.len() - 1, all.len(), all.len() + 5] {
            let mut expected = all.clone();
            expected.resize(capacity, -1);
            let KvIndices { indptr: ptr, indices, last_page_len: last, overflow } =
                kv_indices(batch.args(device), capacity).expect("legal");
            assert_eq!(int_values(indices), expected, "capacity {capacity}");
            assert_eq!(int_values(ptr), indptr);
            assert_eq!(int_values(last), last_page_len);
            assert_eq!(int_values(overflow), [i32::from(capacity < all.len())], "capacity {capacity}");
        }
    });
}

/// With pages of one token the indices are the slots.
#[test]
fn ops_kv_indices_of_single_tokens_are_slots() {
    for_each_device(|device| {
        let batch = Batch::new(1, false);
        let (row, len) = (&batch.map[batch.rows[5] as usize], batch.lens[5] as usize);
        let csr = kv_indices(batch.args(device), 64).expect("legal");
        let first = int_values(csr.indptr)[5] as usize;
        assert_eq!(int_values(csr.indices)[first..first + len], row[..len]);
    });
}

#[test]
fn ops_paging_of_nothing() {
    for_each_device(|device| {
        let empty = Batch { page_size: 4, map: vec![vec![0; 8]], rows: vec![], starts: vec![], lens: vec![] };
        let none = page_table(empty.args(device), 3).expect("legal");
        assert_eq!((none.table.dims(), none.overflow.dims()), ([0, 3], [0]));
        assert_eq!(page_table(empty.args(device), 0).expect("legal").table.dims(), [0, 0]);
        let csr = kv_indices(empty.args(device), 2).expect("legal");
        assert_eq!((int_values(csr.indptr), int_values(csr.indices)), (vec![0], vec![-1, -1]));
        assert_eq!((csr.last_page_len.dims(), int_values(csr.overflow)), ([0], vec![0]));
        // A sequence that starts at the end of the map has no token.
        let at_end = Batch { rows: vec![0], starts: vec![8], lens: vec![0], ..empty };
        assert_eq!(int_values(page_table(at_end.args(device), 2).expect("legal").table), [-1, -1]);
        assert_eq!(int_values(kv_indices(at_end.args(device), 2).expect("legal").indices), [-1, -1]);
    });
}

/// A page begins at a slot that is a multiple of its size. What begins elsewhere, or nowhere, has no page: it is not page 0.
#[test]
fn ops_paging_of_slots_that_begin_no_page() {
    for_each_device(|device| {
        // The first tokens of three pages; of the last row, what lies behind the end may be anything.
        let rows = [[8, -1, 4], [2, 0, -4], [i32::MIN, 7, 12], [4, -1, 3]];
        let map: Vec<i32> = rows.iter().flatten().flat_map(|&first| [first, 99, 99, 99]).collect();
        let args = PagedBatchArgs {
            req_to_token: ints(&map, [4, 12], device),
            req_rows: ints(&[0, 1, 2, 3], [4], device),
            seq_lens: ints(&[12, 9, 12, 4], [4], device),
            kv_start: None,
            page_size: 4,
        };
        let refused = args.validate_device_inputs().expect_err("slots at which no page begins");
        let first = matches!(&refused, MlaError::DeviceValue { argument: "req_to_token", index, actual: -1, .. } if *index == [0, 4]);
        assert!(first, "{refused}");
        if *device == Device::flex() {
            assert_eq!(page_table(args.clone(), 3).expect_err("values are checked").to_string(), refused.to_string());
            assert!(kv_indices(args, 10).is_err());
            return;
        }
        let pages = [2, -1, 1, -1, 0, -1, -1, -1, 3, 1, -1, -1];
        assert_eq!(int_values(page_table(args.clone(), 3).expect("legal").table), pages);
        assert_eq!(int_values(kv_indices(args, 10).expect("legal").indices), pages[..10]);
    });
}

const CACHE: [usize; 3] = [5, 4, 7];

/// A cache of random values and rows to write, the last two channels of which are the rotary part.
fn write_args(rows: usize, with_rope: bool, slots: &[i32], dtype: DType, device: &Device) -> WriteLatentArgs {
    let mut rng = rng(42);
    let [pages, page_size, width] = CACHE;
    let values = random(&mut rng, pages * page_size * width, dtype);
    // By way of one dimension: some devices pad the rows of others.
    let cache = floats(&values, [values.len()], dtype, device).reshape(CACHE);
    let new = floats(&random(&mut rng, rows * width, dtype), [rows, width], dtype, device);
    let (latent, rope) = match with_rope {
        true => (new.clone().slice([0..rows, 0..width - 2]), Some(new.slice([0..rows, width - 2..width]))),
        false => (new, None),
    };
    WriteLatentArgs { cache: cache.into(), slots: ints(slots, [rows], device), latent, rope }
}

#[rstest]
#[case::permuted(&[13, 2, 19, 0, 7])]
#[case::runs(&[4, 5, 6, 11, 12, 3])]
#[case::skipped(&[-1, 8, -1, 9, 10, -1])]
#[case::run_broken_by_a_skip(&[8, -1, 9])]
#[case::all_skipped(&[-1, -1])]
#[case::nothing(&[])]
#[case::all_descending(&[19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])]
fn ops_write_latent(#[case] slots: &[i32], #[values(false, true)] with_rope: bool) {
    for_each_dtype(|device, dtype| {
        let args = write_args(slots.len(), with_rope, slots, dtype, device);
        let row_bytes = CACHE[2] * dtype.size();
        let mut expected = bits(&args.cache.dense());
        let rows = |part: &Tensor<2>| -> Vec<Vec<u8>> {
            bits(part).chunks_exact(part.dims()[1] * dtype.size()).map(<[u8]>::to_vec).collect()
        };
        let mut new = rows(&args.latent);
        for (row, rope) in new.iter_mut().zip(args.rope.iter().flat_map(rows)) {
            row.extend(rope);
        }
        for (slot, row) in slots.iter().zip(new) {
            if let Ok(slot) = usize::try_from(*slot) {
                expected[slot * row_bytes..(slot + 1) * row_bytes].copy_from_slice(&row);
            }
        }
        let cache = write_latent(args).expect("legal");
        assert_eq!((cache.dims(), cache.dtype()), (CACHE, dtype));
        assert!(bits(&cache.dense()) == expected, "slots {slots:?}, {dtype:?} on {device:?}");
    });
}

/// Where the cache lies in memory.
pub fn address(cache: &Pool) -> *const u8 {
    let primitive = cache.dense().try_into_primitive::<burn::backend::Flex>().expect("a Flex tensor");
    primitive.bytes().as_ptr()
}

/// The buffer is the one that was passed; only Flex shows addresses.
#[rstest]
fn ops_write_latent_in_place(#[values(false, true)] with_rope: bool, #[values(DType::F32, DType::BF16)] dtype: DType) {
    let args = write_args(3, with_rope, &[7, -1, 2], dtype, &Device::flex());
    let before = address(&args.cache);
    let cache = write_latent(args).expect("legal");
    assert_eq!(address(&cache), before);
}

/// No pages, pages of no rows, rows of no channels.
#[rstest]
fn ops_write_latent_into_nothing(#[values([0, 4, 3], [4, 0, 3], [4, 4, 0])] shape: [usize; 3]) {
    for_each_device(|device| {
        let slots = if shape[2] == 0 { [9, -1] } else { [-1; 2] };
        let cache = new_pool(shape, FloatDType::F32, device).expect("nothing").into();
        let latent = floats(&[1.0; 6][..2 * shape[2]], [2, shape[2]], DType::F32, device);
        let args = WriteLatentArgs { cache, slots: ints(&slots, [2], device), latent, rope: None };
        assert_eq!(write_latent(args).expect("legal").dims(), shape, "on {device:?}");
    });
}

#[test]
fn ops_write_latent_refuses_a_shared_cache() {
    for_each_dtype(|device, dtype| {
        let args = write_args(2, true, &[1, 5], dtype, device);
        let other = args.cache.clone();
        let before = bits(&other.dense());
        let WriteLatentArgs { cache, slots, latent, rope } = args;
        let (again, more) = (latent.clone(), rope.clone());
        let args = WriteLatentArgs { cache, slots: slots.clone(), latent, rope };
        let refused = write_latent(args).expect_err("another handle is alive");
        assert!(matches!(refused.error, MlaError::CacheShared { .. }), "{refused}");
        assert!(refused.to_string().contains("`cache`"), "{refused}");
        assert!(bits(&refused.cache.dense()) == before && bits(&other.dense()) == before);
        // With the other handles gone the returned cache can be written.
        drop(other);
        let args = WriteLatentArgs { cache: refused.cache, slots, latent: again, rope: more };
        let cache = write_latent(args).expect("the only handle");
        assert!(bits(&cache.dense()) != before);
    });
}

/// A cache whose rows are not in order in memory cannot be written through a flat view: it is refused, not copied.
#[test]
fn ops_write_latent_never_copies_a_strided_cache() {
    let WriteLatentArgs { cache, slots, latent, rope } = write_args(1, false, &[3], DType::F32, &Device::flex());
    let strided = cache.dense().swap_dims(0, 1).into();
    let before = address(&strided);
    match write_latent(WriteLatentArgs { cache: strided, slots, latent, rope }) {
        Ok(cache) => assert_eq!(address(&cache), before, "the pool was copied"),
        Err(refused) => assert_eq!(address(&refused.cache), before),
    }
}

/// The same problem with page `i` of the cache moved to `to[i]`.
fn move_pages(inputs: &DecodeInputs, to: &[usize]) -> DecodeInputs {
    let mut moved = inputs.clone();
    let page = inputs.case.page_size * inputs.case.widths.0;
    for (from, &to) in to.iter().enumerate() {
        moved.kv_cache[to * page..(to + 1) * page].copy_from_slice(&inputs.kv_cache[from * page..(from + 1) * page]);
    }
    for entry in moved.page_table.iter_mut().filter(|entry| **entry != UNUSED_PAGE) {
        *entry = to[*entry as usize] as i32;
    }
    moved
}

/// The same problem with sequence `order[b]` in place `b`.
fn reorder_batch(inputs: &DecodeInputs, order: &[usize]) -> DecodeInputs {
    let mut reordered = inputs.clone();
    let q = inputs.q.len() / order.len();
    let rows = |b: &usize| *b..b + 1;
    reordered.case.lens = order.iter().map(|&b| inputs.case.lens[b]).collect();
    reordered.q = order.iter().map(rows).flat_map(|b| &inputs.q[b.start * q..b.end * q]).copied().collect();
    let table = |b: &usize| &inputs.page_table[b * inputs.max_pages..(b + 1) * inputs.max_pages];
    reordered.page_table = order.iter().flat_map(table).copied().collect();
    reordered
}

/// Lengths of a batch and an order of it.
fn batches() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    prop::collection::vec(0..150_usize, 1..6).prop_flat_map(|lens| {
        let order: Vec<usize> = (0..lens.len()).collect();
        (Just(lens), Just(order).prop_shuffle())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ops_decode_does_not_see_where_pages_lie((lens, _) in batches(), page_size in 0..6_u32, seed in 0..1000_u64) {
        for_each_dtype(|device, dtype| {
            let case = DecodeCase { lens: lens.clone(), page_size: 1 << page_size, query_len: 2, dtype, ..Default::default() };
            let inputs = case.inputs(seed);
            let mut to: Vec<usize> = (0..inputs.pages).collect();
            to.shuffle(&mut rng(seed + 1));
            let ((out, lse), (moved_out, moved_lse)) = (inputs.run(device), move_pages(&inputs, &to).run(device));
            assert_eq!((bits(&moved_out), bits(&moved_lse)), (bits(&out), bits(&lse)));
        });
    }

    // Splits of a fixed size: how `Auto` cuts a sequence may depend on its place.
    #[test]
    fn ops_decode_order_of_the_batch_changes_nothing((lens, order) in batches(), seed in 0..1000_u64) {
        for_each_dtype(|device, dtype| {
            let splits = mla_ops::Splits::Tokens(64);
            let inputs = DecodeCase { lens: lens.clone(), query_len: 2, splits, dtype, ..Default::default() }.inputs(seed);
            let ((out, lse), (new_out, new_lse)) = (inputs.run(device), reorder_batch(&inputs, &order).run(device));
            for (place, &b) in order.iter().enumerate() {
                assert_eq!(bits(&new_out.clone().narrow(0, place, 1)), bits(&out.clone().narrow(0, b, 1)));
                assert_eq!(bits(&new_lse.clone().narrow(0, place, 1)), bits(&lse.clone().narrow(0, b, 1)));
            }
        });
    }
}
