//! Calls that are nearly right, by a seed: an argument or two of another size, dtype or value. Each is carried out or refused with an
//! error; nothing panics, and nothing is allocated for what a number only claims. On the CPU, which sees all values.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, FloatDType, Int, IntDType, Tensor, TensorData};
use mla_ops::cache::{CacheConfig, PagedCache, PoolConfig, RequestId, RequestToToken, RowFormat, new_pool};
use mla_ops::{
    Accumulator, BlockFormat, CompressKvArgs, CompressKvOptions, Determinism, EntryCache, ExpertChoice, ExpertGroups,
    ExpertScoring, ExpertsMlpArgs, ExpertsMlpOptions, IndexForm, InverseRope, LightningIndexArgs,
    LightningIndexOptions, LocalExperts, MergeStateArgs, MhcOptions, MhcPreArgs, Mixer, MlaDecodeArgs,
    MlaDecodeOptions, MlaPlanArgs, MlaQuery, NormRopeArgs, NormRopeOptions, PackedVerticalSlashArgs, PagedBatchArgs,
    RaggedAttentionArgs, RaggedAttentionOptions, RopeConfig, RopeQuery, RopeWriteArgs, RouteExpertsArgs,
    RouteExpertsOptions, Routing, SampleArgs, SampleParams, SampleRows, SharedExperts, SparseMlaArgs, SparseMlaOptions,
    SparseScope, Splits, StackedWeight, VerticalSlashAttentionArgs, VerticalSlashAttentionOptions, VerticalSlashIndex,
    VerticalSlashIndexArgs, VerticalSlashIndexOptions, Weight, WeightBlocks, WriteLatentArgs, YarnConfig, argmax,
    batch, compress_kv, experts_mlp, kv_indices, lightning_index, linear, linear_by_head, linear_each, log_probs,
    matmul, merge_state, merge_states, mhc_head, mhc_post, mhc_pre, mla_decode, mla_plan, norm_rope,
    packed_vertical_slash_attention, page_table, ragged_attention, residual_norm, rms_norm, rope_write, route_experts,
    sample, sparse_mla, sparse_mla_parts, swiglu, vertical_slash_attention, vertical_slash_index, write_latent,
};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rstest::rstest;

use crate::ops_fixture::rng;

/// Of each group of operations: more than 10,000 of all.
const CASES: u64 = 420;

type Outcome = Result<(), String>;

