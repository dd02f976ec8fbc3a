//! Layers alone compute what those of a model do, and records bring all of them back.

use std::path::PathBuf;

use burn::config::Config;
use burn::module::Module;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use mla_ops::Determinism::Fast;
use mla_ops::batch::index_tensor;
use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig, RequestId, RowFormat};
use mla_ops::{ExpertScoring, Residual, Streams};
use rstest::rstest;

use super::*;
use crate::cache::{CacheSize, ModelCache};
use crate::models::deepseek_v4::V4Cache;
use crate::models::{Architecture, Hidden, Model, Observer};
use crate::step::Chunk;
use crate::{AttentionSpec, DeepseekV3Config, DeepseekV4Config, IndexerConfig, LayerSpec, MlpSpec, ModelError};

const F32: FloatDType = FloatDType::F32;
const SIZE: CacheSize = CacheSize { num_pages: 16, page_size: 8, max_requests: 2, max_tokens: 64 };
const FP8: Quantization = Quantization { block: [128, 128], fp4_experts: false };
const FP4: Quantization = Quantization { fp4_experts: true, ..FP8 };

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(format!("{}/../../tests/fixtures/{name}/config.json", env!("CARGO_MANIFEST_DIR")))
}

/// A model of this configuration, with random weights.
fn model(config: &dyn Architecture) -> Box<dyn Model> {
    let (device, quantization) = (Device::flex(), config.sizes().quantization);
    let loader = WeightLoader::random(1.into(), &device, F32, 0, None).with_quantization(quantization);
    let mut loader = loader.with_published(config.published());
    let model = config.load(&mut loader, &device);
    loader.finish().expect("weights");
    model
}

fn paged_cache(pools: Vec<PoolConfig>) -> PagedCache {
    let CacheSize { num_pages, page_size, max_requests, max_tokens } = SIZE;
    let config = CacheConfig { pools, num_pages, page_size, max_requests, max_tokens, dtype: F32 };
    PagedCache::new(config, &Device::flex()).expect("a small cache")
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    tensor.try_into_vec_as::<f32>().expect("f32").into_iter().map(f32::to_bits).collect()
}

/// Any numbers. Not random ones: the device's generator draws weights by a seed in other threads.
fn numbers<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let len = shape.iter().product::<usize>() as i64;
    Tensor::<1, Int>::arange(0..len, &Device::flex()).float().mul_scalar(0.7).sin().reshape(shape)
}

/// Embeddings, the states after layer 0, and those behind DeepSeek-V4's head, of so many new tokens of two requests.
fn observed(model: &dyn Model, cache: &mut ModelCache, requests: [RequestId; 2], new: [usize; 2]) -> [Tensor<2>; 3] {
    let mut seen = Vec::new();
    let mut look = |point, states: &Tensor<2>| match point {
        Hidden::Embedding | Hidden::Layer(0) | Hidden::HyperHead => seen.push(states.clone()),
        _ => {}
    };
    let chunks: Vec<Chunk> = requests
        .into_iter()
        .zip(new)
        .map(|(request, count)| cache.append(request, &vec![3 + count as u32; count]).expect("room"))
        .collect();
    model.forward(&chunks, cache, Fast, Some(Observer::Hidden(&mut look))).expect("hidden states");
    seen.resize(3, Tensor::empty([0, 0], &Device::flex()));
    seen.try_into().expect("three")
}

fn chunk(cache: &mut PagedCache, request: RequestId, count: usize) -> Chunk {
    let slots = cache.append(request, count).expect("room");
    Chunk { request, tokens: vec![0; count], slots }
}

