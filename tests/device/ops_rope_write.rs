//! `rope_write` against the operations that it joins.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::{
    Determinism, MlaError, NormRopeArgs, NormRopeOptions, RopeQuery, RopeWriteArgs, RopeWritten, StackedWeight,
    WriteLatentArgs, linear_by_head, norm_rope, rope_write, write_latent,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{bits, floats, ints, random, restrided, rng};
use crate::refusals::Kind::{DType as WrongType, Shape, Value};
use crate::refusals::{assert_refused, zeros};

/// H, d, D and the pairs that RoPE is applied to.
type Sizes = [usize; 4];

/// For as many tokens as slots, and a cache of 24 tokens.
pub fn args([heads, width, cache_width, pairs]: Sizes, slots: &[i32], dtype: DType, device: &Device) -> RopeWriteArgs {
    let (tokens, mut rng) = (slots.len(), rng(51));
    let mut draw = |len, dtype| random(&mut rng, len, dtype);
    let (angles, f32) = (draw(tokens * pairs, DType::F32), DType::F32);
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = angles.iter().map(|angle| f(9.0 * angle)).collect();
        floats(&values, [tokens, pairs], f32, device)
    };
    let normed = cache_width - 2 * pairs;
    RopeWriteArgs {
        query: RopeQuery::Heads(floats(&draw(tokens * heads * width, dtype), [tokens, heads, width], dtype, device)),
        latent: floats(&draw(tokens * cache_width, dtype), [tokens, cache_width], dtype, device),
        norm_weight: floats(&draw(normed, f32), [normed], f32, device),
        norm_eps: 1e-6,
        q_norm_eps: None,
        index_q: None,
        cos: table(f64::cos),
        sin: table(f64::sin),
        // Some devices pad the rows of a tensor that is made with this shape.
        cache: floats(&draw(24 * cache_width, dtype), [24 * cache_width], dtype, device)
            .reshape([6, 4, cache_width])
            .into(),
        slots: ints(slots, [tokens], device),
        compressors: vec![],
    }
}

fn heads_of(query: RopeQuery) -> Tensor<3> {
    match query {
        RopeQuery::Heads(q) | RopeQuery::Absorbed { q, .. } => q,
    }
}

fn absorbed(args: RopeWriteArgs, weight: StackedWeight) -> RopeWriteArgs {
    let query = RopeQuery::Absorbed { q: heads_of(args.query), weight, determinism: Determinism::Fast };
    RopeWriteArgs { query, ..args }
}

/// DeepSeek-V2-Lite's and V3's sizes, odd ones, RoPE of all channels or none, no heads; slots that are skipped; views.
#[rstest]
fn ops_rope_write(
    #[values([16, 192, 576, 32], [3, 7, 9, 2], [5, 4, 70, 2], [1, 8, 130, 0], [2, 6, 4, 2], [0, 8, 16, 2])]
    sizes: Sizes,
    #[values(&[7], &[], &[3, -1, 23, 0, 11])] slots: &[i32],
    #[values(false, true)] views: bool,
) {
    for_each_dtype(|device, dtype| {
        let new = || args(sizes, slots, dtype, device);
        let RopeWriteArgs { query, latent, norm_weight, norm_eps, cos, sin, cache, slots, .. } = new();
        let q = heads_of(query);
        let apply = |x: Tensor<3>, weight: Option<Tensor<1>>| {
            let norm_eps = weight.is_some().then_some(norm_eps);
            let options = NormRopeOptions { norm_eps, norm_whole_head: false, inverse: false };
            norm_rope(NormRopeArgs { x, weight, cos: cos.clone(), sin: sin.clone() }, &options).expect("legal")
        };
        let q = apply(q, None);
        let latent = apply(latent.unsqueeze_dim(1), Some(norm_weight)).squeeze_dim::<2>(1);
        let write = WriteLatentArgs { cache, slots, latent: latent.clone(), rope: None };
        let cache = write_latent(write).expect("legal");

        let mut args = new();
        if views && latent.dims()[0] > 0 && q.dims()[1] > 0 {
            args.query = RopeQuery::Heads(restrided(heads_of(args.query), 0, 1));
            args.latent = restrided(args.latent, 0, 1);
        }
        let written = rope_write(args).expect("legal");
        let what = format!("{sizes:?} {dtype:?} on {device:?}");
        let written_latent = written.latent.expect("of queries that are not absorbed");
        assert_eq!((written.q.dims(), written_latent.dims()), (q.dims(), latent.dims()), "{what}");
        for (actual, expected) in [
            (bits(&written.q), bits(&q)),
            (bits(&written_latent), bits(&latent)),
            (bits(&written.cache.dense()), bits(&cache.dense())),
        ] {
            assert!(actual == expected, "{what}");
        }
    });
}

