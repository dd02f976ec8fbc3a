//! Problems for `ragged_attention`, their arguments and what the oracle gives for them.

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{Path, RaggedAttentionArgs, RaggedAttentionOptions, explain_path, ragged_attention};

use crate::devices::{has_tiles, is_hopper};
use crate::ops_fixture::{assert_state, floats, ints, random, rng};
use crate::oracle::{self, State};

/// A problem for `ragged_attention`.
#[derive(Debug, Clone)]
pub struct Case {
    /// Query tokens of each sequence.
    pub lens: Vec<usize>,
    /// How many key tokens more each sequence has; fewer, if negative.
    pub more_keys: Vec<isize>,
    /// Tokens past the last sequence; all their values are NaN.
    pub tail: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// dqk and dv.
    pub widths: (usize, usize),
    pub causal: bool,
    pub dtype: DType,
    /// The factor of the scores, times the root of dqk.
    pub sharpness: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
}

/// The values of a problem.
pub struct Inputs {
    pub case: Case,
    pub tokens: usize,
    pub keys: usize,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub cu_seqlens: Vec<i32>,
    pub cu_seqlens_k: Vec<i32>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            lens: vec![3, 140],
            more_keys: Vec::new(),
            tail: 0,
            heads: 3,
            kv_heads: 3,
            widths: (192, 128),
            causal: true,
            dtype: DType::F32,
            // As in the decode tests: scores at which a wrong key shows.
            sharpness: 4.0,
            softcap: None,
            window: None,
        }
    }
}

/// Where sequences begin, and where the last one ends.
fn ends(lens: impl IntoIterator<Item = usize>) -> Vec<i32> {
    let mut ends = vec![0];
    for len in lens {
        ends.push(ends[ends.len() - 1] + len as i32);
    }
    ends
}

impl Case {
    pub fn inputs(&self) -> Inputs {
        let more = self.more_keys.iter().copied().chain(std::iter::repeat(0));
        let key_lens = self.lens.iter().zip(more).map(|(&len, more)| len.saturating_add_signed(more));
        let (cu_seqlens, cu_seqlens_k) = (ends(self.lens.iter().copied()), ends(key_lens));
        let held = |ends: &[i32]| ends[ends.len() - 1] as usize;
        let mut rng = rng(21);
        let mut rows = |held: usize, heads: usize, width: usize| {
            let mut values = random(&mut rng, held * heads * width, self.dtype);
            values.resize((held + self.tail) * heads * width, f64::NAN);
            values
        };
        let (queries, keys) = (held(&cu_seqlens), held(&cu_seqlens_k));
        let q = rows(queries, self.heads, self.widths.0);
        let k = rows(keys, self.kv_heads, self.widths.0);
        let v = rows(keys, self.kv_heads, self.widths.1);
        let (tokens, keys) = (queries + self.tail, keys + self.tail);
        Inputs { case: self.clone(), tokens, keys, q, k, v, cu_seqlens, cu_seqlens_k }
    }

    pub fn options(&self) -> RaggedAttentionOptions {
        let softmax_scale = self.sharpness / (self.widths.0 as f32).sqrt();
        RaggedAttentionOptions { softmax_scale, softcap: self.softcap, causal: self.causal, window: self.window }
    }
}

/// What computes the widths of models in f16 and bf16, where the device has more than the kernel for all.
pub fn fast_path(device: &Device) -> Option<Path> {
    let hopper = is_hopper(device).then_some(Path::Sm90);
    hopper.or(has_tiles(device).then_some(Path::PortableMma))
}

impl Inputs {
    pub fn args(&self, device: &Device) -> RaggedAttentionArgs {
        let Case { heads, kv_heads, widths: (width, value_width), dtype, .. } = self.case;
        let entries = self.cu_seqlens.len();
        let own_keys = self.cu_seqlens != self.cu_seqlens_k;
        RaggedAttentionArgs {
            q: floats(&self.q, [self.tokens, heads, width], dtype, device),
            k: floats(&self.k, [self.keys, kv_heads, width], dtype, device),
            k_pe: None,
            v: floats(&self.v, [self.keys, kv_heads, value_width], dtype, device),
            cu_seqlens: ints(&self.cu_seqlens, [entries], device),
            cu_seqlens_k: own_keys.then(|| ints(&self.cu_seqlens_k, [entries], device)),
        }
    }

    pub fn run(&self, device: &Device) -> (Tensor<3>, Tensor<2>) {
        let args = self.args(device);
        let fast = matches!(self.case.widths, (192, 128) | (128, 128) | (64, 64)) && self.case.dtype != DType::F32;
        if let Some(path) = fast_path(device).filter(|_| fast) {
            assert_eq!(explain_path(&args.problem(), device).path, path, "{:?}", self.case);
        }
        let result = ragged_attention(args, &self.case.options());
        result.unwrap_or_else(|error| panic!("{error} ({:?})", self.case))
    }

    /// Gives the keys of all heads the same last channels, which are an argument of their own then.
    pub fn share_last_channels(&mut self, shared: usize, device: &Device) -> RaggedAttentionArgs {
        let Case { kv_heads, widths: (width, _), dtype, .. } = self.case;
        for key in self.k.chunks_mut(kv_heads * width) {
            for head in 1..kv_heads {
                key.copy_within(width - shared..width, (head + 1) * width - shared);
            }
        }
        let args = self.args(device);
        let k_pe: Vec<f64> =
            self.k.chunks(kv_heads * width).flat_map(|key| &key[width - shared..width]).copied().collect();
        let k_pe = Some(floats(&k_pe, [self.keys, shared], dtype, device));
        RaggedAttentionArgs { k: args.k.narrow(2, 0, width - shared), k_pe, ..args }
    }

    pub fn expected(&self) -> State {
        oracle::ragged_attention(&oracle::Ragged {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens: &self.cu_seqlens,
            cu_seqlens_k: &self.cu_seqlens_k,
            heads: self.case.heads,
            kv_heads: self.case.kv_heads,
            key_width: self.case.widths.0,
            value_width: self.case.widths.1,
            scale: f64::from(self.case.options().softmax_scale),
            softcap: self.case.softcap.map(f64::from),
            causal: self.case.causal,
            window: self.case.window,
        })
    }

    pub fn check(&self, device: &Device) {
        let (out, lse) = self.run(device);
        let what = format!("ragged_attention on {device:?}: {:?}", self.case);
        assert_eq!(out.dtype(), self.case.dtype, "{what}");
        assert_state(&what, (out, lse), &self.expected());
    }
}
