//! Index keys in FP8 by their words: where they lie, and keys that somebody else has quantised, with scales of any size.

use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use half::f16;
use mla_kernels::cache_rows::{CacheArg, Fp8Layout, Fp8Scales, RowFormat, WriteFp8Args, launch_write_fp8};
use mla_kernels::lightning_index::{LightningIndexArgs, LightningIndexSizes, launch};

use crate::support::{arg, for_each_client, read, skip, upload};

fn layout(codes: usize, page_rows: usize) -> Fp8Layout {
    Fp8Layout { codes, rope: 0, scales: Fp8Scales::F32BehindPage { page_rows } }
}

/// Of two pages of four keys of eight channels: the codes of a page, then its scales, then the next page (DeepGEMM's
/// `fp8_paged_mqa_logits`). What is not written stays as it was.
#[test]
fn codes_lie_before_the_scales_of_their_page() {
    const OLD: u32 = 0xabab_abab;
    let keys = [[1.0, 2.0, 3.0, -3.5, 0.0, 0.5, -0.25, 3.5], [0.0; 8], [7.0, -7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 448.0]];
    let power = |exponent: u32| (127 + exponent).wrapping_sub(22) << 23;
    let mut expected = [OLD; 24];
    // 128 times the numbers, 2^-7; zeros have the least scale, 2^-22.
    (expected[14], expected[15], expected[21]) = (0xfe7c_7870, 0x7ee0_6800, power(15));
    (expected[0], expected[1], expected[8]) = (0, 0, power(0));
    (expected[18], expected[19], expected[23]) = (0x3838_ce4e, 0x7e38_3838, power(22));
    for_each_client(|client| {
        let cache = upload(client, &[OLD; 24]);
        let args = WriteFp8Args {
            cache: arg(&cache, 24),
            layout: layout(8, 4),
            slots: arg(&upload(client, &[5, 0, 7, 8, -1]), 5),
            first: arg(&upload(client, &[&keys[..], &[[9.0f32; 8]; 2]].concat().concat()), 40),
            rest: None,
            first_width: 8,
            slot_count: 8,
            tokens: 5,
            elem: f32::cube_type(),
        };
        launch_write_fp8(client, args);
        let written: Vec<u32> = read(client, cache);
        assert_eq!(
            written.iter().map(|word| format!("{word:x}")).collect::<Vec<_>>(),
            expected.map(|word| format!("{word:x}"))
        );
    });
}

/// The number of a code that is not negative.
fn number(code: u8) -> f64 {
    match (code >> 3, code & 7) {
        (0, fraction) => f64::from(fraction) * 2f64.powi(-9),
        (exponent, fraction) => f64::from(8 + fraction) * 2f64.powi(i32::from(exponent) - 10),
    }
}

/// A score is the first channel of a key, times a scale that is no power of two. Other channels are the largest numbers, for queries of
/// zero; rows of no key have codes and scales that are no numbers.
fn choose<E: CubeElement + Scalar>(client: &Client, of: fn(f32) -> E, page_size: usize) {
    if !E::supported_uses(client).contains(TypeUsage::Arithmetic) {
        skip(format_args!("this device has no {}", E::type_name()));
        return;
    }
    let (heads, width, pages, visible, k) = (8, 64, 128 / page_size, 90, 17);
    let layout = layout(width, page_size);
    let table: Vec<i32> = (0..pages as i32).map(|page| (page * 5 + 3) % pages as i32).collect();
    let (mut words, mut scores) = (vec![u32::MAX >> 1; pages * layout.page_words()], Vec::new());
    words.iter_mut().for_each(|word| *word |= 0x7f7f_7f7f);
    for position in 0..visible {
        let (page, row) = (table[position / page_size] as usize * layout.page_words(), position % page_size);
        let (code, scale) = ((position * 29 % 0x7f) as u8, 1e-3 + (position * 37 % 64) as f32 / 61.0);
        let codes = &mut words[page + row * width / 4..][..width / 4];
        codes.fill(0x7e7e_7e7e);
        codes[0] = 0x7e7e_7e00 | u32::from(code);
        words[page + page_size * width / 4 + row] = scale.to_bits();
        scores.push(number(code) * f64::from(scale));
    }
    let mut order: Vec<usize> = (0..visible).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    let mut expected: Vec<i32> = order[..k].iter().map(|&position| position as i32).collect();
    expected.sort_unstable();
    let sizes = LightningIndexSizes {
        batch: 1,
        query_len: 1,
        heads,
        width,
        pages,
        page_size,
        max_pages: pages,
        k,
        elem: E::cube_type(),
        rows: RowFormat::Fp8(layout),
    };
    let q: Vec<E> = (0..heads * width).map(|i| of(if i % width == 0 { 1.0 } else { 0.0 })).collect();
    let (stride, candidate_stride) = (sizes.score_stride(), sizes.candidate_stride(client));
    let indices = upload(client, &vec![-7; k]);
    let args = LightningIndexArgs {
        q: arg(&upload(client, &q), q.len()),
        keys: CacheArg::Fp8(arg(&upload(client, &words), words.len()), layout),
        page_table: arg(&upload(client, &table), pages),
        head_weights: arg(&upload(client, &vec![0.125f32; heads]), heads),
        weights_elem: f32::cube_type(),
        visible: arg(&upload(client, &[visible as i32]), 1),
        scores: arg(&upload(client, &vec![u32::MAX; stride]), stride),
        candidates: arg(&upload(client, &vec![u32::MAX; candidate_stride.max(1)]), candidate_stride),
        score_rows: 1,
        indices: arg(&indices, k),
        sizes,
        scale: 0.5,
        slots: false,
    };
    launch(client, args).expect("legal");
    assert_eq!(read::<i32>(client, indices), expected, "{} in pages of {page_size}", E::type_name());
}

#[test]
fn scales_may_be_of_any_size() {
    for_each_client(|client| {
        for page_size in [2, 4, 16, 64] {
            choose::<f32>(client, |x| x, page_size);
            choose::<f16>(client, f16::from_f32, page_size);
        }
    });
}