/// DeepSeek-V4's queries, keys and index queries: heads are normed, and whole keys.
#[rstest]
fn ops_rope_write_normed(
    #[values(([64, 512, 512, 32], Some([64, 128])), ([3, 24, 40, 4], Some([5, 8])), ([2, 7, 9, 2], Some([1, 5])), ([5, 8, 24, 0], None),
             ([0, 8, 16, 2], Some([2, 4])), ([2, 8, 16, 2], Some([0, 8])))]
    (sizes, index): (Sizes, Option<[usize; 2]>),
    #[values(&[7], &[], &[3, -1, 23, 0, 11])] slots: &[i32],
) {
    for_each_dtype(|device, dtype| {
        let new = || {
            let ([_, _, cache_width, _], tokens, mut rng) = (sizes, slots.len(), rng(53));
            let norm_weight = floats(&random(&mut rng, cache_width, DType::F32), [cache_width], DType::F32, device);
            let index_q = index.map(|[heads, width]| {
                floats(&random(&mut rng, tokens * heads * width, dtype), [tokens, heads, width], dtype, device)
            });
            let args = args(sizes, slots, dtype, device);
            RopeWriteArgs { norm_weight, q_norm_eps: Some(1e-5), index_q, ..args }
        };
        let RopeWriteArgs { query, latent, norm_weight, norm_eps, q_norm_eps, index_q, cos, sin, cache, slots, .. } =
            new();
        let apply = |x: Tensor<3>, weight: Option<Tensor<1>>, norm_eps| {
            let options = NormRopeOptions { norm_eps, norm_whole_head: true, inverse: false };
            norm_rope(NormRopeArgs { x, weight, cos: cos.clone(), sin: sin.clone() }, &options).expect("legal")
        };
        let q = apply(heads_of(query), None, q_norm_eps);
        let latent = apply(latent.unsqueeze_dim(1), Some(norm_weight), Some(norm_eps)).squeeze_dim::<2>(1);
        let index_q = index_q.map(|q| apply(q, None, None));
        let write = WriteLatentArgs { cache, slots, latent: latent.clone(), rope: None };
        let cache = write_latent(write).expect("legal");

        let written = rope_write(new()).expect("legal");
        let what = format!("{sizes:?}, {index:?} {dtype:?} on {device:?}");
        let written_latent = written.latent.expect("of queries that are not absorbed");
        assert_eq!((written.q.dims(), written_latent.dims()), (q.dims(), latent.dims()), "{what}");
        for (actual, expected) in [
            (bits(&written.q), bits(&q)),
            (bits(&written_latent), bits(&latent)),
            (bits(&written.cache.dense()), bits(&cache.dense())),
        ] {
            assert!(actual == expected, "{what}");
        }
        assert_eq!(written.index_q.as_ref().map(Tensor::dims), index_q.as_ref().map(Tensor::dims), "{what}");
        assert!(written.index_q.map(|q| bits(&q)) == index_q.map(|q| bits(&q)), "{what}");
    });
}

