//! Batch invariance: the bits of a request's logits, whatever else is in the batch.

use burn::tensor::{Device, FloatDType};
use burn_mla::model::{CacheSize, DeepseekModel};
use burn_mla::ops::Determinism;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::devices::{for_each_device, is_slow, skip};
use crate::model_engine::{V3, V4};
use crate::model_parity::{Stored, folder};

/// Logits of a prompt's tokens, bit for bit: alone, among 6 and among 63 others, in any chunks, token by token.
#[rstest]
#[case("tests/fixtures/v2lite-tiny", FloatDType::F32)]
#[case("tests/fixtures/v3-tiny", FloatDType::F32)]
#[case("tests/fixtures/v3-tiny", FloatDType::BF16)]
#[case("tests/fixtures/v32-tiny", FloatDType::F32)]
#[case("tests/fixtures/v4-tiny", FloatDType::F32)]
#[case("tests/fixtures/v4-tiny", FloatDType::BF16)]
#[case("tests/fixtures/v3-realdims", FloatDType::F32)]
#[case(V3, FloatDType::F32)]
#[case(V4, FloatDType::F32)]
fn model_logits_do_not_depend_on_the_batch(#[case] name: &str, #[case] dtype: FloatDType) {
    for_each_device(|device| {
        let is_small = name.ends_with("v3-tiny") || name.ends_with("v4-tiny");
        if !is_slow(device) || (is_small && dtype == FloatDType::F32) {
            logits_do_not_depend_on_the_batch(name, dtype, device);
        } else {
            skip(device, "two models are enough where that takes long");
        }
    });
}

fn logits_do_not_depend_on_the_batch(name: &str, dtype: FloatDType, device: &Device) {
    let model = DeepseekModel::load(&folder(name), device, dtype, &mut |_| {}).expect("it loads");
    let ids = Stored::read(name).input_ids;
    let prompt = &ids[..ids.len().min(45)];
    let run = |invariant: bool, others: usize, chunks: &[usize]| {
        let size = CacheSize { num_pages: 8 * (others + 1), page_size: 16, max_requests: 64, max_tokens: 64 };
        let mut cache = model.new_cache(size).expect("a small cache");
        let own = cache.admit().expect("room");
        let mut rng = ChaCha8Rng::seed_from_u64(others as u64);
        let (mut logits, mut done) = (Vec::new(), 0);
        for &chunk in chunks {
            let mut batch = vec![cache.append(own, &prompt[done..done + chunk]).expect("room")];
            done += chunk;
            // Others come and go with every step, before and behind.
            let mut guests = Vec::new();
            for _ in 0..others {
                let guest = cache.admit().expect("room");
                let len = rng.random_range(1..12);
                let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(3..200)).collect();
                let place = if rng.random_bool(0.5) { 0 } else { batch.len() };
                batch.insert(place, cache.append(guest, &tokens).expect("room"));
                guests.push(guest);
            }
            let determinism = if invariant { Determinism::BatchInvariant } else { Determinism::Fast };
            determinism.check(device).expect("it can");
            let all = model.forward(&batch, &mut cache, determinism, &mut |_, _| {}).expect("a forward pass");
            let before: usize =
                batch.iter().take_while(|chunk| chunk.request != own).map(|chunk| chunk.tokens.len()).sum();
            let rows = all.narrow(0, before, chunk).cast(FloatDType::F32);
            logits.extend(rows.try_into_vec_as::<f32>().expect("reads back").into_iter().map(f32::to_bits));
            for guest in guests {
                cache.free(guest).expect("it lives");
            }
        }
        logits
    };
    let alone = run(true, 0, &[prompt.len()]);
    let halves = [prompt.len() / 2, prompt.len() - prompt.len() / 2];
    let mut companies = vec![(6, halves.to_vec()), (63, vec![prompt.len() - 3, 1, 1, 1])];
    if !is_slow(device) {
        companies.extend([(0, vec![1; prompt.len()]), (6, vec![prompt.len()]), (63, vec![prompt.len()])]);
    }
    for (others, chunks) in &companies {
        let same = run(true, *others, chunks) == alone;
        assert!(same, "{name}, {dtype:?} on {device:?}: {others} others, chunks {chunks:?}");
    }
    // Otherwise they do: the comparison above is one that can fail.
    let alone = run(false, 0, &[prompt.len()]);
    let differs = companies.iter().any(|(others, chunks)| run(false, *others, chunks) != alone);
    assert!(differs, "{name}, {dtype:?} on {device:?}");
}