/// Attention and experts, put together as a decoder layer, are that of the model, in prompts and in decode steps.
#[rstest]
fn a_decoder_layer(
    #[values("v2lite-tiny", "v3-tiny", "v32-tiny")] name: &str,
    #[values(None, Some(FP8))] quantization: Option<Quantization>,
) {
    let config = DeepseekV3Config::read(&fixture(name)).expect("a configuration");
    let config = DeepseekV3Config { num_hidden_layers: 1, first_k_dense_replace: 0, quantization, ..config };
    let model = model(&config);
    let mut models = model.new_cache(SIZE, F32.into()).expect("a cache");
    let (device, mla) = (Device::flex(), config.mla());
    let attention = mla.init(1, &device, F32).expect("a layer");
    let moe = config.moe().init(1, &device, F32).expect("a layer");
    let mut cache = paged_cache(mla.pools(RowFormat::Dense));
    let (in_model, alone) = ([(); 2].map(|()| models.admit().unwrap()), [(); 2].map(|()| cache.admit().unwrap()));
    let (ones, eps) = (Tensor::ones([config.hidden_size], &device), config.rms_norm_eps as f32);
    for new in [[20, 3], [1, 1], [1, 1]] {
        let [embedding, layer, _] = observed(&*model, &mut models, in_model, new);
        let chunks = [0, 1].map(|i| chunk(&mut cache, alone[i], new[i]));
        let step = attention.step(&chunks, &cache, Fast).expect("a step");
        let mut residual = Residual::new(embedding);
        let out = attention.forward(&mut residual.norm(&ones, eps).unwrap(), &step, &mut cache).expect("attention");
        residual.add(out).expect("of its shape");
        let sum = moe.forward(&mut residual.norm(&ones, eps).unwrap(), Fast).expect("experts");
        residual.add(sum).expect("of its shape");
        assert!(bits(residual.tensor()) == bits(layer), "{new:?}");
    }
}

/// What DeepSeek-V4's first hyper-connection reads, the entries that a compressor makes of it, and the head behind the streams.
#[rstest]
fn streams_and_entries(
    #[values(AttentionSpec::Csa { rate: 4 }, AttentionSpec::Hca { rate: 8 })] attention: AttentionSpec,
) {
    let config = DeepseekV4Config::read(&fixture("v4-tiny")).expect("a configuration");
    let config = DeepseekV4Config { layers: vec![LayerSpec { attention, mlp: MlpSpec::Moe }], ..config };
    let (model, device, streams) = (model(&config), Device::flex(), config.hyper_connection());
    let mut models = model.new_cache(SIZE, F32.into()).expect("a cache");
    let (connection, head) = (streams.init(1, &device).unwrap(), streams.init_head(1, &device).unwrap());
    let compressor = config.compressor(config.layer_compressors(0)[0]);
    let mut cache = paged_cache(vec![compressor.pool()]);
    let compressor = compressor.init(1, &device, F32).expect("a compressor");
    let mut state = compressor.new_state(&cache).expect("a state");
    let (in_model, alone) = ([(); 2].map(|()| models.admit().unwrap()), [(); 2].map(|()| cache.admit().unwrap()));
    for new in [[21, 7], [1, 1], [1, 1], [1, 1]] {
        let [embedding, layer, last] = observed(&*model, &mut models, in_model, new);
        let [tokens, width] = embedding.dims();
        let rows = embedding.unsqueeze_dim::<3>(1).repeat_dim(1, config.hc_mult);
        let (h, _) = connection.read(Streams::from(rows), Fast).expect("streams");
        let chunks = [0, 1].map(|i| chunk(&mut cache, alone[i], new[i]));
        let step = compressor.step(&chunks, &cache, Fast).expect("a step");
        compressor.forward(h, &step, &mut state, &mut cache).expect("entries");
        let pools =
            [models.get::<V4Cache>().expect("of the model").entries(), &cache].map(|cache| cache.pool(0).unwrap());
        let [expected, entries] = pools.map(|pool| bits(pool.dense()));
        assert!(entries == expected && entries.iter().any(|&entry| entry != 0), "{new:?}");
        let layer = Streams::from(layer.reshape([tokens, config.hc_mult, width]));
        assert!(bits(head.forward(layer, Fast).expect("streams")) == bits(last), "{new:?}");
    }
}