fn said<T, E: Display>(result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// Makes arguments; now and then one that is wrong.
struct Hostile {
    rng: ChaCha8Rng,
    device: Device,
    /// Of one argument, how many are wrong: one in so many.
    rarely: u32,
    /// A length that is another one, wherever it occurs.
    other: [usize; 2],
}

impl Hostile {
    fn new(case: u64) -> Self {
        let mut rng = rng(case);
        let rarely = [8, 20, 60, 200][rng.random_range(0..4)];
        let other = [rng.random_range(2..12), rng.random_range(0..3)];
        Self { rng, device: Device::flex(), rarely, other }
    }

    fn is_wrong(&mut self) -> bool {
        self.rng.random_range(0..self.rarely) == 0
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.random_range(0..of.len())]
    }

    fn flag(&mut self) -> bool {
        self.rng.random()
    }

    /// A length.
    fn len(&mut self, right: usize) -> usize {
        let right = if right == self.other[0] { self.other[1] } else { right };
        match self.is_wrong() {
            true => self.one(&[0, 0, 1, 2, 3, 5, 17, right + 1, right.saturating_sub(1), 2 * right]),
            false => right,
        }
    }

    /// A number, which may claim what no memory holds.
    fn number(&mut self, right: usize) -> usize {
        let right = if right == self.other[0] { self.other[1] } else { right };
        match self.is_wrong() {
            true => self.one(&[0, 1, 2, 3, 7, right + 1, 1 << 40, 1 << 60, isize::MAX as usize, usize::MAX]),
            false => right,
        }
    }

    fn real(&mut self, right: f32) -> f32 {
        match self.is_wrong() {
            true => self.one(&[0.0, -0.0, -1.0, 1e-40, 1e38, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
            false => right,
        }
    }

    /// Numbers in f32, or now and then in another type.
    fn floats<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        let shape = shape.map(|len| self.len(len));
        let mut values: Vec<f32> = (0..shape.iter().product()).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        if self.is_wrong() && !values.is_empty() {
            let at = self.rng.random_range(0..values.len());
            values[at] = self.one(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40]);
        }
        let tensor = Tensor::<D>::from_data(TensorData::new(values, shape), (&self.device, DType::F32));
        match self.is_wrong() {
            true => tensor.cast(self.one(&[FloatDType::F16, FloatDType::BF16, FloatDType::F64])),
            false => tensor,
        }
    }

    /// What a call may do without.
    fn maybe<T>(&mut self, make: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| make(self))
    }

    /// Whole numbers, these again and again, of which one may be another.
    fn ints<const D: usize>(&mut self, values: &[i32], shape: [usize; D]) -> Tensor<D, Int> {
        let shape = shape.map(|len| self.len(len));
        let mut values: Vec<i32> = values.iter().copied().cycle().take(shape.iter().product()).collect();
        values.resize(shape.iter().product(), 0);
        if self.is_wrong() && !values.is_empty() {
            let at = self.rng.random_range(0..values.len());
            values[at] = self.one(&[-1, 0, 1, 2, 3, 7, 8, 100, 1 << 20, i32::MIN, i32::MAX]);
        }
        let tensor = Tensor::<D, Int>::from_data(TensorData::new(values, shape), (&self.device, DType::I32));
        if self.is_wrong() { tensor.cast(IntDType::I64) } else { tensor }
    }

    fn weight(&mut self, shape: [usize; 2]) -> Result<Weight, String> {
        match self.rng.random_range(0..3) {
            0 => said(Weight::from_blocks(self.blocks(shape), shape.map(|len| self.len(len)))),
            _ => Ok(self.floats(shape).into()),
        }
    }

    fn stack(&mut self, shape: [usize; 3]) -> Result<StackedWeight, String> {
        match self.rng.random_range(0..3) {
            0 => {
                let blocks = self.blocks([shape[0] * shape[1], shape[2]]);
                said(StackedWeight::from_blocks(blocks, shape.map(|len| self.len(len))))
            }
            _ => Ok(self.floats(shape).into()),
        }
    }

    fn blocks(&mut self, [rows, columns]: [usize; 2]) -> WeightBlocks {
        let format = self.one(&[BlockFormat::Fp8, BlockFormat::Fp4]);
        let (codes, block_rows) = match format {
            BlockFormat::Fp8 => (rows * columns, 128),
            BlockFormat::Fp4 => (rows * columns / 2, 1),
        };
        let scales = rows.div_ceil(block_rows) * columns.div_ceil(format.block_columns());
        let words = if format == BlockFormat::Fp4 { scales.div_ceil(4) } else { scales };
        WeightBlocks {
            format,
            codes: self.ints(&[0x3030_3030, 0x1234_5678], [codes.div_ceil(4)]),
            scales: self.ints(&[if format == BlockFormat::Fp4 { 0x7f7f_7f7f } else { 0x3f80_0000 }], [words]),
            block_rows: self.number(block_rows),
            dtype: self.one(&[DType::F32, DType::F32, DType::F32, DType::F64]),
        }
    }

    fn determinism(&mut self) -> Determinism {
        self.one(&[Determinism::Fast, Determinism::BatchInvariant])
    }

    fn splits(&mut self) -> Splits {
        let (count, tokens) = (self.number(3), self.number(64));
        self.one(&[Splits::Auto, Splits::Count(count), Splits::Tokens(tokens)])
    }
}

