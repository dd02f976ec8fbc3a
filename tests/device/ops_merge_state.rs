//! `merge_state`, `merge_states` and the accumulator against the oracle.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{Accumulator, MergeStateArgs, MlaDecodeArgs, merge_state, merge_states, mla_decode};
use proptest::prelude::{ProptestConfig, prop, proptest};
use rand::RngExt;
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{DecodeCase, assert_state, bits, floats, ints, random, restrided, rng};
use crate::oracle::{self, State};

/// `n` states of each of `T` tokens and `H` heads.
struct States {
    /// T, n, H, Dv.
    dims: [usize; 4],
    outs: Vec<f64>,
    lses: Vec<f64>,
    dtype: DType,
}

impl States {
    /// A fifth of the states holds nothing: half of those say so by +inf, half by -inf, and hold NaN.
    fn random(dims: [usize; 4], dtype: DType) -> Self {
        let mut rng = rng(31);
        let [tokens, n, heads, width] = dims;
        let mut outs = random(&mut rng, tokens * n * heads * width, dtype);
        let mut lses: Vec<f64> = random(&mut rng, tokens * n * heads, DType::F32).iter().map(|lse| 8.0 * lse).collect();
        for (lse, out) in lses.iter_mut().zip(outs.chunks_exact_mut(width)) {
            *lse = match rng.random_range(0..10) {
                0 => f64::INFINITY,
                1 => f64::NEG_INFINITY,
                _ => continue,
            };
            out.fill(f64::NAN);
        }
        Self { dims, outs, lses, dtype }
    }

    fn outs(&self, device: &Device) -> Tensor<4> {
        floats(&self.outs, self.dims, self.dtype, device)
    }

    fn lses(&self, device: &Device) -> Tensor<3> {
        let [tokens, n, heads, _] = self.dims;
        floats(&self.lses, [tokens, n, heads], DType::F32, device)
    }

    /// State `i` of each token and head.
    fn part(&self, i: usize, device: &Device) -> (Tensor<3>, Tensor<2>) {
        let [tokens, _, heads, width] = self.dims;
        // Burn's `reshape` reads a 0 as "keep": it cannot drop a dimension of an empty tensor.
        if tokens * heads * width == 0 {
            let lse = Tensor::zeros([tokens, heads], (device, DType::F32));
            return (Tensor::zeros([tokens, heads, width], (device, self.dtype)), lse);
        }
        let (out, lse) = (self.outs(device).narrow(1, i, 1), self.lses(device).narrow(1, i, 1));
        (out.reshape([tokens, heads, width]), lse.reshape([tokens, heads]))
    }

    fn expected(&self) -> State {
        let [tokens, n, heads, width] = self.dims;
        let mut state = State::default();
        for row in 0..tokens * heads {
            let (token, head) = (row / heads, row % heads);
            let part = |i: usize| {
                let at = (token * n + i) * heads + head;
                (&self.outs[at * width..(at + 1) * width], self.lses[at])
            };
            let (out, lse) = oracle::merge(&(0..n).map(part).collect::<Vec<_>>(), width);
            state.out.extend(out);
            state.lse.push(lse);
        }
        state
    }
}

/// The two-way merge of the first two states.
fn merge_two(states: &States, device: &Device) -> (Tensor<3>, Tensor<2>) {
    let ((out_a, lse_a), (out_b, lse_b)) = (states.part(0, device), states.part(1, device));
    merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b }).expect("legal")
}

/// All states, one after the other.
fn accumulate(states: &States, device: &Device) -> (Tensor<3>, Tensor<2>) {
    let [tokens, n, heads, width] = states.dims;
    let mut accumulator = Accumulator::empty(tokens, heads, width, device).expect("small");
    for i in 0..n {
        let (out, lse) = states.part(i, device);
        accumulator.merge(out, lse).expect("legal");
    }
    (accumulator.out, accumulator.lse)
}