/// An indexer picks the entries with the best scores of those that a token may see, in any division into steps.
#[test]
fn an_indexer_picks_the_best_entries() {
    let (device, rope) = (Device::flex(), mla_ops::RopeConfig { rope_theta: 10_000.0, yarn: None });
    let keys = CompressorConfig::new(64, 16, 4, 8).with_overlap(true);
    let config = EntryIndexerConfig::new(keys, 48).with_index_n_heads(2).with_index_topk(3);
    let indexer = config.init(1, &device, F32).expect("an indexer");
    let mut cache = paged_cache(vec![config.pool()]);
    let (requests, mut state) = ([(); 2].map(|()| cache.admit().unwrap()), indexer.new_state(&cache).unwrap());
    let mut chosen = 0;
    for new in [[22, 9], [1, 1], [6, 3]] {
        let tokens = new[0] + new[1];
        let (x, q_latent) = (numbers([tokens, 64]), numbers([tokens, 48]).add_scalar(0.3));
        let chunks = [0, 1].map(|i| chunk(&mut cache, requests[i], new[i]));
        let step = indexer.step(&chunks, &cache, Fast).expect("a step");
        indexer.write_keys(x.clone(), &step, &mut state, &mut cache).expect("keys");
        let slots = indexer.pick(q_latent.clone(), x.clone(), &step, &cache).expect("entries").reshape([tokens, 3]);
        let pool = cache.pool(0).unwrap().dense().reshape([-1, 16]);
        let places = [0, 1].map(|i| (0..new[i]).map(move |token| (i, token))).into_iter().flatten();
        for (row, (i, token)) in places.enumerate() {
            let position = cache.len(requests[i]).unwrap() - new[i] + token;
            let of_row = |rows: &Tensor<2>| rows.clone().narrow(0, row, 1);
            let [cos, sin] = rope.tables(8, &[position], &device).unwrap();
            let q = indexer.wq_b.forward(of_row(&q_latent), Fast).unwrap().reshape([1, 2, 16]);
            let args = mla_ops::NormRopeArgs { x: q, weight: None, cos, sin };
            let q = mla_ops::norm_rope(args, &mla_ops::NormRopeOptions::default()).unwrap().reshape([2, 16]);
            let weights = indexer.weights_proj.forward(of_row(&x), Fast).unwrap().reshape([2, 1]);
            let scores = |slots: &[i32]| -> Vec<f32> {
                let keys = pool.clone().select(0, index_tensor(slots.to_vec(), &device)).transpose();
                let scores = q.clone().matmul(keys).clamp_min(0.0).mul(weights.clone()).sum_dim(0);
                scores.into_data().try_into_vec_as::<f32>().unwrap()
            };
            // A page of 8 tokens has two entries.
            let (visible, pages) = ((position + 1) / 4, cache.pages(requests[i]).unwrap());
            let all: Vec<i32> = (0..visible).map(|entry| (pages[entry / 2] * 2) as i32 + (entry % 2) as i32).collect();
            let picked = slots.clone().narrow(0, row, 1).into_data().try_into_vec_as::<i32>().unwrap();
            let picked: Vec<i32> = picked.into_iter().filter(|&slot| slot >= 0).collect();
            assert!(
                picked.len() == visible.min(3) && picked.iter().all(|slot| all.contains(slot)),
                "{position}: {picked:?}"
            );
            if visible > 3 {
                let mut best = scores(&all);
                best.sort_by(|a, b| b.total_cmp(a));
                let least = scores(&picked).into_iter().fold(f32::INFINITY, f32::min);
                assert!(least >= best[2] - 1e-5, "{position}: {least} of {best:?}");
                chosen += usize::from(least > best[3] + 1e-3);
            }
        }
    }
    assert!(chosen > 5, "{chosen} tokens had something to choose");
}

/// The bits of what a layer computes, which its record brings into a layer of another seed.
fn round_trip<M: Module>(init: impl Fn(u64) -> Result<M>, output: impl Fn(&M) -> Vec<u32>) {
    let [saved, other] = [1, 2].map(|seed| init(seed).expect("a layer"));
    let expected = output(&saved);
    assert!(output(&other) != expected);
    let bytes = saved.into_record().into_bytes().expect("a record");
    let record = ModuleRecord::from_bytes(bytes).expect("the same record");
    let loaded = other.try_load_record(record).expect("a record of such a layer");
    assert!(output(&loaded) == expected);
    assert!(output(&loaded.valid().fork(&Device::flex())) == expected);
}

