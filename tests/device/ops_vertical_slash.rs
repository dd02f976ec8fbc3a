//! `vertical_slash_attention` against the oracle, which makes the keys from the definition, not from the index.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use mla_ops::{
    PackedVerticalSlashArgs, VerticalSlashAttentionArgs, VerticalSlashAttentionOptions, VerticalSlashIndex,
    packed_vertical_slash_attention, vertical_slash_attention,
};
use rstest::rstest;

use crate::devices::{for_each_device, for_each_dtype};
use crate::ops_fixture::{assert_state, bits, floats, ints, random, restrided, rng};
use crate::ops_vertical_slash_index::Pattern;
use crate::oracle::{Sparse, State};

/// A problem for `vertical_slash_attention`.
#[derive(Debug, Clone)]
struct Case {
    pattern: Pattern,
    kv_heads: usize,
    /// d and dv.
    widths: [usize; 2],
    softcap: Option<f32>,
    packed: bool,
    dtype: DType,
}

/// The values of a problem: rows that belong to no token are NaN.
struct Inputs {
    case: Case,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    /// Queries and keys of each sequence, as rows of q, and of k and v.
    spans: Vec<[Range<usize>; 2]>,
    /// Rows of q, and of k and v.
    tokens: [usize; 2],
}

impl Case {
    /// Four heads of 64 channels, on two of keys.
    fn new(lens: &[(usize, usize)], widths: [usize; 2], causal: bool, dtype: DType) -> Self {
        let pattern = Pattern::random(lens, 4, widths, [64, 64], causal);
        Self { pattern, kv_heads: 2, widths: [64, 64], softcap: None, packed: false, dtype }
    }

    /// Sq and Sk: longer than the longest sequence.
    fn strides(&self) -> [usize; 2] {
        let longest = |len: fn(&(usize, usize)) -> usize| self.pattern.lens.iter().map(len).max().unwrap_or(0);
        [longest(|lens| lens.0) + 2, longest(|lens| lens.1) + 3]
    }

    fn inputs(&self) -> Inputs {
        let (batch, mut spans, mut ends) = (self.pattern.lens.len(), Vec::new(), [0, 0]);
        for &(q_len, kv_len) in &self.pattern.lens {
            spans.push([ends[0]..ends[0] + q_len, ends[1]..ends[1] + kv_len]);
            let next = if self.packed { [q_len, kv_len] } else { self.strides() };
            ends = [ends[0] + next[0], ends[1] + next[1]];
        }
        let tokens = if self.packed { [ends[0] + 3, ends[1] + 2] } else { self.strides().map(|len| batch * len) };
        let mut rng = rng(62);
        let mut rows = |i: usize, width: usize| {
            let mut values = vec![f64::NAN; tokens[i] * width];
            for span in &spans {
                let row = random(&mut rng, span[i].len() * width, self.dtype);
                values[span[i].start * width..span[i].end * width].copy_from_slice(&row);
            }
            values
        };
        let q = rows(0, self.pattern.heads * self.widths[0]);
        let (k, v) = (rows(1, self.kv_heads * self.widths[0]), rows(1, self.kv_heads * self.widths[1]));
        Inputs { case: self.clone(), q, k, v, spans, tokens }
    }

    fn options(&self) -> VerticalSlashAttentionOptions {
        // As in the decode tests: scores at which a wrong key shows.
        let softmax_scale = 4.0 / (self.widths[0] as f32).sqrt();
        VerticalSlashAttentionOptions { softmax_scale, softcap: self.softcap, causal: self.pattern.causal }
    }

    fn check_on(&self, device: &Device) {
        self.inputs().check(device);
    }
}

impl Inputs {
    fn padded(&self, index: VerticalSlashIndex, device: &Device) -> VerticalSlashAttentionArgs {
        let Case { pattern, kv_heads, widths, dtype, .. } = &self.case;
        let (batch, [q_len, kv_len]) = (pattern.lens.len(), self.case.strides());
        let (q_lens, kv_lens) = pattern.lens_i32();
        VerticalSlashAttentionArgs {
            q: floats(&self.q, [batch, q_len, pattern.heads, widths[0]], *dtype, device),
            k: floats(&self.k, [batch, kv_len, *kv_heads, widths[0]], *dtype, device),
            v: floats(&self.v, [batch, kv_len, *kv_heads, widths[1]], *dtype, device),
            q_lens: ints(&q_lens, [batch], device),
            kv_lens: ints(&kv_lens, [batch], device),
            index,
        }
    }

