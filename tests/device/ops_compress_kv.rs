//! `compress_kv` against plain loops in f64, with sequences in any chunks.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use mla_ops::cache::{Pool, RowFormat, new_pool};
use mla_ops::{
    CompressKvArgs, CompressKvError, CompressedKv, EntryCache, RopeWriteArgs, WriteLatentArgs, compress_kv, rope_write,
    write_latent,
};
use proptest::prelude::{ProptestConfig, prop, proptest};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_cuda, is_wgpu};
use crate::ops_compress_kv_fixture::{Case, Chunk, EntryBits};
use crate::ops_fixture::{bits, floats, ints, random, restrided, rng, values};
use crate::ops_fusion::buffer;
use crate::ops_paging::address;
use crate::ops_rope_write::args as rope_write_args;

fn lens(window: usize) -> Vec<usize> {
    vec![5 * window + 1, 2 * window - 1, window, 0, 3 * window + window / 2, 4 * window]
}

#[rstest]
fn ops_compress_kv(
    #[values(false, true)] overlap: bool,
    #[values(1, 2, 4, 16)] window: usize,
    #[values([1, 0], [6, 2], [7, 3], [40, 20], [130, 5], [512, 32])] widths: [usize; 2],
) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(overlap, window, widths, &lens(window));
        let whole = case.check(&case.calls(|left| left), device, dtype);
        let divided = case.check(&case.random_calls(83), device, dtype);
        assert!(whole == divided, "the bits of an entry depend on the calls, {dtype:?} on {device:?}");
    });
}

#[rstest]
fn ops_compress_kv_token_by_token(#[values(false, true)] overlap: bool, #[values(1, 3, 4)] window: usize) {
    for_each_device(|device| {
        let case = Case::new(overlap, window, [40, 4], &lens(window));
        case.check(&case.calls(|_| 1), device, DType::F32);
    });
}

/// As in DeepSeek-V4's long windows, and channels that a cube has in several rounds.
#[rstest]
#[case(128, [512, 32])]
#[case(130, [24, 12])]
#[case(3, [1031, 8])]
#[case(3, [1100, 8])]
fn ops_compress_kv_large(#[case] window: usize, #[case] widths: [usize; 2], #[values(false, true)] overlap: bool) {
    for_each_device(|device| {
        let case = Case::new(overlap, window, widths, &[3 * window + 5, window + 1]);
        case.check(&case.random_calls(84), device, DType::F32);
    });
}

/// Only as many entries as there is room for.
#[rstest]
fn ops_compress_kv_of_fewer_entries(#[values(false, true)] overlap: bool) {
    for_each_device(|device| {
        let case = Case::new(overlap, 2, [6, 1], &[11, 3]);
        let chunks = [(0, 11), (1, 3)].map(|(sequence, len)| Chunk { sequence, start: 0, len });
        let state = vec![f64::NAN; case.state_shape().iter().product()];
        for entries in 0..5 {
            let args = case.args(&chunks, entries, &state, device).0;
            let actual = compress_kv(args, &case.options(DType::F32)).expect("legal").entries;
            assert_eq!(actual.dims(), [2, entries, 6]);
            case.assert_entries(&format!("{entries} entries on {device:?}"), &chunks, actual, &mut EntryBits::new());
        }
    });
}

#[test]
fn ops_compress_kv_strided() {
    for_each_device(|device| {
        let case = Case::new(true, 4, [40, 8], &[17, 9]);
        let chunks = [(0, 17), (1, 9)].map(|(sequence, len)| Chunk { sequence, start: 0, len });
        let state = vec![f64::NAN; case.state_shape().iter().product()];
        let (args, after) = case.args(&chunks, 4, &state, device);
        let strided = CompressKvArgs {
            kv_gates: restrided(args.kv_gates, 0, 1),
            position_bias: restrided(args.position_bias, 0, 1),
            cos: restrided(args.cos, 1, 2),
            sin: restrided(args.sin, 0, 2),
            ..args
        };
        let CompressedKv { entries: actual, state: written, .. } =
            compress_kv(strided, &case.options(DType::F32)).expect("legal");
        case.assert_entries(&format!("strided on {device:?}"), &chunks, actual, &mut EntryBits::new());
        let expected = floats(&after, case.state_shape(), DType::F32, &Device::flex());
        assert!(bits(&written) == bits(&expected), "{device:?}");
    });
}

