//! Lengths around the tile (64 queries, 64 keys) and around the 16 of its units; poisoned rows where nothing may be read.

use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::ragged_attention::{
    HeadRows, RaggedAttentionArgs, RaggedAttentionError, RaggedAttentionOptions, RaggedAttentionSizes, launch,
};
use mla_kernels::{DeviceError, Path};
use rstest::rstest;

use crate::support::{arg, for_each_client, random, read, skip, upload};

/// What an output holds that was not written.
const UNWRITTEN: f32 = 77.0;
const LENGTHS: &[i32] = &[0, 1, 15, 16, 17, 0, 63, 64, 65, 127, 129, 300];

/// An element type, as numbers of the host.
pub trait Host: CubeElement + Scalar + Copy {
    fn from_f32(value: f32) -> Self;
    fn to_f64(self) -> f64;
}

impl Host for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Host for f16 {
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Host for bf16 {
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
}

/// Packed sequences, and tokens after them that belong to none.
struct Case<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    cu_seqlens: Vec<i32>,
    tokens: usize,
    heads: usize,
    key_width: usize,
    value_width: usize,
    softmax_scale: f32,
    causal: bool,
}

impl<E: Host> Case<E> {
    /// The tokens of no sequence, `tail` of them, are NaN in q, k and v.
    fn new(lengths: &[i32], tail: usize, heads: usize, [key_width, value_width]: [usize; 2], causal: bool) -> Self {
        let mut cu_seqlens = vec![0];
        for length in lengths {
            cu_seqlens.push(cu_seqlens.last().expect("the leading 0") + length);
        }
        let used = *cu_seqlens.last().expect("the leading 0") as usize;
        let rows = |seed: u32, width: usize, factor: f32| {
            let mut values: Vec<E> =
                random(seed, used * heads * width).iter().map(|x| E::from_f32(x * factor)).collect();
            values.resize((used + tail) * heads * width, E::from_f32(f32::NAN));
            values
        };
        // Queries that are large enough for a softmax which is not close to a mean.
        let (q, k, v) = (rows(1, key_width, 4.0), rows(2, key_width, 1.0), rows(3, value_width, 1.0));
        let softmax_scale = 1.0 / (key_width as f32).sqrt();
        Self { q, k, v, cu_seqlens, tokens: used + tail, heads, key_width, value_width, softmax_scale, causal }
    }

    fn run(&self, client: &Client) -> Result<(Vec<f64>, Vec<f64>), RaggedAttentionError> {
        let buffer =
            |values: &[E], width| HeadRows::contiguous(arg(&upload(client, values), values.len()), self.heads, width);
        let cu_seqlens = || arg(&upload(client, &self.cu_seqlens), self.cu_seqlens.len());
        let rows = self.tokens * self.heads;
        let out = upload(client, &vec![E::from_f32(UNWRITTEN); rows * self.value_width]);
        let lse = upload(client, &vec![UNWRITTEN; rows]);
        launch(
            client,
            RaggedAttentionArgs {
                q: buffer(&self.q, self.key_width),
                k: buffer(&self.k, self.key_width),
                k_pe: None,
                v: buffer(&self.v, self.value_width),
                cu_seqlens: cu_seqlens(),
                cu_seqlens_k: cu_seqlens(),
                out: arg(&out, rows * self.value_width),
                lse: arg(&lse, rows),
                sizes: RaggedAttentionSizes {
                    tokens: self.tokens,
                    keys: self.tokens,
                    heads: self.heads,
                    kv_heads: self.heads,
                    key_width: self.key_width,
                    value_width: self.value_width,
                    shared_width: 0,
                    sequences: self.cu_seqlens.len() - 1,
                    elem: E::elem_type_native(),
                },
                options: RaggedAttentionOptions {
                    softmax_scale: self.softmax_scale,
                    softcap: None,
                    causal: self.causal,
                    window: None,
                },
            },
            Path::Plain,
        )?;
        let out = read::<E>(client, out).into_iter().map(E::to_f64).collect();
        let lse = read::<f32>(client, lse).into_iter().map(f64::from).collect();
        Ok((out, lse))
    }