/// Of keys in FP8 an indexer picks what it would of dense keys that are the same numbers, which are not those that were written.
#[test]
fn an_indexer_picks_by_the_keys_that_are_kept() {
    let device = Device::flex();
    let indexer = mla(None).init_indexer(1, &device, F32).expect("a layer").expect("an indexer").with_pool(0);
    let (x, q_latent) = (numbers([12, 64]), numbers([12, 48]));
    let [(mut dense, step), (fp8, _)] = [RowFormat::Dense, RowFormat::Fp8IndexKeys].map(|format| {
        let mut cache = paged_cache(vec![PoolConfig { format, ..PoolConfig::per_token(16) }]);
        let request = cache.admit().unwrap();
        let step = indexer.step(&[chunk(&mut cache, request, 12)], &cache, Fast).expect("a step");
        indexer.write_keys(x.clone(), &step, &mut cache).expect("keys");
        (cache, step)
    });
    let pick = |cache: &PagedCache| indexer.pick(q_latent.clone(), x.clone(), &step, cache).expect("keys").into_data();
    let kept = fp8.pool(0).unwrap().dense();
    let written = bits(dense.take_pool(0).unwrap().dense());
    assert_ne!(bits(kept.clone()), written);
    dense.put_pool(0, kept.into()).unwrap();
    assert_eq!(pick(&fp8), pick(&dense));
}

fn mla(quantization: Option<Quantization>) -> MlaConfig {
    let indexer = IndexerConfig { heads: 2, head_dim: 16, topk: 4 };
    let config = MlaConfig::new(64, 4, 32, 16, 8, 16).with_q_lora_rank(Some(48)).with_indexer(Some(indexer));
    config.with_quantization(quantization)
}

/// Attention to all keys in both forms, and to those that the indexer picks.
#[rstest]
fn records_of_attention(#[values(None, Some(FP8))] quantization: Option<Quantization>) {
    let (config, x) = (mla(quantization), numbers([8, 64]));
    let output = |layer: &MultiHeadLatentAttention| {
        let mut cache = paged_cache(config.pools(RowFormat::Dense));
        let request = cache.admit().unwrap();
        let out = [0..3, 3..4, 4..8].map(|rows| {
            let step = layer.step(&[chunk(&mut cache, request, rows.len())], &cache, Fast).expect("a step");
            bits(layer.forward(x.clone().slice([rows]), &step, &mut cache).expect("attention"))
        });
        out.concat()
    };
    let from_json = MlaConfig::load_binary(config.to_string().as_bytes()).expect("JSON");
    assert_eq!(from_json, config);
    round_trip(|seed| from_json.init(seed, &Device::flex(), F32), output);
}

#[rstest]
#[case(MoeConfig::new(64, 32, 8, 2).with_n_group(4).with_topk_group(2))]
#[case(MoeConfig::new(64, 32, 8, 2).with_scoring(ExpertScoring::Softmax).with_quantization(Some(FP8)))]
#[case(MoeConfig::new(64, 32, 8, 2).with_scoring(ExpertScoring::SqrtSoftplus).with_quantization(Some(FP4)))]
fn records_of_experts(#[case] config: MoeConfig) {
    let x = numbers([5, 64]);
    let output = |moe: &Moe| bits(moe.forward(x.clone(), Fast).expect("experts").materialise());
    round_trip(|seed| config.init(seed, &Device::flex(), F32), output);
}

/// The table decides, and goes into the record.
#[test]
fn experts_by_token_id() {
    let config = MoeConfig::new(64, 32, 8, 2).with_scoring(ExpertScoring::SqrtSoftplus);
    let init = |seed| config.init_hash(100, seed, &Device::flex(), F32);
    let (x, ids) = (numbers([1, 64]).repeat_dim(0, 5), index_tensor(vec![3, 98, 3, 99, 100], &Device::flex()));
    let output = |moe: &Moe| moe.forward_ids(x.clone(), &ids, Fast).expect("experts").materialise();
    round_trip(init, |moe| bits(output(moe)));
    let moe = init(1).expect("a layer");
    let rows: Vec<_> = output(&moe).chunk(5, 0).into_iter().map(bits).collect();
    assert!(rows[0] == rows[2] && rows[0] != rows[1] && rows[1] != rows[3]);
    let shared = moe.shared_experts.forward(x.clone().narrow(0, 4, 1), Fast).expect("shared experts");
    assert!((shared - output(&moe).narrow(0, 4, 1)).abs().max().into_scalar::<f32>() < 1e-6, "an id beyond the table");
    assert!(matches!(moe.forward(x.clone(), Fast), Err(ModelError::Request { argument: "x", .. })));
    assert!(moe.forward_ids(x, &ids.narrow(0, 0, 4), Fast).is_err(), "an id is missing");
}