/// As `rope_write` and then `linear_by_head`: by kernels with matrix instructions and without them, of a few tokens and many.
#[rstest]
fn ops_rope_write_absorbed(
    #[values(([16, 192, 576, 32], 512), ([3, 40, 48, 4], 5), ([5, 7, 70, 2], 6), ([2, 8, 130, 0], 8))] (sizes, rank): (
        Sizes,
        usize,
    ),
    #[values(&[7], &[3, -1, 23, 0, 11])] slots: &[i32],
) {
    let many: Vec<i32> = (0..70).map(|token| if token < 24 { token } else { -1 }).collect();
    for_each_dtype(|device, dtype| {
        for slots in [slots, &many] {
            let new = || args(sizes, slots, dtype, device);
            let [heads, width, _, pairs] = sizes;
            let still = width - 2 * pairs;
            let weight = random(&mut rng(52), heads * rank * still, dtype);
            let weight = floats(&weight, [heads, rank, still], dtype, device).into();
            let RopeWritten { q, cache, .. } = rope_write(new()).expect("legal");
            let expected = [bits(&linear_by_head(q, &weight, Determinism::Fast).expect("legal")), bits(&cache.dense())];
            let RopeWritten { q, cache, .. } = rope_write(absorbed(new(), weight)).expect("legal");
            assert_eq!(q.dims(), [slots.len(), heads, rank + 2 * pairs]);
            assert!([bits(&q), bits(&cache.dense())] == expected, "{sizes:?} {dtype:?} on {device:?}");
        }
    });
}

#[test]
fn ops_errors_rope_write() {
    for_each_device(|device| {
        let new = || args([3, 8, 10, 2], &[2, 9], DType::F32, device);
        let call = |args: RopeWriteArgs| -> Result<RopeWritten, MlaError> {
            let before = bits(&args.cache.dense());
            rope_write(args).map_err(|refused| {
                assert!(bits(&refused.cache.dense()) == before, "{refused}: the cache has changed");
                refused.error
            })
        };
        call(new()).expect("legal before it is changed");
        let refuses = |kind, argument, change: fn(&mut RopeWriteArgs, &Device)| {
            let mut args = new();
            change(&mut args, device);
            assert_refused(call(args), kind, argument);
        };
        refuses(Shape, "q", |it, device| it.query = RopeQuery::Heads(zeros([3, 3, 8], device)));
        refuses(WrongType, "q", |it, _| {
            it.query = RopeQuery::Heads(heads_of(it.query.clone()).cast(FloatDType::F16));
        });
        refuses(Shape, "latent", |it, device| it.latent = zeros([2, 9], device));
        refuses(Shape, "norm_weight", |it, device| it.norm_weight = zeros([8], device));
        refuses(Value, "norm_eps", |it, _| it.norm_eps = -1.0);
        refuses(Value, "q_norm_eps", |it, _| it.q_norm_eps = Some(f32::NAN));
        refuses(Shape, "index_q", |it, device| it.index_q = Some(zeros([3, 2, 8], device)));
        refuses(Shape, "index_q", |it, device| it.index_q = Some(zeros([2, 2, 3], device)));
        refuses(WrongType, "index_q", |it, device| {
            it.index_q = Some(zeros::<3>([2, 2, 8], device).cast(FloatDType::F16));
        });
        refuses(Shape, "cos", |it, device| it.cos = zeros([1, 2], device));
        refuses(Value, "cos", |it, device| it.cos = zeros([2, 5], device));
        refuses(Value, "sin", |it, device| it.sin = zeros([2, 1], device));
        let absorb = |weight: Tensor<3>| rope_write(absorbed(new(), weight.into())).map_err(MlaError::from);
        absorb(zeros([3, 5, 4], device)).expect("legal before it is changed");
        assert_refused(absorb(zeros([3, 5, 8], device)), Shape, "weight");
        assert_refused(absorb(zeros::<3>([3, 5, 4], device).cast(FloatDType::F16)), WrongType, "weight");
        let with = |change: fn(&mut RopeWriteArgs, &Device)| {
            let mut args = absorbed(new(), zeros([3, 5, 4], device).into());
            change(&mut args, device);
            rope_write(args).map_err(MlaError::from)
        };
        assert_refused(with(|it, _| it.q_norm_eps = Some(1e-6)), Value, "q_norm_eps");
        assert_refused(with(|it, device| it.index_q = Some(zeros([2, 2, 8], device))), Value, "index_q");
        let (shared, args) = (new(), new());
        let other = shared.cache.clone();
        let refused = rope_write(RopeWriteArgs { cache: shared.cache, ..args }).expect_err("another handle is alive");
        assert!(matches!(refused.error, MlaError::CacheShared { argument: "cache", .. }), "{refused}");
        drop(other);
    });
}
