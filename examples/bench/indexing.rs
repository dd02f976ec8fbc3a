//! The operations that move memory: `merge_state`, `page_table`, `kv_indices`, `write_latent`.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_mla::ops::{
    MergeStateArgs, PagedBatchArgs, WriteLatentArgs, kv_indices, merge_state, page_table as op_page_table, write_latent,
};
use serde_json::json;

use crate::cases::Bench;
use crate::data;
use crate::meta::dtype_name;
use crate::report::{Volume, rounded};

const PAGE: usize = 64;
const LATENT: usize = 512;
const ROPE: usize = 64;

/// `merge_state` of `[tokens, 128, 512]`, the peers' shapes.
pub fn merge(bench: &mut Bench) {
    for tokens in bench.pick(&[256, 4096, 16384], 2, &[3]) {
        bench.case(&format!("merge {tokens}"), |bench| merge_case(bench, tokens, 128));
    }
}

fn merge_case(bench: &mut Bench, tokens: usize, heads: usize) -> Result<(), String> {
    let out = || data::normal([tokens, heads, LATENT], bench.dtype, &bench.device);
    let lse = || data::normal([tokens, heads], DType::F32, &bench.device).mul_scalar(3.0);
    let args = MergeStateArgs { out_a: out(), lse_a: lse(), out_b: out(), lse_b: lse() };
    let call = || merge_state(args.clone()).map_err(|error| error.to_string());
    check_merge(bench, &args, call()?)?;
    let times = bench.timer.measure(call)?;
    let bytes = 3 * tokens * heads * (LATENT * bench.dtype.size() + 4);
    let gbps = bytes as f64 / times.us / 1e3;
    let ratio: Vec<_> = bench.copy_gbps.map(|copy| ("of_copy", rounded(gbps / copy, 3))).into_iter().collect();
    let dtype = dtype_name(bench.dtype);
    let shape = [("tokens", json!(tokens)), ("h_q", json!(heads)), ("dv", json!(LATENT)), ("dtype", json!(dtype))];
    bench.report.row("merge", &shape, &times, Volume { flops: None, bytes: Some(bytes as f64) }, &ratio);
    Ok(())
}

/// The last token, all heads.
fn check_merge(bench: &Bench, args: &MergeStateArgs, (out, lse): (Tensor<3>, Tensor<2>)) -> Result<(), String> {
    let [tokens, heads, _] = out.dims();
    let last = tokens - 1..tokens;
    let states = |out: &Tensor<3>| data::floats(out.clone().slice(last.clone()));
    let lses = |lse: &Tensor<2>| data::floats(lse.clone().slice(last.clone()));
    let (a, b, merged) = (states(&args.out_a)?, states(&args.out_b)?, states(&out)?);
    let (lse_a, lse_b, lse) = (lses(&args.lse_a)?, lses(&args.lse_b)?, lses(&lse)?);
    let mut difference = data::Difference::default();
    for h in 0..heads {
        let (x, y) = (f64::from(lse_a[h]), f64::from(lse_b[h]));
        let both = x.max(y) + (-(x - y).abs()).exp().ln_1p();
        let row = h * LATENT..(h + 1) * LATENT;
        let mix = |(&a, &b): (&f32, &f32)| (x - both).exp() * f64::from(a) + (y - both).exp() * f64::from(b);
        let expected = a[row.clone()].iter().zip(&b[row.clone()]).map(mix).collect();
        difference.add(&merged[row], lse[h], &(expected, both));
    }
    difference.check(bench.dtype).map(drop)
}

/// `page_table` with pages of 64 tokens, and `kv_indices` with pages of 1 and of 64, for 128 sequences of 32768 tokens.
pub fn page_table(bench: &mut Bench) {
    let (b, len) = bench.pick(&[(128, 32768)], 1, &[(3, 300)])[0];
    bench.case("page_table", |bench| page_table_case(bench, b, len));
    for page in [1, PAGE] {
        bench.case(&format!("kv_indices {page}"), |bench| kv_indices_case(bench, b, len, page));
    }
}