    fn packed(&self, index: VerticalSlashIndex, device: &Device) -> PackedVerticalSlashArgs {
        let Case { pattern, kv_heads, widths, dtype, .. } = &self.case;
        let [queries, keys] = self.tokens;
        let ends = |i: usize| {
            let mut ends = vec![0];
            ends.extend(self.spans.iter().map(|span| span[i].end as i32));
            ints(&ends, [ends.len()], device)
        };
        PackedVerticalSlashArgs {
            q: floats(&self.q, [queries, pattern.heads, widths[0]], *dtype, device),
            k: floats(&self.k, [keys, *kv_heads, widths[0]], *dtype, device),
            v: floats(&self.v, [keys, *kv_heads, widths[1]], *dtype, device),
            cu_seqlens_q: ends(0),
            cu_seqlens_k: ends(1),
            index,
        }
    }

    /// out `[Nq, H, dv]`, lse `[Nq, H]`, also of sequences that are not packed.
    fn run(&self, index: VerticalSlashIndex, device: &Device) -> (Tensor<3>, Tensor<2>) {
        let (options, [tokens, _]) = (self.case.options(), self.tokens);
        if self.case.packed {
            let result = packed_vertical_slash_attention(self.packed(index, device), &options);
            return result.unwrap_or_else(|error| panic!("{error} ({:?})", self.case));
        }
        let result = vertical_slash_attention(self.padded(index, device), &options);
        let (out, lse) = result.unwrap_or_else(|error| panic!("{error} ({:?})", self.case));
        let ([batch, heads], [q_len, _]) =
            ([self.case.pattern.lens.len(), self.case.pattern.heads], self.case.strides());
        assert_eq!(out.dims(), [batch, q_len, heads, self.case.widths[1]]);
        assert_eq!(lse.dims(), [batch, q_len, heads]);
        (out.reshape([tokens, heads, self.case.widths[1]]), lse.reshape([tokens, heads]))
    }

    fn oracle(&self) -> Sparse<'_> {
        let options = self.case.options();
        Sparse {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            spans: self.spans.clone(),
            heads: [self.case.pattern.heads, self.case.kv_heads],
            widths: self.case.widths,
            scale: f64::from(options.softmax_scale),
            softcap: f64::from(options.softcap.unwrap_or(0.0)),
            causal: options.causal,
        }
    }

    fn expected(&self) -> State {
        let pattern = &self.case.pattern;
        let mut keys = Vec::new();
        for b in 0..pattern.lens.len() {
            for head in 0..pattern.heads {
                let definition = pattern.definition(b, head);
                keys.extend((0..pattern.rows()).map(|row| definition.keys(row as i32).into_iter().collect::<Vec<_>>()));
            }
        }
        let (heads, rows, m) = (pattern.heads, pattern.rows(), pattern.block_size[0]);
        self.oracle().attention(|b, head, query| &keys[(b * heads + head) * rows + query / m])
    }

    fn check(&self, device: &Device) {
        let state = self.run(self.case.pattern.index(device), device);
        let what = format!("vertical_slash_attention on {device:?}: {:?}", self.case.summary());
        assert_eq!(state.0.dtype(), self.case.dtype, "{what}");
        assert_state(&what, state, &self.expected());
    }
}

impl Case {
    /// What fits in a message.
    fn summary(&self) -> String {
        let Pattern { lens, heads, widths, block_size, causal, .. } = &self.pattern;
        format!(
            "{lens:?}, {heads} heads on {}, Nv and Ns {widths:?}, blocks {block_size:?}, causal {causal}, widths {:?}, \
             softcap {:?}, packed {}, {:?}",
            self.kv_heads, self.widths, self.softcap, self.packed, self.dtype
        )
    }
}

#[rstest]
fn ops_vertical_slash_entries(
    #[values(0, 1, 2, 7, 15, 32)] slashes: usize,
    #[values(0, 1, 3, 100)] verticals: usize,
    #[values(false, true)] causal: bool,
) {
    for_each_dtype(|device, dtype| {
        // The types differ in how rows are loaded and stored, not in which keys they are.
        if dtype == DType::F32 || verticals == 3 {
            let lens = [(1, 1), (1, 1024), (65, 65), (129, 129)];
            Case::new(&lens, [verticals, slashes], causal, dtype).check_on(device);
        }
    });
}

/// Many rows, whose bands lie in the middle of the keys.
#[rstest]
fn ops_vertical_slash_long(#[values(0, 1, 2, 7, 15, 32)] slashes: usize, #[values(false, true)] causal: bool) {
    for_each_device(|device| {
        let pattern = Pattern::random(&[(1023, 2049)], 2, [100, slashes], [64, 64], causal);
        let packed = slashes % 2 == 1;
        let case = Case { pattern, kv_heads: 1, widths: [32, 32], softcap: None, packed, dtype: DType::F32 };
        case.check_on(device);
    });
}

