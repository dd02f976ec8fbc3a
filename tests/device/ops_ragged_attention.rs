//! `ragged_attention` against the oracle.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{RaggedAttentionArgs, RaggedAttentionOptions, ragged_attention};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype, is_cuda, is_slow};
use crate::ops_fixture::{assert_state, bits, floats, ints, random, restrided, rng};
use crate::oracle::{self, State};

/// A problem for `ragged_attention`.
#[derive(Debug, Clone)]
struct Case {
    lens: Vec<usize>,
    /// Tokens past the last sequence; all their values are NaN.
    tail: usize,
    heads: usize,
    /// dqk and dv.
    widths: (usize, usize),
    causal: bool,
    dtype: DType,
}

/// The values of a problem.
struct Inputs {
    case: Case,
    tokens: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    cu_seqlens: Vec<i32>,
}

impl Case {
    fn inputs(&self) -> Inputs {
        let mut cu_seqlens = vec![0];
        for &len in &self.lens {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + len as i32);
        }
        let held: usize = self.lens.iter().sum();
        let tokens = held + self.tail;
        let mut rng = rng(21);
        let mut rows = |width: usize| {
            let mut values = random(&mut rng, held * self.heads * width, self.dtype);
            values.resize(tokens * self.heads * width, f64::NAN);
            values
        };
        let (q, k, v) = (rows(self.widths.0), rows(self.widths.0), rows(self.widths.1));
        Inputs { case: self.clone(), tokens, q, k, v, cu_seqlens }
    }

    fn options(&self) -> RaggedAttentionOptions {
        // As in the decode tests: scores at which a wrong key shows.
        RaggedAttentionOptions { softmax_scale: 4.0 / (self.widths.0 as f32).sqrt(), causal: self.causal }
    }
}

impl Inputs {
    fn args(&self, device: &Device) -> RaggedAttentionArgs {
        let Case { heads, widths: (width, value_width), dtype, .. } = self.case;
        RaggedAttentionArgs {
            q: floats(&self.q, [self.tokens, heads, width], dtype, device),
            k: floats(&self.k, [self.tokens, heads, width], dtype, device),
            v: floats(&self.v, [self.tokens, heads, value_width], dtype, device),
            cu_seqlens: ints(&self.cu_seqlens, [self.cu_seqlens.len()], device),
        }
    }

    fn run(&self, device: &Device) -> (Tensor<3>, Tensor<2>) {
        let result = ragged_attention(self.args(device), &self.case.options());
        result.unwrap_or_else(|error| panic!("{error} ({:?})", self.case))
    }

    fn expected(&self) -> State {
        oracle::ragged_attention(&oracle::Ragged {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens: &self.cu_seqlens,
            heads: self.case.heads,
            key_width: self.case.widths.0,
            value_width: self.case.widths.1,
            scale: f64::from(self.case.options().softmax_scale),
            causal: self.case.causal,
        })
    }

    fn check(&self, device: &Device) {
        let (out, lse) = self.run(device);
        let what = format!("ragged_attention on {device:?}: {:?}", self.case);
        assert_eq!(out.dtype(), self.case.dtype, "{what}");
        assert_state(&what, (out, lse), &self.expected());
    }
}

#[rstest]
fn ops_ragged_lengths(
    #[values((192, 128), (80, 48), (5, 3))] widths: (usize, usize),
    #[values(1, 3, 16)] heads: usize,
    #[values(false, true)] causal: bool,
) {
    for_each_dtype(|device, dtype| {
        // Empty sequences at the front, in between and at the end.
        let lens = vec![0, 127, 1, 0, 128, 300, 129, 0];
        Case { lens, tail: 7, heads, widths, causal, dtype }.inputs().check(device);
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
        let case = Case { lens: lens.clone(), tail: 0, heads, widths, causal, dtype: DType::F32 };
        case.inputs().check(device);
    });
}

/// The scores of this prompt would be 40 GB: they must never exist as a whole. Some tokens are compared.
#[test]
fn ops_ragged_of_100_000_tokens() {
    for_each_dtype(|device, dtype| {
        if is_slow(device) || (!is_cuda(device) && dtype != DType::F32) {
            eprintln!("skipped: 100,000 tokens in {dtype:?} on {device:?}, which would take minutes");
            return;
        }
        let widths = if is_cuda(device) { (192, 128) } else { (5, 3) };
        let case = Case { lens: vec![100_000], tail: 0, heads: 1, widths, causal: true, dtype };
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

#[test]
fn ops_ragged_strided_inputs() {
    for_each_dtype(|device, dtype| {
        let case = Case { lens: vec![3, 140], tail: 2, heads: 3, widths: (80, 48), causal: true, dtype };
        let inputs = case.inputs();
        let (out, lse) = inputs.run(device);
        let RaggedAttentionArgs { q, k, v, cu_seqlens } = inputs.args(device);
        // Key and value as a projection gives them: side by side in one row.
        let kv = Tensor::cat(vec![k, v], 2);
        let strided = RaggedAttentionArgs {
            q: restrided(q, 0, 2),
            k: kv.clone().narrow(2, 0, 80),
            v: kv.narrow(2, 80, 48),
            cu_seqlens,
        };
        let (strided_out, strided_lse) = ragged_attention(strided, &case.options()).expect("legal");
        assert_eq!((bits(&strided_out), bits(&strided_lse)), (bits(&out), bits(&lse)));
    });
}

#[rstest]
#[case::no_sequence(vec![], 0)]
#[case::no_sequence_but_tokens(vec![], 3)]
#[case::empty_sequences(vec![0, 0], 0)]
#[case::empty_sequences_and_tokens(vec![0, 0], 3)]
fn ops_ragged_nothing_to_attend(#[case] lens: Vec<usize>, #[case] tail: usize) {
    for_each_dtype(|device, dtype| {
        let case = Case { lens: lens.clone(), tail, heads: 3, widths: (5, 3), causal: true, dtype };
        let (out, lse) = case.inputs().run(device);
        assert_eq!((out.dims(), lse.dims()), ([tail, 3, 3], [tail, 3]));
        case.inputs().check(device);
    });
}
