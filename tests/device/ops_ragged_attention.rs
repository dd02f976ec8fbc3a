//! `ragged_attention` against the oracle.

use burn::tensor::{DType, Tensor};
use mla_ops::{Path, RaggedAttentionArgs, explain_path, ragged_attention};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_cuda, is_slow, skip, supports};
use crate::ops_fixture::{assert_state, bits, ints, restrided};
use crate::ops_ragged_fixture::{Case, fast_path};
use crate::oracle::{self, State};

#[rstest]
fn ops_ragged_lengths(
    #[values((192, 128), (80, 48), (5, 3))] widths: (usize, usize),
    #[values(1, 3, 16)] heads: usize,
    #[values(false, true)] causal: bool,
) {
    for_each_dtype(|device, dtype| {
        // Empty sequences at the front, in between and at the end.
        let lens = vec![0, 127, 1, 0, 128, 300, 129, 0];
        Case { lens, tail: 7, heads, kv_heads: heads, widths, causal, dtype, ..Case::default() }.inputs().check(device);
    });
}

/// Sequences longer than a tile of keys, which shrinks as the heads grow: 8192 keys at 2 heads, about 1800 at 9, 1024 at
/// 16, 128 at 128.
#[rstest]
#[case::within_a_tile(vec![2500], 2, (80, 48), true)]
#[case::two_uneven_tiles(vec![2500], 9, (5, 3), true)]
#[case::three_tiles(vec![5, 2500], 16, (5, 3), true)]
#[case::three_tiles_unmasked(vec![2500], 16, (5, 3), false)]
#[case::four_small_tiles(vec![400, 130], 128, (80, 48), true)]
#[case::four_small_tiles_unmasked(vec![130, 400], 128, (5, 3), false)]
fn ops_ragged_key_tiles(
    #[case] lens: Vec<usize>,
    #[case] heads: usize,
    #[case] widths: (usize, usize),
    #[case] causal: bool,
) {
    for_each_device(|device| {
        let case = Case { lens: lens.clone(), heads, kv_heads: heads, widths, causal, ..Case::default() };
        case.inputs().check(device);
    });
}

/// The scores of this prompt would be 40 GB: they must never exist as a whole. Some tokens are compared.
#[test]
fn ops_ragged_of_100_000_tokens() {
    for_each_dtype(|device, dtype| {
        if is_slow(device) || (!is_cuda(device) && dtype != DType::F32) {
            skip(device, format_args!("100,000 tokens in {dtype:?} would take minutes"));
            return;
        }
        let widths = if is_cuda(device) { (192, 128) } else { (5, 3) };
        let case = Case { lens: vec![100_000], heads: 1, kv_heads: 1, widths, dtype, ..Case::default() };
        let inputs = case.inputs();
        let (out, lse) = inputs.run(device);
        let scale = f64::from(case.options().softmax_scale);
        let (mut expected, mut rows) = (State::default(), Vec::new());
        for token in [0, 1, 4095, 65_535, 65_536, 99_999] {
            let keys =
                (0..=token).map(|j| (&inputs.k[j * widths.0..][..widths.0], &inputs.v[j * widths.1..][..widths.1]));
            let query = &inputs.q[token * widths.0..][..widths.0];
            let (out, lse) = oracle::attend(query, keys, |product| scale * product, widths.1);
            expected.out.extend(out);
            expected.lse.push(lse);
            rows.push(token as i32);
        }
        let rows = ints(&rows, [rows.len()], device);
        let what = format!("100,000 tokens in {dtype:?} on {device:?}");
        assert_state(&what, (out.select(0, rows.clone()), lse.select(0, rows)), &expected);
    });
}