fn linears(h: &mut Hostile) -> Outcome {
    let (x, first, second) = (h.floats([3, 32]), h.weight([8, 32])?, h.weight([6, 32])?);
    let determinism = h.determinism();
    let _ = said(linear(x.clone(), &first, determinism))?.into_data();
    let [one, other] = said(linear_each(x, [&first, &second], determinism))?;
    let _ = (one.into_data(), other.into_data());
    Ok(())
}

fn gates(h: &mut Hostile) -> Outcome {
    let (x, gate_up, limit) = (h.floats([3, 32]), h.weight([12, 32])?, h.maybe(|h| h.real(7.0)));
    let _ = said(swiglu(x, &gate_up, limit, h.determinism()))?.into_data();
    Ok(())
}

fn heads(h: &mut Hostile) -> Outcome {
    let (weight, determinism) = (h.stack([2, 4, 32])?, h.determinism());
    let carried = h.one(&[0, 2]);
    let x = h.floats([3, 2, 32 + carried]);
    let _ = said(linear_by_head(x, &weight, determinism))?.into_data();
    let heads = InverseRope { x: h.floats([3, 4, 16]), cos: h.floats([3, 4]), sin: h.floats([3, 4]) };
    let _ = said(linear_by_head(heads, &weight, determinism))?.into_data();
    Ok(())
}

fn products(h: &mut Hostile) -> Outcome {
    let determinism = h.determinism();
    let (lhs, rhs) = (h.floats([3, 5]), h.floats([5, 2]));
    let _ = said(matmul(lhs, rhs, determinism))?.into_data();
    let (lhs, rhs) = (h.floats([2, 3, 5]), h.floats([2, 5, 2]));
    let _ = said(matmul(lhs, rhs, determinism))?.into_data();
    let (lhs, rhs) = (h.floats([4]), h.floats([4]));
    if h.is_wrong() {
        let _ = said(matmul(lhs, rhs, determinism))?;
    }
    Ok(())
}

fn norms(h: &mut Hostile) -> Outcome {
    let (x, y, weight, eps) = (h.floats([3, 8]), h.floats([3, 8]), h.floats([8]), h.real(1e-6));
    let _ = said(rms_norm(x.clone(), weight.clone(), eps))?.into_data();
    let (sum, normed) = said(residual_norm(x, y, weight, eps))?;
    let _ = (sum.into_data(), normed.into_data());
    Ok(())
}

fn norm_ropes(h: &mut Hostile) -> Outcome {
    let options = NormRopeOptions { norm_eps: h.maybe(|h| h.real(1e-6)), norm_whole_head: h.flag(), inverse: h.flag() };
    let width = if options.norm_whole_head { 8 } else { 4 };
    let weight = options.norm_eps.and_then(|_| h.maybe(|h| h.floats([width])));
    let args = NormRopeArgs { x: h.floats([3, 2, 8]), weight, cos: h.floats([3, 2]), sin: h.floats([3, 2]) };
    let _ = said(norm_rope(args, &options))?.into_data();
    Ok(())
}

fn rope_writes(h: &mut Hostile) -> Outcome {
    let query = match h.flag() {
        true => RopeQuery::Heads(h.floats([3, 2, 8])),
        false => {
            let (q, weight) = (h.floats([3, 2, 8]), h.stack([2, 32, 4])?);
            RopeQuery::Absorbed { q, weight, determinism: h.determinism() }
        }
    };
    let is_heads = matches!(query, RopeQuery::Heads(_));
    let args = RopeWriteArgs {
        query,
        latent: h.floats([3, 9]),
        norm_weight: h.floats([5]),
        norm_eps: h.real(1e-6),
        q_norm_eps: if is_heads { h.maybe(|h| h.real(1e-6)) } else { None },
        index_q: if is_heads { h.maybe(|h| h.floats([3, 2, 6])) } else { None },
        cos: h.floats([3, 2]),
        sin: h.floats([3, 2]),
        cache: h.floats::<3>([4, 4, 9]).into(),
        slots: h.ints(&[3, -1, 12], [3]),
        compressors: vec![],
    };
    let written = rope_write(args).map_err(|refused| refused.to_string())?;
    let _ = (written.q.into_data(), written.cache.dense().into_data());
    Ok(())
}