/// No sequences, no new tokens, no blocks of the state.
#[test]
fn ops_compress_kv_of_nothing() {
    for_each_device(|device| {
        for (lens, entries) in [(&[][..], 0), (&[], 2), (&[0, 0], 0), (&[0, 0], 2)] {
            let case = Case::new(true, 2, [6, 1], lens);
            let chunks: Vec<Chunk> = (0..lens.len()).map(|sequence| Chunk { sequence, start: 0, len: 0 }).collect();
            let state = vec![f64::NAN; case.state_shape().iter().product()];
            let (mut args, _) = case.args(&chunks, entries, &state, device);
            if lens.is_empty() {
                args.state = Tensor::empty([0, case.carried(), case.row()], (device, DType::F32));
            }
            let shape = args.state.dims();
            let CompressedKv { entries: actual, state, .. } =
                compress_kv(args, &case.options(DType::F32)).expect("legal");
            assert_eq!((actual.dims(), state.dims()), ([lens.len(), entries, 6], shape), "{device:?}");
            assert!(values(actual).iter().all(|&value| value == 0.0), "{device:?}");
        }
    });
}

/// The state is written where it is; while it has another handle, not at all.
#[test]
fn ops_compress_kv_in_place() {
    for_each_device(|device| {
        let case = Case::new(true, 2, [6, 1], &[9]);
        let options = case.options(DType::F32);
        let whole = [Chunk { sequence: 0, start: 0, len: 9 }];
        let args = case.args(&whole, 4, &vec![0.0; case.state_shape().iter().product()], device).0;
        let other = args.state.clone();
        let before = bits(&other);
        let refused: Box<CompressKvError> = compress_kv(args.clone(), &options).expect_err("another handle is alive");
        assert!(refused.to_string().contains("`state` is shared"), "{refused}");
        assert!(bits(&refused.state) == before && bits(&other) == before);
        drop((other, refused));
        let mut state = args.state;
        let is_gpu = is_wgpu(device) || is_cuda(device);
        let place = |state: &Tensor<3>| if is_gpu { Err(buffer(state)) } else { Ok(address(&state.clone().into())) };
        let first = place(&state);
        let mut cache = new_pool([2, 4, 6], FloatDType::F32, device).expect("small");
        let first_cached = place(&cache);
        let step = [Chunk { sequence: 0, start: 7, len: 1 }];
        for (chunks, entries) in [(&whole, 4), (&step, 1), (&step, 0), (&step, 3), (&whole, 4)] {
            let args = case.args(chunks, entries, &vec![0.0; before.len() / 4], device).0;
            let slots: Vec<i32> = (0..entries as i32).collect();
            let to = EntryCache { cache: cache.into(), slots: ints(&slots, [slots.len()], device) };
            let compressed = compress_kv(CompressKvArgs { state, cache: Some(to), ..args }, &options);
            let CompressedKv { entries, state: written, cache: cached } = compressed.expect("the only handle");
            if chunks[0].len > 1 {
                case.assert_entries(&format!("in place on {device:?}"), &whole, entries, &mut EntryBits::new());
            }
            (state, cache) = (written, cached.expect("the one that it was given").dense());
            assert_eq!((place(&state), place(&cache)), (first, first_cached), "{device:?}");
        }
        assert!(bits(&state) != before);
    });
}