/// The grid of the peers of this library: a tenth of the lse of either side is +inf, and as many -inf.
#[rstest]
fn ops_merge_grid(
    #[values(256, 613, 1536)] tokens: usize,
    #[values(8, 16, 32)] heads: usize,
    #[values(32, 48, 64, 128, 256)] width: usize,
) {
    for_each_dtype(|device, dtype| {
        let states = States::random([tokens, 2, heads, width], dtype);
        let marked = states.lses.iter().filter(|lse| **lse == f64::INFINITY).count();
        assert!((0.08..0.12).contains(&(marked as f64 / states.lses.len() as f64)), "{marked} lse of +inf");
        let expected = states.expected();
        let (out, lse) = merge_two(&states, device);
        assert_eq!(out.dtype(), dtype);
        assert_state("merge_state", (out, lse), &expected);
        let (out, lse) = merge_states(states.outs(device), states.lses(device)).expect("legal");
        assert_eq!(out.dtype(), dtype);
        assert_state("merge_states of 2", (out, lse), &expected);
    });
}

#[rstest]
fn ops_merge_many(#[values(1, 3, 7, 64)] n: usize) {
    for_each_dtype(|device, dtype| {
        let states = States::random([37, n, 3, 33], dtype);
        let merged = merge_states(states.outs(device), states.lses(device)).expect("legal");
        assert_state("merge_states", merged, &states.expected());
        // Parts of any dtype, but nothing is rounded on the way: the bound is that of f32.
        let accumulated = accumulate(&states, device);
        assert_eq!(accumulated.0.dtype(), DType::F32);
        assert_state("accumulator", accumulated, &states.expected());
    });
}

#[test]
fn ops_merge_nothing() {
    for_each_dtype(|device, dtype| {
        for (a, b) in
            [(f64::INFINITY, f64::INFINITY), (f64::NEG_INFINITY, f64::INFINITY), (f64::NEG_INFINITY, f64::NEG_INFINITY)]
        {
            let states = States { dims: [1, 2, 1, 3], outs: vec![f64::NAN; 6], lses: vec![a, b], dtype };
            let expected = states.expected();
            assert_eq!((&expected.out[..], &expected.lse[..]), (&[0.0; 3][..], &[f64::NEG_INFINITY][..]));
            assert_state("merge_state", merge_two(&states, device), &expected);
            let merged = merge_states(states.outs(device), states.lses(device)).expect("legal");
            assert_state("merge_states", merged, &expected);
            assert_state("accumulator", accumulate(&states, device), &expected);
        }
        let none = States { dims: [2, 0, 3, 4], outs: vec![], lses: vec![], dtype };
        let (out, lse) = merge_states(none.outs(device), none.lses(device)).expect("legal");
        assert_eq!((out.dims(), lse.dims(), out.dtype()), ([2, 3, 4], [2, 3], dtype));
        assert_state("merge_states of none", (out, lse), &none.expected());
    });
}

/// No token, no head, no channel: nothing to merge, and no reason to fail.
#[rstest]
fn ops_merge_empty_dimensions(#[values([0, 2, 3, 4], [2, 2, 0, 4], [2, 2, 3, 0])] dims: [usize; 4]) {
    for_each_dtype(|device, dtype| {
        let [tokens, n, heads, width] = dims;
        let lses = vec![0.0; tokens * n * heads];
        let states = States { dims, outs: vec![], lses, dtype };
        let merged = merge_states(states.outs(device), states.lses(device)).expect("legal");
        for (out, lse) in [merged, merge_two(&states, device), accumulate(&states, device)] {
            assert_eq!((out.dims(), lse.dims()), ([tokens, heads, width], [tokens, heads]));
        }
    });
}