#[rstest]
fn ops_vertical_slash_packed(#[values(0, 2, 15)] slashes: usize, #[values(false, true)] causal: bool) {
    for_each_dtype(|device, dtype| {
        let lens = [(65, 65), (1, 300), (0, 7), (129, 200), (40, 10), (3, 0)];
        let case = Case::new(&lens, [20, slashes], causal, dtype);
        Case { packed: true, ..case }.check_on(device);
    });
}

#[rstest]
fn ops_vertical_slash_softcap(#[values(0.5, 10.0, 50.0)] softcap: f32, #[values(false, true)] packed: bool) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(&[(65, 200), (129, 129)], [20, 7], true, dtype);
        Case { softcap: Some(softcap), packed, ..case }.check_on(device);
    });
}

#[test]
fn ops_vertical_slash_softcap_of_zero_is_none() {
    for_each_device(|device| {
        let case = Case::new(&[(65, 200)], [20, 7], true, DType::F32);
        let run = |softcap| {
            let inputs = Case { softcap, ..case.clone() }.inputs();
            bits(&inputs.run(case.pattern.index(device), device).0)
        };
        assert_eq!(run(Some(0.0)), run(None));
        assert!(run(Some(1.0)) != run(None));
    });
}

/// Scores of some thousands, of which the greatest is not the last: where tanh is 1, and exp would be infinite.
#[test]
fn ops_vertical_slash_large_scores() {
    for_each_device(|device| {
        let case = Case { softcap: Some(30.0), ..Case::new(&[(129, 129)], [20, 7], true, DType::F32) };
        let mut inputs = case.inputs();
        inputs.q.iter_mut().for_each(|value| *value *= 1024.0);
        inputs.check(device);
    });
}

/// Heads, widths of keys and values, and blocks that are no multiples of a tile or of a vector.
#[rstest]
#[case::one_head(1, 1, [128, 128], [64, 64])]
#[case::many_heads_on_one(7, 1, [5, 3], [64, 64])]
#[case::uneven_widths(6, 3, [80, 48], [64, 64])]
#[case::as_in_deepseek_v3(2, 2, [192, 128], [64, 64])]
#[case::small_blocks(2, 1, [16, 16], [16, 8])]
#[case::large_rows(2, 2, [33, 20], [200, 64])]
#[case::large_key_blocks(2, 1, [40, 65], [64, 256])]
#[case::odd_blocks(3, 3, [8, 4], [70, 13])]
#[case::single_keys(2, 2, [12, 2], [3, 1])]
fn ops_vertical_slash_sizes(
    #[case] heads: usize,
    #[case] kv_heads: usize,
    #[case] widths: [usize; 2],
    #[case] block_size: [usize; 2],
    #[values(false, true)] causal: bool,
) {
    for_each_dtype(|device, dtype| {
        let pattern = Pattern::random(&[(150, 150), (70, 333), (30, 20)], heads, [9, 5], block_size, causal);
        Case { pattern, kv_heads, widths, softcap: None, packed: false, dtype }.check_on(device);
    });
}

/// An index of `slashes` blocks from key 0 on and of single keys behind them: as many as the longest sequence has.
fn all_keys(case: &Case, slashes: usize, device: &Device) -> VerticalSlashIndex {
    let (batch, heads, rows) = (case.pattern.lens.len(), case.pattern.heads, case.pattern.rows());
    let keys = case.strides()[1];
    let columns = keys.saturating_sub(slashes * 64);
    let lists = batch * heads * rows;
    let counts = |count: usize| ints(&vec![count as i32; lists], [batch, heads, rows], device);
    let values = |list: Vec<i32>| ints(&list.repeat(lists), [batch, heads, rows, list.len()], device);
    VerticalSlashIndex {
        block_count: counts(slashes),
        block_offset: values((0..slashes as i32).map(|i| i * 64).collect()),
        column_count: counts(columns),
        column_index: values((0..columns).map(|i| (slashes * 64 + i) as i32).collect()),
        block_size_m: 64,
        block_size_n: 64,
    }
}