/// Keys and gates of the model's dtype are read as they are: bit for bit as in f32, in steps of one launch and of several.
#[rstest]
#[case(false, 4, [512, 32])]
#[case(true, 4, [512, 32])]
#[case(true, 2, [7, 3])]
fn ops_compress_kv_of_dtypes(#[case] overlap: bool, #[case] window: usize, #[case] widths: [usize; 2]) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(overlap, window, widths, &[3 * window, 2 * window + 1, 1]);
        let state = random(&mut rng(86), case.state_shape().iter().product(), DType::F32);
        // The last tokens of windows, and of none; and several of a sequence.
        let steps = [window - 1, 2 * window - 1, 0].map(|start| (start, 1));
        for (starts, entries) in [(steps, 1), ([(1, window), (window, window + 1), (0, 1)], 2)] {
            let chunks: Vec<Chunk> =
                (0..).zip(starts).map(|(sequence, (start, len))| Chunk { sequence, start, len }).collect();
            let run = |gates_in_f32: bool| {
                let args = case.args(&chunks, entries, &state, device).0;
                let kv_gates = args.kv_gates.cast(FloatDType::from(dtype));
                let kv_gates = if gates_in_f32 { kv_gates.cast(FloatDType::F32) } else { kv_gates };
                compress_kv(CompressKvArgs { kv_gates, ..args }, &case.options(dtype)).expect("legal")
            };
            let [exact, actual] = [true, false].map(run);
            let what = format!("{starts:?} {dtype:?} on {device:?}");
            assert!(bits(&actual.entries) == bits(&exact.entries), "{what}");
            assert!(bits(&actual.state) == bits(&exact.state), "{what}: the state");
        }
    });
}

/// Compressors beside the tokens of [`rope_write`]: the bits of both alone, in steps, which may be one launch, and with room for more entries. All
/// of these cubes have as many units, but for those of the last case.
#[rstest]
#[case(&[(true, 4, 512), (true, 4, 128)])]
#[case(&[(false, 128, 40)])]
#[case(&[(false, 128, 40), (true, 8, 64)])]
#[case(&[(true, 4, 512), (true, 1, 8)])]
fn ops_compress_kv_beside_rope_write(
    #[case] of: &[(bool, usize, usize)],
    #[values(1, 2)] entries: usize,
    #[values(RowFormat::Dense, RowFormat::Fp8IndexKeys)] format: RowFormat,
) {
    for_each_dtype(|device, dtype| {
        let pool = |width| Pool::new([4, 4, width], FloatDType::from(dtype), format, device).expect("small");
        let call = |&(overlap, window, width): &(bool, usize, usize)| {
            let case = Case::new(overlap, window, [width, 4], &[3 * window + 2, 2 * window, window, 2]);
            let state = random(&mut rng(88), case.state_shape().iter().product(), DType::F32);
            let starts = (0..).zip([3 * window - 1, 2 * window - 1, window - 1, 0]);
            let chunks = Vec::from_iter(starts.map(|(sequence, start)| Chunk { sequence, start, len: 1 }));
            let of_sequence = |sequence| (0..entries).map(move |j| if j == 0 { 4 * sequence } else { -1 });
            let slots = Vec::from_iter((0..4).flat_map(of_sequence));
            let cache = EntryCache { cache: pool(width), slots: ints(&slots, [slots.len()], device) };
            let args = CompressKvArgs { cache: Some(cache), ..case.args(&chunks, entries, &state, device).0 };
            (CompressKvArgs { kv_gates: args.kv_gates.cast(FloatDType::from(dtype)), ..args }, case.options(dtype))
        };
        let alone = rope_write_args([3, 24, 24, 4], &[7, -1, 0, 23], dtype, device);
        let alone = rope_write(alone).expect("legal");
        let compressors = of.iter().map(call).collect();
        let args = rope_write_args([3, 24, 24, 4], &[7, -1, 0, 23], dtype, device);
        let both = rope_write(RopeWriteArgs { compressors, ..args }).expect("legal");
        assert!(bits(&both.q) == bits(&alone.q), "{dtype:?} on {device:?}");
        assert!(bits(&both.cache.dense()) == bits(&alone.cache.dense()), "{dtype:?} on {device:?}");
        assert_eq!(both.compressed.len(), of.len());
        for (both, of) in both.compressed.into_iter().zip(of) {
            let (args, options) = call(of);
            let alone = compress_kv(args, &options).expect("legal");
            let what = format!("{of:?} of {dtype:?} on {device:?}");
            assert!(bits(&both.entries) == bits(&alone.entries), "{what}");
            assert!(bits(&both.state) == bits(&alone.state), "{what}: the state");
            let [both, alone] = [both, alone].map(|it| bits(&it.cache.expect("the one that it was given").dense()));
            assert!(both == alone && both.iter().any(|&bits| bits != 0), "{what}: the cache");
        }
    });
}