fn writes(h: &mut Hostile) -> Outcome {
    let rope = h.maybe(|h| h.floats([3, 2]));
    let width = if rope.is_some() { 5 } else { 7 };
    let args = WriteLatentArgs {
        cache: h.floats::<3>([4, 4, 7]).into(),
        slots: h.ints(&[3, -1, 12], [3]),
        latent: h.floats([3, width]),
        rope,
    };
    let _ = write_latent(args).map_err(|refused| refused.to_string())?.dense().into_data();
    Ok(())
}

fn decodes(h: &mut Hostile) -> Outcome {
    let q = match h.flag() {
        true => MlaQuery::Whole(h.floats([2, 1, 3, 7])),
        false => MlaQuery::Parts { nope: h.floats([2, 1, 3, 5]), pe: h.floats([2, 1, 3, 2]) },
    };
    let seq_lens = h.ints(&[5, 2], [2]);
    let args = MlaDecodeArgs {
        q,
        kv_cache: h.floats::<3>([4, 4, 7]).into(),
        page_table: h.ints(&[1, 0, 2, 0], [2, 2]),
        seq_lens: seq_lens.clone(),
    };
    let options =
        MlaDecodeOptions { causal: h.flag(), splits: h.splits(), ..MlaDecodeOptions::new(h.number(5), h.real(0.3)) };
    let plan = match h.flag() {
        true => Some(said(mla_plan(MlaPlanArgs {
            seq_lens: if h.is_wrong() { h.ints(&[5, 2], [2]) } else { seq_lens },
            query_len: h.number(1),
            heads: h.number(3),
            page_size: h.number(4),
            max_seq_len: h.number(8),
            splits: h.splits(),
        }))?),
        false => None,
    };
    let (out, lse) = said(mla_decode(args, &options, plan.as_ref()))?.materialise();
    let _ = (out.into_data(), lse.into_data());
    Ok(())
}

fn page_tables(h: &mut Hostile) -> Outcome {
    let args = PagedBatchArgs {
        req_to_token: h.ints(&[8, 9, 10, 11, 0, 1, 2, 3], [3, 8]),
        req_rows: h.ints(&[2, 0], [2]),
        seq_lens: h.ints(&[4, 3], [2]),
        kv_start: h.maybe(|h| h.ints(&[4, 0], [2])),
        page_size: h.number(4),
    };
    let table = said(page_table(args.clone(), h.number(2)))?;
    let _ = (table.table.into_data(), table.overflow.into_data());
    let _ = said(kv_indices(args, h.number(3)))?.indices.into_data();
    Ok(())
}

fn states(h: &mut Hostile) -> Outcome {
    let args = MergeStateArgs {
        out_a: h.floats([2, 3, 4]),
        lse_a: h.floats([2, 3]),
        out_b: h.floats([2, 3, 4]),
        lse_b: h.floats([2, 3]),
    };
    let _ = said(merge_state(args))?.0.into_data();
    let _ = said(merge_states(h.floats([2, 2, 3, 4]), h.floats([2, 2, 3])))?.0.into_data();
    let mut sum = said(Accumulator::empty(h.number(2), h.number(3), h.number(4), &h.device.clone()))?;
    said(sum.merge(h.floats([2, 3, 4]), h.floats([2, 3])))?;
    let _ = sum.out.into_data();
    Ok(())
}

