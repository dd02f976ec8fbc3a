//! Merging the splits of sequences against sums in f64.

use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::merge_splits::{self, MergeSplitsArgs};
use rstest::rstest;

use super::merge_state::{Elem, Parts, UNWRITTEN, check, results, supported};
use super::support::{arg, for_each_client, read, upload};

/// `expected` is how many items the launcher is told of: it shapes the kernel for more or fewer of them.
fn merge_items<E: Elem>(client: &Client, rows: usize, width: usize, expected: usize, single_items_done: bool) {
    if !supported::<E>(client) {
        return;
    }
    // Sequences with no item, also first and last, and with many.
    let split_ptr = [0i32, 0, 1, 4, 4, 5, 23, 25, 25];
    let (batch, items) = (split_ptr.len() - 1, 25);
    let parts = Parts::<f32>::random(13, items * rows, width);
    let [out, lse] = results::<E>(client, batch * rows, width);
    merge_splits::launch(
        client,
        MergeSplitsArgs {
            outs: arg(&upload(client, &parts.outs), items * rows * width),
            lses: arg(&upload(client, &parts.lses), items * rows),
            split_ptr: arg(&upload(client, &split_ptr), split_ptr.len()),
            out: arg(&out, batch * rows * width),
            lse: arg(&lse, batch * rows),
            batch,
            items: expected,
            rows,
            width,
            single_items_done,
            elem: E::cube_type(),
        },
    );
    check::<E>(&read(client, out), &read(client, lse), width, |at| {
        let items = split_ptr[at / rows] as usize..split_ptr[at / rows + 1] as usize;
        match single_items_done && items.len() == 1 {
            true => (vec![f64::from(UNWRITTEN); width], f64::from(UNWRITTEN)),
            false => parts.merged(items.map(|item| item * rows + at % rows)),
        }
    });
}

#[rstest]
#[case(1, 1)]
#[case(3, 512)]
#[case(127, 10)]
#[case(16, 31)]
#[case(2, 1030)]
#[case(2000, 4)]
fn splits(#[case] rows: usize, #[case] width: usize) {
    for_each_client(|client| {
        for expected in [8, 25, 100, 800] {
            for single_items_done in [false, true] {
                merge_items::<f32>(client, rows, width, expected, single_items_done);
                merge_items::<f16>(client, rows, width, expected, single_items_done);
                merge_items::<bf16>(client, rows, width, expected, single_items_done);
            }
        }
    });
}

/// The bits of a sequence depend on its own splits, not on what its batch makes of the kernel.
#[rstest]
fn splits_ignore_neighbours(#[values(1, 2, 3, 7, 16, 31, 90)] count: usize, #[values(1, 16, 300)] rows: usize) {
    const WIDTH: usize = 72;
    for_each_client(|client| {
        let parts = Parts::<f32>::random(19, count * rows, WIDTH);
        // Among so many others, each with one split, with `expected` items in all.
        let merged = |others: usize, expected: usize| {
            let (batch, items) = (others + 1, others + count);
            let [mut outs, mut lses] = [vec![0.0; others * rows * WIDTH], vec![0.0; others * rows]];
            outs.extend_from_slice(&parts.outs);
            lses.extend_from_slice(&parts.lses);
            let split_ptr: Vec<i32> = (0..=others as i32).chain([items as i32]).collect();
            let [out, lse] = results::<f32>(client, batch * rows, WIDTH);
            merge_splits::launch(
                client,
                MergeSplitsArgs {
                    outs: arg(&upload(client, &outs), outs.len()),
                    lses: arg(&upload(client, &lses), lses.len()),
                    split_ptr: arg(&upload(client, &split_ptr), split_ptr.len()),
                    out: arg(&out, batch * rows * WIDTH),
                    lse: arg(&lse, batch * rows),
                    batch,
                    items: expected,
                    rows,
                    width: WIDTH,
                    single_items_done: false,
                    elem: f32::cube_type(),
                },
            );
            let (out, lse): (Vec<f32>, Vec<f32>) = (read(client, out), read(client, lse));
            let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            (bits(&out[others * rows * WIDTH..]), bits(&lse[others * rows..]))
        };
        let alone = merged(0, count);
        for (others, expected) in [(0, 4), (0, 200), (5, count + 5), (40, 41 * 30), (40, 41)] {
            assert!(merged(others, expected) == alone, "{others} neighbours, {expected} items");
        }
    });
}