    /// The definition, in f64.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|it| it.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let row = |token: usize, head: usize| token * self.heads + head;
        let mut out = vec![0.0; self.tokens * self.heads * self.value_width];
        let mut lse = vec![f64::NEG_INFINITY; self.tokens * self.heads];
        let limit = |entry: i32| entry.clamp(0, self.tokens as i32) as usize;
        for bounds in self.cu_seqlens.windows(2) {
            let (first, end) = (limit(bounds[0]), limit(bounds[1]));
            for query in first..end {
                let seen_end = if self.causal { query + 1 } else { end };
                for head in 0..self.heads {
                    let at = row(query, head);
                    let own = &q[at * self.key_width..][..self.key_width];
                    let score = |key: usize| {
                        let other = &k[row(key, head) * self.key_width..][..self.key_width];
                        f64::from(self.softmax_scale) * own.iter().zip(other).map(|(a, b)| a * b).sum::<f64>()
                    };
                    let scores: Vec<f64> = (first..seen_end).map(score).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    lse[at] = max + sum.ln();
                    let own_out = &mut out[at * self.value_width..][..self.value_width];
                    for (key, score) in (first..seen_end).zip(&scores) {
                        let value = &v[row(key, head) * self.value_width..][..self.value_width];
                        let weight = (score - lse[at]).exp();
                        own_out.iter_mut().zip(value).for_each(|(o, x)| *o += weight * x);
                    }
                }
            }
        }
        (out, lse)
    }

    /// On every device that has the type.
    fn check(&self, tolerance: f64) {
        for_each_client(|client| {
            let (out, lse) = self.expected();
            let (got_out, got_lse) = match self.run(client) {
                Err(RaggedAttentionError::Device(DeviceError::Elem(elem))) => {
                    // Every device has f32; f16 and bf16 are features.
                    assert_ne!(elem, f32::elem_type_native(), "refused");
                    skip(format_args!("{} has no {elem}", client.name()));
                    return;
                }
                result => result.expect("launches"),
            };
            assert_close("out", &got_out, &out, tolerance);
            assert_close("lse", &got_lse, &lse, 2e-5);
        });
    }
}

/// Equal where infinite, within the tolerance of max(1, |expected|) elsewhere.
pub fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let close = if b.is_infinite() { a == b } else { (a - b).abs() <= tolerance * b.abs().max(1.0) };
        assert!(close, "{what}[{i}]: {a}, expected {b}");
    }
}

#[rstest]
fn f32_matches_the_definition(
    #[values([192, 128], [80, 48], [5, 3])] widths: [usize; 2],
    #[values(1, 3)] heads: usize,
    #[values(false, true)] causal: bool,
) {
    Case::<f32>::new(LENGTHS, 70, heads, widths, causal).check(1e-5);
}

#[rstest]
fn f16_matches_the_definition(
    #[values([192, 128], [80, 48], [5, 3])] widths: [usize; 2],
    #[values(1, 3)] heads: usize,
    #[values(false, true)] causal: bool,
) {
    Case::<f16>::new(LENGTHS, 70, heads, widths, causal).check(6e-4);
}

#[rstest]
fn bf16_matches_the_definition(#[values([192, 128], [5, 3])] widths: [usize; 2], #[values(false, true)] causal: bool) {
    Case::<bf16>::new(LENGTHS, 70, 3, widths, causal).check(5e-3);
}

#[rstest]
fn sixteen_heads(#[values([192, 128], [80, 48], [5, 3])] widths: [usize; 2], #[values(false, true)] causal: bool) {
    let lengths = [17, 0, 65, 1];
    Case::<f32>::new(&lengths, 5, 16, widths, causal).check(1e-5);
    Case::<f16>::new(&lengths, 5, 16, widths, causal).check(6e-4);
}

/// Widths around the slices of 32 channels, the 16 columns of a unit and the blocks of 64 columns.
#[rstest]
fn any_widths(#[values([1, 1], [32, 16], [33, 17], [31, 65], [64, 64], [576, 512])] widths: [usize; 2]) {
    Case::<f32>::new(&[70, 3], 1, 2, widths, true).check(1e-5);
}