fn ragged(h: &mut Hostile) -> Outcome {
    let k_pe = h.maybe(|h| h.floats([4, 2]));
    let width = if k_pe.is_some() { 4 } else { 6 };
    let args = RaggedAttentionArgs {
        q: h.floats([4, 2, 6]),
        k: h.floats([4, 2, width]),
        k_pe,
        v: h.floats([4, 2, 5]),
        cu_seqlens: h.ints(&[0, 1, 4], [3]),
        cu_seqlens_k: h.maybe(|h| h.ints(&[0, 1, 4], [3])),
    };
    let options = RaggedAttentionOptions {
        softmax_scale: h.real(0.3),
        softcap: h.maybe(|h| h.real(5.0)),
        causal: true,
        window: h.maybe(|h| h.number(3)),
    };
    let _ = said(ragged_attention(args, &options))?.0.into_data();
    Ok(())
}

fn picks(h: &mut Hostile) -> Outcome {
    let args = LightningIndexArgs {
        q: h.floats([2, 3, 4, 5]),
        keys: h.floats([6, 8, 5]).into(),
        page_table: h.ints(&[5, 2, 0, 3], [2, 2]),
        head_weights: h.floats([2, 3, 4]),
        visible: h.ints(&[15, 16, 0, 6, 7, 8], [2, 3]),
    };
    let form = h.one(&[IndexForm::Positions, IndexForm::Slots]);
    let options = LightningIndexOptions { k: h.len(4), scale: h.real(1.0), form };
    let _ = said(lightning_index(args, &options))?.into_data();
    Ok(())
}

fn sparse(h: &mut Hostile) -> Outcome {
    let scope = |h: &mut Hostile| SparseScope {
        rows: h.floats([4, 4, 7]).into(),
        indices: h.ints(&[3, 9, -1, 15, 0], [2, 1, 5]),
        lengths: h.maybe(|h| h.ints(&[5, 2], [2, 1])),
    };
    let sink = h.maybe(|h| h.floats([3]));
    let args = SparseMlaArgs { q: h.floats([2, 1, 3, 7]), scope: scope(h), second: h.maybe(scope), sink, plan: None };
    let options = SparseMlaOptions { determinism: h.determinism(), ..SparseMlaOptions::new(h.number(5), h.real(0.3)) };
    let _ = said(sparse_mla(args.clone(), &options))?.0.into_data();
    let _ = said(sparse_mla_parts(SparseMlaArgs { sink: None, ..args }, &options))?;
    Ok(())
}

fn slash_index(h: &mut Hostile) -> VerticalSlashIndex {
    VerticalSlashIndex {
        block_count: h.ints(&[2], [2, 4, 2]),
        block_offset: h.ints(&[0, 5], [2, 4, 2, 2]),
        column_count: h.ints(&[1], [2, 4, 2]),
        column_index: h.ints(&[4, -1, -1], [2, 4, 2, 3]),
        block_size_m: h.number(4),
        block_size_n: h.number(4),
    }
}

fn slashes(h: &mut Hostile) -> Outcome {
    let args = VerticalSlashIndexArgs {
        q_lens: h.ints(&[5, 8], [2]),
        kv_lens: h.ints(&[9, 8], [2]),
        vertical: h.ints(&[0, 1, 2], [2, 4, 3]),
        slash: h.ints(&[1, 0], [2, 4, 2]),
        vertical_counts: h.maybe(|h| h.ints(&[3], [4])),
        slash_counts: h.maybe(|h| h.ints(&[2], [4])),
    };
    let options = VerticalSlashIndexOptions {
        max_query_len: h.number(8),
        block_size_m: h.number(4),
        block_size_n: h.number(4),
        causal: h.flag(),
    };
    let _ = said(vertical_slash_index(args, &options))?.column_index.into_data();
    Ok(())
}