/// All requests of a map whose pages lie in random order, and the page ids of all of them in order.
fn paged_batch(bench: &Bench, b: usize, len: usize, page: usize) -> (PagedBatchArgs, Vec<i32>) {
    let per = len.div_ceil(page);
    let pages = data::permutation(b * per, &mut data::rng(1));
    let slot = |t: usize, row: &[i32]| row[t / page] * page as i32 + (t % page) as i32;
    let map: Vec<i32> = pages.chunks(per).flat_map(|row| (0..len).map(move |t| slot(t, row))).collect();
    let args = PagedBatchArgs {
        req_to_token: data::ints(map, [b, len], &bench.device),
        req_rows: data::ints((0..b as i32).collect(), [b], &bench.device),
        seq_lens: data::ints(vec![len as i32; b], [b], &bench.device),
        kv_start: Some(data::ints(vec![0; b], [b], &bench.device)),
        page_size: page,
    };
    (args, pages)
}

fn page_table_case(bench: &mut Bench, b: usize, len: usize) -> Result<(), String> {
    let (args, pages) = paged_batch(bench, b, len, PAGE);
    let call = || op_page_table(args.clone(), len.div_ceil(PAGE)).map_err(|error| error.to_string());
    if data::read_ints(call()?.table)? != pages {
        return Err("wrong page ids".into());
    }
    let times = bench.timer.measure(call)?;
    let shape = [("b", json!(b)), ("s_k", json!(len)), ("page", json!(PAGE))];
    // An entry of the map read and a page id written, per page.
    let bytes = Some((pages.len() * 8) as f64);
    bench.report.row("page_table", &shape, &times, Volume { flops: None, bytes }, &[]);
    Ok(())
}

fn kv_indices_case(bench: &mut Bench, b: usize, len: usize, page: usize) -> Result<(), String> {
    let (args, pages) = paged_batch(bench, b, len, page);
    let call = || kv_indices(args.clone(), pages.len()).map_err(|error| error.to_string());
    if data::read_ints(call()?.indices)? != pages {
        return Err("wrong page ids".into());
    }
    let times = bench.timer.measure(call)?;
    let shape = [("b", json!(b)), ("s_k", json!(len)), ("page", json!(page))];
    let bytes = Some((pages.len() * 8) as f64);
    bench.report.row("kv_indices", &shape, &times, Volume { flops: None, bytes }, &[]);
    Ok(())
}

/// `write_latent` of a decode step's tokens and of a prefill's, to random slots.
pub fn write(bench: &mut Bench) {
    for tokens in bench.pick(&[128, 16384], 1, &[5]) {
        bench.case(&format!("write {tokens}"), |bench| write_case(bench, tokens));
    }
}

fn write_case(bench: &mut Bench, tokens: usize) -> Result<(), String> {
    let device = &bench.device;
    let pages = (2 * tokens).div_ceil(PAGE);
    let mut slots = data::permutation(pages * PAGE, &mut data::rng(2));
    slots.truncate(tokens);
    let first = slots[0] as usize;
    let slots = data::ints(slots, [tokens], device);
    let latent = data::normal([tokens, LATENT], bench.dtype, device);
    let rope = data::normal([tokens, ROPE], bench.dtype, device);
    let write = |cache| {
        let (slots, latent, rope) = (slots.clone(), latent.clone(), Some(rope.clone()));
        write_latent(WriteLatentArgs { cache, slots, latent, rope }).map_err(|refused| refused.error.to_string())
    };
    let cache = write(data::pool([pages, PAGE, LATENT + ROPE], FloatDType::from(bench.dtype), device).into())?;
    let row = cache.read(data::ints(vec![first as i32], [1], device));
    let expected = Tensor::cat(vec![latent.clone().slice(0..1), rope.clone().slice(0..1)], 1);
    if data::floats(row)? != data::floats(expected)? {
        return Err("the cache has other rows than were written".into());
    }
    let mut cache = Some(cache);
    let times = bench.timer.measure(|| {
        cache = Some(write(cache.take().ok_or("the cache is gone")?)?);
        Ok(())
    })?;
    let bytes = tokens * (2 * (LATENT + ROPE) * bench.dtype.size() + 4);
    let shape = [("tokens", json!(tokens)), ("d", json!(LATENT + ROPE))];
    bench.report.row("write", &shape, &times, Volume { flops: None, bytes: Some(bytes as f64) }, &[]);
    Ok(())
}