#[rstest]
#[case(1e4, -1e4)]
#[case(-1e4, 1e4)]
#[case(1e4, 1e4)]
#[case(-1e4, -1e4)]
#[case(-1e4, f64::NEG_INFINITY)]
#[case(f64::INFINITY, 1e4)]
#[case(1e4, 9999.0)]
fn ops_merge_extreme_lse(#[case] a: f64, #[case] b: f64) {
    for_each_dtype(|device, dtype| {
        let outs = vec![1.0, -0.5, 0.25, -0.75];
        let states = States { dims: [1, 2, 1, 2], outs, lses: vec![a, b], dtype };
        assert_state("merge_state", merge_two(&states, device), &states.expected());
        let merged = merge_states(states.outs(device), states.lses(device)).expect("legal");
        assert_state("merge_states", merged, &states.expected());
        assert_state("accumulator", accumulate(&states, device), &states.expected());
    });
}

/// Parts through other strides give the same bits.
#[test]
fn ops_merge_strided_parts() {
    for_each_dtype(|device, dtype| {
        let states = States::random([5, 3, 4, 6], dtype);
        let merged = merge_states(states.outs(device), states.lses(device)).expect("legal");
        let (outs, lses) = (restrided(states.outs(device), 1, 2), restrided(states.lses(device), 0, 2));
        let strided = merge_states(outs, lses).expect("legal");
        assert_eq!((bits(&strided.0), bits(&strided.1)), (bits(&merged.0), bits(&merged.1)));
    });
}

/// Attention over the keys `from .. to` of every sequence. A page holds one key, so that these are columns of the table.
fn attend_part(args: &MlaDecodeArgs, case: &DecodeCase, from: usize, to: usize) -> (Tensor<4>, Tensor<3>) {
    let device = args.device();
    let lens: Vec<i32> = case.lens.iter().map(|&len| len.min(to).saturating_sub(from) as i32).collect();
    let part = MlaDecodeArgs {
        page_table: args.page_table.clone().slice([0..lens.len(), from..to]),
        seq_lens: ints(&lens, [lens.len()], &device),
        ..args.clone()
    };
    mla_decode(part, &case.options(), None).expect("legal").materialise()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Keys split anywhere into 2 to 5 parts, attended part by part and merged, give the whole.
    #[test]
    fn ops_merge_of_any_split_is_the_whole(
        lens in prop::collection::vec(0..200_usize, 1..4),
        cuts in prop::collection::vec(0.0..1.0, 1..5),
        seed in 0..1000_u64,
    ) {
        for_each_device(|device| {
            let case = DecodeCase { lens: lens.clone(), page_size: 1, causal: false, ..Default::default() };
            let inputs = case.inputs(seed);
            let args = inputs.args(device);
            let longest = inputs.max_pages;
            let mut bounds: Vec<usize> = cuts.iter().map(|cut| (cut * longest as f64) as usize).collect();
            bounds.extend([0, longest]);
            bounds.sort_unstable();

            let (batch, heads, width) = (lens.len(), case.heads, case.widths.1);
            let parts: Vec<(Tensor<3>, Tensor<2>)> = bounds.windows(2)
                .map(|ends| attend_part(&args, &case, ends[0], ends[1]))
                .map(|(out, lse)| (out.reshape([batch, heads, width]), lse.reshape([batch, heads])))
                .collect();
            let (outs, lses): (Vec<_>, Vec<_>) = parts.iter().cloned().unzip();
            let at_once = merge_states(Tensor::stack(outs, 1), Tensor::stack(lses, 1)).expect("legal");
            let one_by_one = parts.iter().cloned().reduce(|(out_a, lse_a), (out_b, lse_b)| {
                merge_state(MergeStateArgs { out_a, lse_a, out_b, lse_b }).expect("legal")
            });
            let mut accumulator = Accumulator::empty(batch, heads, width, device).expect("small");
            for (out, lse) in parts {
                accumulator.merge(out, lse).expect("legal");
            }
            let expected = inputs.expected();
            assert_state("at once", at_once, &expected);
            assert_state("one by one", one_by_one.expect("two parts at least"), &expected);
            assert_state("accumulated", (accumulator.out, accumulator.lse), &expected);
        });
    }
}