fn slash_attentions(h: &mut Hostile) -> Outcome {
    let options = VerticalSlashAttentionOptions {
        softmax_scale: h.real(0.3),
        softcap: h.maybe(|h| h.real(5.0)),
        causal: h.flag(),
    };
    let args = VerticalSlashAttentionArgs {
        q: h.floats([2, 6, 4, 6]),
        k: h.floats([2, 9, 2, 6]),
        v: h.floats([2, 9, 2, 5]),
        q_lens: h.ints(&[6, 3], [2]),
        kv_lens: h.ints(&[9, 4], [2]),
        index: slash_index(h),
    };
    let _ = said(vertical_slash_attention(args, &options))?.0.into_data();
    let args = PackedVerticalSlashArgs {
        q: h.floats([9, 4, 6]),
        k: h.floats([13, 2, 6]),
        v: h.floats([13, 2, 5]),
        cu_seqlens_q: h.ints(&[0, 6, 9], [3]),
        cu_seqlens_k: h.ints(&[0, 9, 13], [3]),
        index: slash_index(h),
    };
    let _ = said(packed_vertical_slash_attention(args, &options))?.0.into_data();
    Ok(())
}

fn routing(h: &mut Hostile) -> Result<Routing, String> {
    if h.flag() {
        return Ok(Routing::given(h.ints(&[0, 3, 1], [3, 2]), h.floats([3, 2])));
    }
    let choice = match h.rng.random_range(0..4) {
        0 => ExpertChoice::Scores(h.number(2)),
        1 => ExpertChoice::BiasedScores(h.number(2), h.floats([4])),
        2 => ExpertChoice::Given(h.ints(&[0, 3, 1], [3, 2])),
        _ => ExpertChoice::Table { experts: h.ints(&[0, 3, 1], [5, 2]), rows: h.ints(&[4, 0, 2], [3]) },
    };
    let options = RouteExpertsOptions {
        scoring: h.one(&[ExpertScoring::Softmax, ExpertScoring::Sigmoid, ExpertScoring::SqrtSoftplus]),
        groups: h.maybe(|h| ExpertGroups { count: h.number(2), kept: h.number(1), best: h.number(2) }),
        normalise: h.flag(),
        scale: h.real(2.5),
        local: if h.is_wrong() { Some(LocalExperts { first: h.number(0), count: h.number(4) }) } else { None },
    };
    let slots = h.maybe(|h| h.ints(&[0, -1, 7], [3]));
    said(route_experts(RouteExpertsArgs { logits: h.floats([3, 4]).into(), choice, slots }, &options))
}

fn experts(h: &mut Hostile) -> Outcome {
    let routed = routing(h)?;
    let _ = routed.materialise().0.into_data();
    let shared = match h.flag() {
        true => Some(SharedExperts { gate_up: h.weight([12, 32])?, down: h.floats([32, 6]).into() }),
        false => None,
    };
    let (gate_up, down) = (h.stack([4, 12, 32])?, h.floats([4, 32, 6]).into());
    let args = ExpertsMlpArgs { x: h.floats([3, 32]), routing: routing(h)?, gate_up, down, shared };
    let options = ExpertsMlpOptions { limit: h.maybe(|h| h.real(7.0)), determinism: h.determinism() };
    let _ = said(experts_mlp(args, &options))?.materialise().into_data();
    Ok(())
}

fn compressed(h: &mut Hostile) -> Outcome {
    let args = CompressKvArgs {
        kv_gates: h.floats([5, 24]),
        state: h.floats([3, 4, 24]),
        state_rows: h.ints(&[2, 0], [2]),
        state_slots: h.ints(&[9, 10, 0, 1, 2], [5]),
        cu_seqlens: h.ints(&[0, 2, 5], [3]),
        starts: h.ints(&[1, 0], [2]),
        position_bias: h.floats([2, 12]),
        norm_weight: h.floats([6]),
        cos: h.floats([2, 2, 2]),
        sin: h.floats([2, 2, 2]),
        cache: h.maybe(|h| EntryCache { cache: h.floats([2, 4, 6]).into(), slots: h.ints(&[3, -1, 7, 0], [4]) }),
    };
    let options = CompressKvOptions {
        overlap: !h.is_wrong(),
        norm_eps: h.real(1e-6),
        dtype: h.one(&[FloatDType::F32, FloatDType::F32, FloatDType::F64]),
    };
    let done = compress_kv(args, &options).map_err(|refused| refused.to_string())?;
    let _ = (done.entries.into_data(), done.state.into_data());
    Ok(())
}

