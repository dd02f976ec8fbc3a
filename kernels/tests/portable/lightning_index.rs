//! Scores of as many query tokens at a time as there is room for; the rest of the operation is tested through Burn.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use mla_kernels::portable::lightning_index::{
    LightningIndexArgs, LightningIndexError, LightningIndexSizes, check, launch,
};

use crate::support::{arg, for_each_client, read, upload};

const SIZES: LightningIndexSizes = LightningIndexSizes {
    batch: 3,
    query_len: 2,
    heads: 1,
    width: 1,
    pages: 8,
    page_size: 32,
    max_pages: 5,
    k: 40,
    elem: ElemType::Float(FloatKind::F32),
};
const VISIBLE: [i32; 6] = [160, 41, 40, 0, 131, 7];

/// With one channel and a query and weight of 1, scores are the keys. Sequence `b` has its pages from page `b` on.
fn indices(client: &Client, score_rows: usize) -> Vec<i32> {
    let (keys, visible) = (keys(), VISIBLE);
    let ones = vec![1.0_f32; 6];
    let table: Vec<i32> = (0..3).flat_map(|b| (0..5).map(move |page| (b + page) % 8)).collect();
    let scores = upload(client, &vec![u32::MAX; score_rows * SIZES.score_stride()]);
    let indices = upload(client, &[-7; 240]);
    let args = LightningIndexArgs {
        q: arg(&upload(client, &ones), 6),
        keys: arg(&upload(client, &keys), keys.len()),
        page_table: arg(&upload(client, &table), table.len()),
        head_weights: arg(&upload(client, &ones), 6),
        visible: arg(&upload(client, &visible), 6),
        scores: arg(&scores, score_rows * SIZES.score_stride()),
        score_rows,
        indices: arg(&indices, 240),
        sizes: SIZES,
        scale: 1.0,
        slots: false,
    };
    launch(client, args).expect("legal");
    read(client, indices)
}

/// Of 8 pages of 32; few different ones.
fn keys() -> Vec<f32> {
    (0..256).map(|i| ((i * 37) % 29) as f32).collect()
}

#[test]
fn any_number_of_rows_at_a_time() {
    let expected: Vec<i32> = (0..6)
        .flat_map(|row| {
            let keys = keys();
            let key = |position: usize| keys[(row / 2 + position / 32) % 8 * 32 + position % 32];
            let mut order: Vec<usize> = (0..VISIBLE[row] as usize).collect();
            order.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
            order.truncate(40);
            order.sort_unstable();
            let mut chosen: Vec<i32> = order.into_iter().map(|position| position as i32).collect();
            chosen.resize(40, -1);
            chosen
        })
        .collect();
    for_each_client(|client| {
        for score_rows in [1, 2, 4, 5, 6, 9] {
            assert_eq!(indices(client, score_rows), expected, "{score_rows} at a time");
        }
    });
}

/// A table with room for more keys than a buffer has for their scores.
#[test]
fn what_a_device_lacks() {
    for_each_client(|client| {
        assert_eq!(SIZES.score_rows(client), 6);
        let wide = LightningIndexSizes { max_pages: 1 << 40, ..SIZES };
        assert_eq!(wide.score_rows(client), 1);
        let most = client.properties().memory.max_page_size;
        match check(client, &wide) {
            Err(LightningIndexError::Scores { available, .. }) => assert_eq!(available, most),
            other => assert!(most > 1 << 33 && other.is_err(), "{other:?}"),
        }
        let slots = LightningIndexSizes { pages: 1 << 30, ..SIZES };
        assert_eq!(check(client, &slots), Err(LightningIndexError::Slots(1 << 35)));
        let double = LightningIndexSizes { elem: ElemType::Float(FloatKind::F64), ..SIZES };
        assert!(matches!(check(client, &double), Err(LightningIndexError::Device(_))));
        // Nothing to do is legal, whatever the sizes.
        check(client, &LightningIndexSizes { batch: 0, ..wide }).expect("no query token");
    });
}