#[test]
fn records_of_streams_and_compressors() {
    let (config, streams) = (HyperConnectionConfig::new(64), numbers([3, 4, 64]));
    let output = |of: &HyperConnection| bits(of.read(streams.clone().into(), Fast).expect("streams").0);
    round_trip(|seed| config.init(seed, &Device::flex()), output);

    let (config, x) = (CompressorConfig::new(64, 32, 4, 8).with_overlap(true), numbers([9, 64]));
    let output = |of: &Compressor| {
        let mut cache = paged_cache(vec![config.pool()]);
        let (request, mut state) = (cache.admit().unwrap(), of.new_state(&cache).unwrap());
        let step = of.step(&[chunk(&mut cache, request, 9)], &cache, Fast).expect("a step");
        bits(of.forward(x.clone(), &step, &mut state, &mut cache).expect("entries"))
    };
    round_trip(|seed| config.init(seed, &Device::flex(), F32), output);

    let config = EntryIndexerConfig::new(config, 48).with_index_n_heads(2).with_index_topk(1);
    let output = |of: &EntryIndexer| bits(of.wq_b.forward(numbers([9, 48]), Fast).expect("queries"));
    round_trip(|seed| config.init(seed, &Device::flex(), F32), output);
}

#[test]
fn records_of_other_layers_are_refused() {
    let init = |config: MlaConfig| config.init(1, &Device::flex(), F32).expect("a layer");
    let (wide, plain) = (MlaConfig { kv_lora_rank: 40, ..mla(None) }, MlaConfig { indexer: None, ..mla(None) });
    for (record, layer) in
        [(mla(None), wide), (mla(None), plain), (mla(None), mla(Some(FP8))), (mla(Some(FP8)), mla(None))]
    {
        let refused = init(layer).try_load_record(init(record).into_record());
        assert!(matches!(refused, Err(RecordError::Validation(_))));
    }
}

#[test]
fn contradicting_configs_name_the_field() {
    let (device, huge) = (Device::flex(), i32::MAX as usize);
    let attention = |config: MlaConfig| config.init(1, &device, F32).map(drop);
    let experts = |config: MoeConfig| config.init(1, &device, F32).map(drop);
    let compressor = |config: CompressorConfig| config.init(1, &device, F32).map(drop);
    let indexer = |config: EntryIndexerConfig| config.init(1, &device, F32).map(drop);
    let moe = || MoeConfig::new(8, 8, 4, 1);
    for (name, result) in [
        ("kv_lora_rank", attention(MlaConfig { kv_lora_rank: 0, ..mla(None) })),
        ("qk_rope_head_dim", attention(MlaConfig { qk_rope_head_dim: 7, ..mla(None) })),
        (
            "num_attention_heads",
            attention(MlaConfig { num_attention_heads: huge, kv_lora_rank: huge / 2, ..mla(None) }),
        ),
        ("q_lora_rank", mla(None).with_q_lora_rank(None).init_indexer(1, &device, F32).map(drop)),
        ("n_group", experts(moe().with_n_group(3))),
        ("vocab_size", moe().init_hash(0, 1, &device, F32).map(drop)),
        ("swiglu_limit", experts(moe().with_swiglu_limit(Some(f64::NAN)))),
        ("hc_mult", HyperConnectionConfig::new(8).with_hc_mult(9).init(1, &device).map(drop)),
        ("compress_rate", compressor(CompressorConfig::new(8, 8, 3, 2))),
        ("qk_rope_head_dim", compressor(CompressorConfig::new(8, 8, 4, 10))),
        ("compress_rate", indexer(EntryIndexerConfig::new(CompressorConfig::new(8, 8, 3, 2), 8))),
        ("index_topk", indexer(EntryIndexerConfig::new(CompressorConfig::new(8, 8, 4, 2), 8).with_index_topk(0))),
    ] {
        assert!(matches!(&result, Err(ModelError::Config { field, .. }) if field == name), "{name}: {result:?}");
    }
}