fn streams(h: &mut Hostile) -> Outcome {
    let options = MhcOptions {
        norm_eps: h.real(1e-6),
        eps: h.real(1e-6),
        sinkhorn_iters: h.len(3),
        determinism: h.determinism(),
    };
    let mixer = Mixer { weight: h.floats([8, 16]).into(), scale: h.floats([3]), base: h.floats([8]) };
    let args = MhcPreArgs { streams: h.floats([3, 2, 8]).into(), mixer, norm_weight: h.floats([8]) };
    let (input, mixing) = said(mhc_pre(args, &options))?;
    let _ = input.into_data();
    let mut streams = said(mhc_post(h.floats([3, 8]), mixing))?;
    let _ = streams.tensor().into_data();
    let mixer = Mixer { weight: h.floats([2, 16]).into(), scale: h.floats([1]), base: h.floats([2]) };
    let _ = said(mhc_head(h.floats([3, 2, 8]), mixer, &options))?.into_data();
    Ok(())
}

fn tokens(h: &mut Hostile) -> Outcome {
    let rows: Vec<SampleParams> = (0..h.len(3))
        .map(|row| SampleParams {
            temperature: h.real(0.7),
            top_k: h.number(4) as u32,
            top_p: h.real(0.9),
            min_p: h.real(0.1),
            repetition_penalty: h.real(1.2),
            seed: h.rng.random(),
            position: h.number(3) as u32,
            seen_row: h.maybe(|h| h.number(row) as u32),
        })
        .collect();
    let rows = said(SampleRows::new(&rows, &h.device))?;
    let (logits, seen) = (h.floats([3, 40]), h.maybe(|h| h.ints(&[5, 0], [3, 2])));
    let _ = said(argmax(logits.clone()))?.into_data();
    let sampled = said(sample(SampleArgs { logits: logits.clone(), rows: &rows, seen }))?;
    let _ = sampled.tokens.into_data();
    let _ = said(log_probs(logits, h.ints(&[0, 39, -1], [3]), h.number(5)))?.values.into_data();
    Ok(())
}

fn caches(h: &mut Hostile) -> Outcome {
    let pool = |h: &mut Hostile| {
        let dense = RowFormat::Dense;
        let format = h.one(&[dense, dense, RowFormat::Fp8 { rope: 2 }, RowFormat::Fp8IndexKeys]);
        PoolConfig { width: h.number(3), tokens_per_row: h.number(1), format }
    };
    let config = CacheConfig {
        pools: (0..h.len(2)).map(|_| pool(h)).collect(),
        num_pages: h.number(8),
        page_size: h.number(4),
        max_requests: h.number(4),
        max_tokens: h.number(18),
        dtype: h.one(&[FloatDType::F32, FloatDType::BF16, FloatDType::F32, FloatDType::F64]),
    };
    let mut cache = said(PagedCache::new(config.clone(), &h.device))?;
    let mut foreign = said(PagedCache::new(config, &h.device))?;
    let mut ids: Vec<RequestId> = vec![said(if h.is_wrong() { foreign.admit() } else { cache.admit() })?];
    for _ in 0..20 {
        let (id, n, pages) = (h.one(&ids), h.number(2), [h.number(1) as u32, h.number(5) as u32]);
        let outcome = match h.rng.random_range(0..14) {
            0 | 1 => cache.admit().map(|id| ids.push(id)),
            2 | 3 => cache.append(id, n).map(drop),
            4 => cache.fork(id).map(|id| ids.push(id)),
            5 => cache.truncate(id, n),
            6 => cache.free(id),
            7 => cache.retain(&pages),
            8 => cache.release(&pages),
            9 => cache.admit_with(&pages[..1]).map(|id| ids.push(id)),
            10 => cache.replace_first_pages(id, &pages),
            11 => cache.page_table(&ids, n).map(drop),
            12 => cache.page_table_of_first(&ids, n).map(drop),
            _ => cache.take_pool(n).and_then(|pool| {
                let other = if h.is_wrong() { h.floats::<3>([8, 4, 3]).into() } else { pool };
                cache.put_pool(n, other)
            }),
        };
        let _ = said(outcome);
        let _ = said(cache.req_to_token())?;
        assert!(cache.pages_in_use() + cache.free_pages() == cache.config().num_pages);
    }
    Ok(())
}