#[test]
fn no_sequence_at_all() {
    Case::<f32>::new(&[], 130, 2, [5, 3], true).check(0.0);
    Case::<f32>::new(&[0, 0, 0], 1, 2, [5, 3], false).check(0.0);
    Case::<f32>::new(&[0], 0, 2, [5, 3], false).check(0.0);
}

#[test]
fn no_token_left_over() {
    Case::<f32>::new(&[64, 64], 0, 1, [5, 3], true).check(1e-5);
    Case::<f32>::new(&[1; 300], 0, 2, [5, 3], true).check(1e-5);
}

/// More slots than a grid's x has on wgpu: the rest is in z.
#[test]
fn more_sequences_than_a_grid_is_wide() {
    let mut lengths = vec![0; 66_000];
    (0..lengths.len()).step_by(509).for_each(|i| lengths[i] = 1 + i as i32 % 3);
    Case::<f32>::new(&lengths, 3, 1, [5, 3], true).check(1e-5);
}

#[test]
fn one_long_sequence() {
    Case::<f32>::new(&[2_500], 0, 1, [5, 3], true).check(1e-5);
}

/// Scores of some thousands: a softmax without the maximum taken off would be inf / inf.
#[test]
fn large_scores() {
    let mut case = Case::<f32>::new(&[200], 3, 1, [80, 48], true);
    case.softmax_scale = 100.0;
    // f32 scores of this size are only so exact: the tolerance of an exponent, not of a sum.
    let (out, lse) = case.expected();
    for_each_client(|client| {
        let (got_out, got_lse) = case.run(client).expect("launches");
        assert_close("out", &got_out, &out, 5e-3);
        assert_close("lse", &got_lse, &lse, 1e-5);
    });
}

/// Entries that `validate_device_inputs` would refuse are taken as within 0 ..= N.
#[test]
fn entries_out_of_range_are_clamped() {
    let mut case = Case::<f32>::new(&[10, 80], 0, 2, [5, 3], false);
    case.cu_seqlens = vec![-5, 10, i32::MAX];
    case.check(1e-5);
}

#[test]
fn what_the_kernel_cannot_do_is_an_error() {
    for_each_client(|client| {
        let empty = || arg(&upload(client, &[0]), 1);
        let error = |elem, key_width| {
            let rows = || HeadRows::contiguous(empty(), 1, 1);
            let (tokens, keys, heads, kv_heads, value_width, shared_width, sequences) = (1, 1, 1, 1, 1, 0, 0);
            #[rustfmt::skip]
            let sizes = RaggedAttentionSizes {
                tokens, keys, heads, kv_heads, key_width, value_width, shared_width, sequences, elem,
            };
            let args = RaggedAttentionArgs {
                q: rows(),
                k: rows(),
                k_pe: None,
                v: rows(),
                cu_seqlens: empty(),
                cu_seqlens_k: empty(),
                out: empty(),
                lse: empty(),
                sizes,
                options: RaggedAttentionOptions { softmax_scale: 1.0, softcap: None, causal: false, window: None },
            };
            launch(client, args, Path::Plain).expect_err("refused")
        };
        let (float, int) = (f32::elem_type_native(), i32::elem_type_native());
        assert_eq!(error(int, 1), DeviceError::Elem(int).into());
        assert_eq!(error(float, 0), RaggedAttentionError::Width { key_width: 0, value_width: 1 });
    });
}

/// The definition tells apart what a wrong kernel would mix up.
#[test]
fn the_definition_depends_on_the_mask_and_on_the_bounds() {
    let case = |lengths: &[i32], causal| Case::<f32>::new(lengths, 0, 1, [5, 3], causal).expected().0;
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).any(|(a, b)| (a - b).abs() > 0.1);
    assert!(apart(&case(&[40, 40], true), &case(&[40, 40], false)));
    assert!(apart(&case(&[40, 40], true), &case(&[41, 39], true)));
}