/// Where a compressor is refused, nothing is written.
#[test]
fn ops_compress_kv_beside_rope_write_refused() {
    for_each_device(|device| {
        let case = Case::new(true, 2, [6, 1], &[9]);
        let whole = [Chunk { sequence: 0, start: 0, len: 9 }];
        let args = || case.args(&whole, 4, &vec![0.0; case.state_shape().iter().product()], device).0;
        let (legal, wrong) = (args(), CompressKvArgs { norm_weight: Tensor::ones([5], device), ..args() });
        let of_tokens = rope_write_args([3, 24, 24, 4], &[7], DType::F32, device);
        let before = (bits(&legal.state), bits(&of_tokens.cache.dense()));
        let compressors = vec![(legal, case.options(DType::F32)), (wrong, case.options(DType::F32))];
        let refused = rope_write(RopeWriteArgs { compressors, ..of_tokens }).expect_err("5 channels of 6");
        assert!(bits(&refused.cache.dense()) == before.1, "{device:?}");
        assert!(refused.compressors.iter().all(|(state, _)| bits(state) == before.0), "{device:?}");
        assert!(refused.error.to_string().starts_with("compress_kv"), "{}", refused.error);
    });
}

/// One launch that writes everything, and one for each thing that is written: room for another entry, which is empty, divides them.
/// Entries in FP8 have a launch of their own in any case.
#[rstest]
fn ops_compress_kv_step_as_apart(
    #[values(false, true)] overlap: bool,
    #[values(1, 2, 4, 128)] window: usize,
    #[values(RowFormat::Dense, RowFormat::Fp8E8m0 { rope: 8 }, RowFormat::Fp8IndexKeys)] format: RowFormat,
) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(overlap, window, [40, 8], &[3 * window + 2, 2 * window, window, 2]);
        let state = random(&mut rng(87), case.state_shape().iter().product(), DType::F32);
        for starts in [[3 * window - 1, 2 * window - 1, window - 1, 0], [2 * window, window, 0, 1]] {
            let chunks: Vec<Chunk> =
                (0..).zip(starts).map(|(sequence, start)| Chunk { sequence, start, len: 1 }).collect();
            let run = |entries| {
                let args = case.args(&chunks, entries, &state, device).0;
                let of_sequence = |sequence| (0..entries).map(move |j| if j == 0 { 4 * sequence } else { -1 });
                let slots: Vec<i32> = (0..4).flat_map(of_sequence).collect();
                let cache = Pool::new([4, 4, 40], FloatDType::from(dtype), format, device).expect("small");
                let cache = EntryCache { cache, slots: ints(&slots, [slots.len()], device) };
                compress_kv(CompressKvArgs { cache: Some(cache), ..args }, &case.options(dtype)).expect("legal")
            };
            let [step, apart] = [1, 2].map(run);
            let what = format!("{starts:?} {dtype:?} on {device:?}");
            assert!(bits(&step.state) == bits(&apart.state), "{what}: the state");
            let slots: Vec<i32> = (0..4).map(|sequence| 4 * sequence).collect();
            let written = write_latent(WriteLatentArgs {
                cache: Pool::new([4, 4, 40], FloatDType::from(dtype), format, device).expect("small"),
                slots: ints(&slots, [4], device),
                latent: step.entries.clone().reshape([4, 40]),
                rope: None,
            });
            let written = bits(&written.expect("legal").dense());
            let [step, apart] = [step, apart].map(|it| bits(&it.cache.expect("the one that it was given").dense()));
            let is_any_full = starts.iter().any(|start| (start + 1) % window == 0);
            assert!(step == written, "{what}: the entries in the cache");
            assert!(step == apart && step.iter().any(|&bits| bits != 0) == is_any_full, "{what}: the cache");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ops_compress_kv_of_any_sizes(
        lens in prop::collection::vec(0..70_usize, 1..5),
        (window, width) in (1..20_usize, 1..70_usize),
        pairs in 0..35_usize,
        overlap: bool,
        seed: u64,
    ) {
        for_each_device(|device| {
            let case = Case::new(overlap, window, [width, pairs.min(width / 2)], &lens);
            case.check(&case.random_calls(seed), device, DType::F32);
        });
    }
}