fn maps(h: &mut Hostile) -> Outcome {
    let device = h.device.clone();
    let shape = [h.number(4), h.number(4), h.number(3)];
    let _ = said(new_pool(shape, h.one(&[FloatDType::F32, FloatDType::F16, FloatDType::F64]), &device))?;
    let mut map = said(RequestToToken::new(h.number(2) as u32, h.number(8), &device))?;
    let row = said(map.take_row())?;
    said(map.write(row, h.number(2), &[1, 2, 3]))?;
    said(map.write(h.number(0) as u32, 0, &[1]))?;
    said(map.free_row(h.number(0) as u32))
}

fn ropes(h: &mut Hostile) -> Outcome {
    let yarn = h.maybe(|h| YarnConfig {
        beta_fast: f64::from(h.real(32.0)),
        mscale: h.maybe(|h| f64::from(h.real(1.0))),
        attention_factor: h.maybe(|h| f64::from(h.real(1.0))),
        ..YarnConfig::new(f64::from(h.real(40.0)), h.number(4096))
    });
    let rope = RopeConfig { rope_theta: f64::from(h.real(1e4)), yarn };
    said(rope.validate())?;
    let (width, positions) = (h.number(8), [0, h.number(5)]);
    let _ = said(rope.tables(width, &positions, &h.device))?;
    Ok(())
}

fn batches(h: &mut Hostile) -> Outcome {
    let (start, end, page) = (h.number(2), h.number(5), h.number(4));
    let ranges = [start..end, 0..h.number(3)];
    said(batch::positions(&ranges))?;
    said(batch::slots(&ranges, &[&[1, h.number(2) as u32], &[0]], page))?;
    said(batch::cu_seqlens(&[h.number(3), h.number(2)]))?;
    Ok(())
}

#[rstest]
#[case::linears(linears)]
#[case::gates(gates)]
#[case::heads(heads)]
#[case::products(products)]
#[case::norms(norms)]
#[case::norm_ropes(norm_ropes)]
#[case::rope_writes(rope_writes)]
#[case::writes(writes)]
#[case::decodes(decodes)]
#[case::page_tables(page_tables)]
#[case::states(states)]
#[case::ragged(ragged)]
#[case::picks(picks)]
#[case::sparse(sparse)]
#[case::slashes(slashes)]
#[case::slash_attentions(slash_attentions)]
#[case::experts(experts)]
#[case::compressed(compressed)]
#[case::streams(streams)]
#[case::tokens(tokens)]
#[case::caches(caches)]
#[case::maps(maps)]
#[case::ropes(ropes)]
#[case::batches(batches)]
fn ops_errors_fuzz(#[case] call: fn(&mut Hostile) -> Outcome) {
    let mut refused = 0;
    for case in 0..CASES {
        let outcome = catch_unwind(AssertUnwindSafe(|| call(&mut Hostile::new(case))));
        refused += u64::from(outcome.unwrap_or_else(|_| panic!("case {case} panics")).is_err());
    }
    assert!((CASES / 20..=CASES - CASES / 20).contains(&refused), "{refused} of {CASES} refused: the cases say little");
}