/// Lengths around tiles of 64 and 128 queries and keys, with the widths that the kernels for matrix instructions take.
#[rstest]
fn ops_ragged_tiles(
    #[values((192, 128), (128, 128), (64, 64))] widths: (usize, usize),
    #[values(false, true)] causal: bool,
    #[values(vec![1, 0, 63, 64, 65, 0, 127, 129], vec![128, 300, 256])] lens: Vec<usize>,
) {
    for_each_dtype(|device, dtype| {
        let case =
            Case { lens: lens.clone(), tail: 5, heads: 2, kv_heads: 2, widths, causal, dtype, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Heads that share keys and values.
#[rstest]
#[case::groups(4, 2)]
#[case::one_for_all(5, 1)]
fn ops_ragged_grouped_heads(
    #[case] heads: usize,
    #[case] kv_heads: usize,
    #[values((128, 128), (64, 64), (5, 3))] widths: (usize, usize),
) {
    for_each_dtype(|device, dtype| {
        let lens = vec![70, 0, 200];
        Case { lens, tail: 3, heads, kv_heads, widths, dtype, ..Case::default() }.inputs().check(device);
    });
}

/// Sequences with more keys than queries, and fewer: causal is aligned to the ends.
#[rstest]
fn ops_ragged_more_keys(#[values((192, 128), (5, 3))] widths: (usize, usize), #[values(false, true)] causal: bool) {
    for_each_dtype(|device, dtype| {
        let (lens, more_keys) = (vec![3, 70, 130, 200, 1, 129], vec![200, 0, 127, -150, -1, -128]);
        let case = Case { lens, more_keys, tail: 9, heads: 2, kv_heads: 1, widths, causal, dtype, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Queries that see no key, and a batch without keys.
#[test]
fn ops_ragged_without_keys() {
    for_each_dtype(|device, dtype| {
        for (lens, more_keys) in [(vec![130, 2], vec![-130, -2]), (vec![5, 3], vec![-5, 0])] {
            let case = Case { lens, more_keys, dtype, ..Case::default() };
            case.inputs().check(device);
        }
    });
}

/// Factors of the scores at which most weights vanish, all are the same, and the least scores count.
#[rstest]
fn ops_ragged_scales(#[values(0.0, -4.0, 16.0)] sharpness: f32) {
    for_each_dtype(|device, dtype| {
        let case = Case { lens: vec![150, 40], tail: 1, dtype, sharpness, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Queries that see only their last keys: fewer than a tile, tiles, all that there are.
#[rstest]
fn ops_ragged_windows(
    #[values((192, 128), (64, 64), (5, 3))] widths: (usize, usize),
    #[values(1, 20, 128, 131, 300, usize::MAX)] window: usize,
) {
    for_each_dtype(|device, dtype| {
        let (lens, more_keys) = (vec![3, 70, 300, 20, 129], vec![290, 1, 130, -10, 0]);
        let window = Some(window);
        let case = Case { lens, more_keys, tail: 4, heads: 2, kv_heads: 1, widths, dtype, window, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Windows over more keys than the reference looks at together.
#[test]
fn ops_ragged_windows_of_long_sequences() {
    for_each_device(|device| {
        let window = Some(700);
        let case = Case { lens: vec![5, 1500], heads: 16, kv_heads: 16, widths: (5, 3), window, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Scores below the cap, around it, and far above it; of both signs.
#[rstest]
fn ops_ragged_softcaps(
    #[values((192, 128), (128, 128), (5, 3))] widths: (usize, usize),
    #[values((30.0, 4.0), (2.0, -8.0), (0.5, 100.0), (50.0, 0.0))] (softcap, sharpness): (f32, f32),
    #[values(None, Some(33))] window: Option<usize>,
) {
    for_each_dtype(|device, dtype| {
        let (lens, softcap) = (vec![150, 40], Some(softcap));
        let case = Case { lens, tail: 1, widths, dtype, sharpness, softcap, window, ..Case::default() };
        case.inputs().check(device);
    });
}

/// Small problems that together reach all of a kernel with tiles of 128: rounds of its rings, sequences that begin and end within
/// tiles and blocks, fewer keys than queries and more, none; scores whose maximum grows late. Two codes, of which each has what the
/// other one has not: keys that share their last channels, or a window and a cap.
#[rstest]
#[case(&[130, 3, 0, 260], &[5, 200, 0, -150], [2, 1], None)]
#[case(&[128], &[391], [2, 2], None)]
#[case(&[1, 2, 128, 1], &[0, -1, 127, 126], [1, 1], None)]
#[case(&[40, 7], &[-40, 0], [3, 1], None)]
#[case(&[130, 3, 0, 260], &[5, 200, 0, -150], [2, 1], Some(20))]
#[case(&[128], &[520], [2, 2], Some(390))]
#[case(&[1, 2, 128, 1], &[0, -1, 255, 126], [1, 1], Some(140))]
#[case(&[40, 7], &[-40, 0], [3, 1], Some(1))]
#[case(&[128], &[256], [2, 2], Some(130))]
#[case(&[29], &[0], [1, 1], None)]
#[case(&[29], &[0], [1, 1], Some(20))]
#[case(&[194], &[62], [2, 1], Some(120))]
#[case(&[130], &[900], [2, 1], Some(600))]
#[case(&[42], &[0], [1, 1], None)]
#[case(&[42], &[0], [1, 1], Some(20))]
#[case(&[228], &[-208], [1, 1], None)]
#[case(&[228], &[-208], [1, 1], Some(20))]
#[case(&[3, 122], &[0, -100], [1, 1], None)]
#[case(&[3, 122], &[0, -100], [1, 1], Some(20))]
fn ops_mutants_ragged(
    #[case] lens: &[usize],
    #[case] more_keys: &[isize],
    #[case] heads: [usize; 2],
    #[case] window: Option<usize>,
) {
    check_mutants(lens, more_keys, heads, window, 16.0);
}

/// Scores that are nearly the same, of which each shows where it is masked, in each column of a block and each of its places in
/// the code: the last block, and the one before where a warpgroup sees only a part of it. Four rows of a block behind the last key.
#[rstest]
#[case(&[128], &[0], None)]
#[case(&[128], &[1], None)]
#[case(&[194], &[62], None)]
#[case(&[128], &[0], Some(2))]
#[case(&[128], &[1], Some(2))]
#[case(&[128], &[9], Some(2))]
#[case(&[194], &[62], Some(120))]
#[case(&[14, 2], &[0, 122], None)]
#[case(&[14, 2], &[0, 122], Some(200))]
fn ops_mutants_ragged_masks(#[case] lens: &[usize], #[case] more_keys: &[isize], #[case] window: Option<usize>) {
    check_mutants(lens, more_keys, [1, 1], window, 1.0);
}

/// A case of one of the two codes of [`ops_mutants_ragged`].
fn check_mutants(lens: &[usize], more_keys: &[isize], heads: [usize; 2], window: Option<usize>, sharpness: f32) {
    let [heads, kv_heads] = heads;
    for_each_device(|device| {
        let (lens, more_keys, dtype) = (lens.to_vec(), more_keys.to_vec(), DType::BF16);
        if !supports(device, dtype) {
            return;
        }
        // Without a tail the tensors end where the last sequence does.
        let tail = if lens.len() == 1 { 0 } else { 9 };
        let case = Case { lens, more_keys, tail, heads, kv_heads, dtype, sharpness, window, ..Case::default() };
        let case = match window {
            Some(_) => Case { widths: (128, 128), softcap: Some(20.0), ..case },
            None => Case { widths: (192, 128), ..case },
        };
        let mut inputs = case.inputs();
        let mut args = inputs.args(device);
        if window.is_none() {
            args = inputs.share_last_channels(64, device);
        }
        let result = ragged_attention(args, &case.options()).expect("legal");
        assert_state(&format!("ragged_attention on {device:?}: {case:?}"), result, &inputs.expected());
    });
}

/// The bits of a sequence's rows do not depend on what stands beside it.
#[test]
fn ops_ragged_alone_as_in_a_batch() {
    for_each_dtype(|device, dtype| {
        let inputs = Case { lens: vec![77, 200, 31], dtype, ..Case::default() }.inputs();
        let (out, lse) = inputs.run(device);
        let RaggedAttentionArgs { q, k, v, .. } = inputs.args(device);
        let of_second = |tensor: Tensor<3>| tensor.narrow(0, 77, 200);
        let cu_seqlens = ints(&[0, 200], [2], device);
        let (q, k, v) = (of_second(q), of_second(k), of_second(v));
        let args = RaggedAttentionArgs { q, k, k_pe: None, v, cu_seqlens, cu_seqlens_k: None };
        let (own_out, own_lse) = ragged_attention(args, &inputs.case.options()).expect("legal");
        assert_eq!(bits(&own_out), bits(&of_second(out)));
        assert_eq!(bits(&own_lse), bits(&lse.narrow(0, 77, 200)));
    });
}

#[rstest]
fn ops_ragged_strided_inputs(#[values((80, 48), (192, 128))] widths: (usize, usize)) {
    for_each_dtype(|device, dtype| {
        let case = Case { tail: 2, widths, dtype, ..Case::default() };
        let inputs = case.inputs();
        let (out, lse) = inputs.run(device);
        let args = inputs.args(device);
        // Key and value as a projection gives them: side by side in one row.
        let kv = Tensor::cat(vec![args.k.clone(), args.v.clone()], 2);
        let strided = RaggedAttentionArgs {
            q: restrided(args.q.clone(), 0, 1),
            k: kv.clone().narrow(2, 0, widths.0),
            v: kv.narrow(2, widths.0, widths.1),
            ..args.clone()
        };
        let transposed = RaggedAttentionArgs { q: restrided(args.q.clone(), 0, 2), ..args };
        for args in [strided, transposed] {
            let (strided_out, strided_lse) = ragged_attention(args, &case.options()).expect("legal");
            assert_eq!((bits(&strided_out), bits(&strided_lse)), (bits(&out), bits(&lse)));
        }
    });
}

/// The last channels of the keys are those of one tensor for all heads: the same bits as with whole keys.
#[rstest]
#[case::mla((192, 128), 64)]
#[case::half((128, 128), 64)]
#[case::any((80, 48), 7)]
#[case::no_panel((192, 128), 32)]
fn ops_ragged_shared_channels(#[case] widths: (usize, usize), #[case] shared: usize) {
    for_each_dtype(|device, dtype| {
        let case = Case { tail: 2, widths, dtype, ..Case::default() };
        let inputs = case.inputs();
        let args = inputs.args(device);
        let ([keys, heads, _], own) = (args.k.dims(), widths.0 - shared);
        // Beside a latent, as in the cache's rows.
        let latent = Tensor::cat(vec![args.v.clone().narrow(1, 0, 1), args.k.clone().narrow(1, 0, 1)], 2);
        let latent = latent.reshape([keys, widths.1 + widths.0]);
        let k_pe = latent.narrow(1, widths.1 + own, shared);
        let k = args.k.clone().narrow(2, 0, own);
        let pe_of_all = k_pe.clone().unsqueeze_dim::<3>(1).expand([keys, heads, shared]);
        let whole = RaggedAttentionArgs { k: Tensor::cat(vec![k.clone(), pe_of_all], 2), ..args.clone() };
        let (out, lse) = ragged_attention(whole, &case.options()).expect("legal");
        let parts = RaggedAttentionArgs { k, k_pe: Some(k_pe), ..args };
        let fast = fast_path(device).filter(|_| dtype != DType::F32 && widths.0.is_multiple_of(64));
        if let Some(path) = fast {
            let path = if shared == 64 { path } else { Path::Portable };
            assert_eq!(explain_path(&parts.problem(), device).path, path);
        }
        let (own_out, own_lse) = ragged_attention(parts, &case.options()).expect("legal");
        if fast.is_some() && shared != 64 {
            skip(device, "another implementation has other bits");
            return;
        }
        assert_eq!((bits(&own_out), bits(&own_lse)), (bits(&out), bits(&lse)));
    });
}

#[rstest]
#[case::no_sequence(vec![], 0)]
#[case::no_sequence_but_tokens(vec![], 3)]
#[case::empty_sequences(vec![0, 0], 0)]
#[case::empty_sequences_and_tokens(vec![0, 0], 3)]
fn ops_ragged_nothing_to_attend(#[case] lens: Vec<usize>, #[case] tail: usize) {
    for_each_dtype(|device, dtype| {
        let case = Case { lens: lens.clone(), tail, widths: (5, 3), dtype, ..Case::default() };
        let (out, lse) = case.inputs().run(device);
        assert_eq!((out.dims(), lse.dims()), ([tail, 3, 3], [tail, 3]));
        case.inputs().check(device);
    });
}