/// An index made by hand that names every key: ordinary attention. Most sequences have fewer keys than it names.
#[rstest]
fn ops_vertical_slash_of_all_keys(
    #[values(0, 1, 2, 7, 15, 32)] slashes: usize,
    #[values(false, true)] causal: bool,
    #[values(false, true)] packed: bool,
) {
    for_each_dtype(|device, dtype| {
        if dtype != DType::F32 && slashes != 2 {
            return;
        }
        let case = Case::new(&[(1, 1), (1, 700), (65, 65), (129, 129), (70, 200)], [0, 0], causal, dtype);
        let case = Case { packed, ..case };
        let inputs = case.inputs();
        let state = inputs.run(all_keys(&case, slashes, device), device);
        let keys: Vec<i32> = (0..703).collect();
        let what = format!("all keys on {device:?}, {slashes} blocks: {}", case.summary());
        assert_state(&what, state, &inputs.oracle().attention(|_, _, _| &keys));
    });
}

/// Rows past a sequence's last query may hold anything.
#[test]
fn ops_vertical_slash_rows_of_nobody() {
    for_each_device(|device| {
        let case = Case::new(&[(1, 40), (129, 129)], [0, 0], true, DType::F32);
        let inputs = case.inputs();
        let mut index = all_keys(&case, 1, device);
        let expected = inputs.run(index.clone(), device);
        let (heads, rows) = (case.pattern.heads, case.pattern.rows());
        let poisoned = |count: i32| -> Vec<i32> {
            (0..2 * heads * rows).map(|at| if at < heads * rows && at % rows > 0 { 1 << 30 } else { count }).collect()
        };
        index.block_count = ints(&poisoned(1), [2, heads, rows], device);
        let columns = case.strides()[1] as i32 - 64;
        index.column_count = ints(&poisoned(columns), [2, heads, rows], device);
        let actual = inputs.run(index, device);
        assert_eq!((bits(&actual.0), bits(&actual.1)), (bits(&expected.0), bits(&expected.1)));
    });
}

#[test]
fn ops_vertical_slash_strided_inputs() {
    for_each_dtype(|device, dtype| {
        let case = Case::new(&[(65, 200), (129, 129)], [20, 7], true, dtype);
        let inputs = case.inputs();
        let args = inputs.padded(case.pattern.index(device), device);
        let VerticalSlashAttentionArgs { q, k, v, q_lens, kv_lens, index } = args.clone();
        let kv = Tensor::cat(vec![k, v], 3);
        let strided = VerticalSlashAttentionArgs {
            q: restrided(q, 1, 2),
            k: kv.clone().narrow(3, 0, 64),
            v: kv.narrow(3, 64, 64),
            q_lens,
            kv_lens,
            index,
        };
        let (out, lse) = vertical_slash_attention(args, &case.options()).expect("legal");
        let (strided_out, strided_lse) = vertical_slash_attention(strided, &case.options()).expect("legal");
        assert_eq!((bits(&strided_out), bits(&strided_lse)), (bits(&out), bits(&lse)));
    });
}

#[rstest]
#[case::no_sequence(&[])]
#[case::no_query(&[(0, 70)])]
#[case::no_key(&[(70, 0), (3, 0)])]
#[case::nothing(&[(0, 0), (0, 0)])]
#[case::keys_of_some(&[(70, 0), (3, 5)])]
fn ops_vertical_slash_nothing_to_attend(
    #[case] lens: &[(usize, usize)],
    #[values(0, 3)] entries: usize,
    #[values(false, true)] packed: bool,
) {
    for_each_dtype(|device, dtype| {
        let case = Case::new(lens, [entries, entries], true, dtype);
        Case { packed, ..case }.check_on(device);
    });
}

/// Tensors without a single row.
#[test]
fn ops_vertical_slash_without_rows() {
    for_each_device(|device| {
        let case = Case { packed: true, ..Case::new(&[(0, 0)], [3, 3], true, DType::F32) };
        let empty = |width: usize| Tensor::<3>::zeros([0, width, 8], (device, DType::F32));
        let args = PackedVerticalSlashArgs {
            q: empty(4),
            k: empty(2),
            v: empty(2),
            ..case.inputs().packed(case.pattern.index(device), device)
        };
        let (out, lse) = packed_vertical_slash_attention(args.clone(), &case.options()).expect("legal");
        assert_eq!((out.dims(), lse.dims()), ([0, 4, 8], [0, 4]));
        let q = Tensor::<3>::ones([5, 4, 8], (device, DType::F32));
        let (out, lse) =
            packed_vertical_slash_attention(PackedVerticalSlashArgs { q, ..args }, &case.options()).expect("legal");
        let none = State { out: vec![0.0; 5 * 4 * 8], lse: vec![f64::NEG_INFINITY; 5 * 4] };
        assert_state("no key at all", (out, lse), &none);
    });
}