/// Steps over tokens that nobody appended, steps of another kind of layer, and caches without the pool.
#[test]
fn misuse_is_an_error() {
    let (device, config) = (Device::flex(), mla(None));
    let layer = config.init(1, &device, F32).expect("a layer");
    let mut cache = paged_cache(config.pools(RowFormat::Dense));
    let request = cache.admit().unwrap();
    let chunk = chunk(&mut cache, request, 6);
    let tokens = |count| Chunk { tokens: vec![0; count], ..chunk.clone() };
    for chunks in [vec![], vec![tokens(0)], vec![tokens(7)], vec![tokens(5)]] {
        let refused = layer.step(&chunks, &cache, Fast);
        assert!(matches!(refused, Err(ModelError::Request { argument: "chunks", .. })), "{refused:?}");
    }
    let step = layer.step(&[tokens(6)], &cache, Fast).expect("a step");
    let plain = MlaConfig { indexer: None, ..config.clone() }.init(1, &device, F32).expect("a layer");
    assert!(plain.forward(numbers([6, 64]), &step, &mut cache).is_err(), "an indexer has to pick");
    assert!(layer.forward(numbers([5, 64]), &step, &mut cache).is_err(), "a row is missing");
    let indexer = config.init_indexer(1, &device, F32).expect("a layer").expect("an indexer");
    let [few, all] = [numbers([5, 64]), numbers([6, 64])];
    assert!(
        indexer.write_keys(few.clone(), &step, &mut cache).is_err() && indexer.pick(few, all, &step, &cache).is_err()
    );
    let compressor = CompressorConfig::new(64, 32, 4, 8).init(1, &device, F32).expect("a compressor");
    assert!(compressor.step(&[tokens(6)], &cache, Fast).is_err(), "no pool of entries");
    let elsewhere = layer.clone().with_pools(2, 3).forward(numbers([6, 64]), &step, &mut cache);
    assert!(elsewhere.is_err() && layer.forward(numbers([6, 64]), &step, &mut cache).is_ok());
}

/// Slots of other tokens, a request in two chunks, and one without tokens.
#[test]
fn chunks_that_the_cache_contradicts_are_refused() {
    let (device, config) = (Device::flex(), mla(None));
    let layer = config.init(1, &device, F32).expect("a layer");
    let indexer = config.init_indexer(1, &device, F32).expect("a layer").expect("an indexer");
    let entries = CompressorConfig::new(64, 32, 4, 8);
    let compressor = entries.init(1, &device, F32).expect("a compressor");
    let (mut cache, mut pages) = (paged_cache(config.pools(RowFormat::Dense)), paged_cache(vec![entries.pool()]));
    let (request, empty, of_pages) = (cache.admit().unwrap(), cache.admit().unwrap(), pages.admit().unwrap());
    chunk(&mut cache, request, 7);
    let (last, of_pages) = (chunk(&mut cache, request, 2), chunk(&mut pages, of_pages, 2));
    let nothing = Chunk { request: empty, ..last.clone() };
    let again = "`chunks` is request 0 again in chunks[1], expected one chunk of each request";
    for (chunks, expected) in [
        (
            vec![Chunk { slots: vec![7, 9], ..last.clone() }],
            "`chunks` is 9 in chunks[0].slots[1], expected 8, the slot",
        ),
        (vec![Chunk { slots: vec![7], ..last.clone() }], "`chunks` is 1 slots in chunks[0].slots, of request 0"),
        (vec![last.clone(), last], again),
        (vec![nothing], "expected some that `PagedCache::append` has made room for: it has none"),
    ] {
        for step in [layer.step(&chunks, &cache, Fast), indexer.step(&chunks, &cache, Fast)] {
            let refused = step.expect_err(expected).to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }
    let refused = compressor.step(&[of_pages.clone(), of_pages], &pages, Fast).expect_err(again);
    assert_eq!(refused.to_string(), again);
}
