//! Shapes and dtypes of the operations' outputs, for calls that are deferred.

use burn::backend::fusion::custom::TensorSpec;
use burn::tensor::{DType, Shape};

use crate::backend::{
    BackendRoutingMetadata, CompressKvSpec, DecodeSpec, ExpertsSpec, KvIndicesSpec, LightningIndexSpec, LinearSpec,
    NormRopeSpec, PageTableSpec, PlanSpec, RaggedSpec, RouteSpec, VerticalSlashIndexSpec, VerticalSlashSpec,
};
use crate::{RouteExpertsOptions, SparseMlaOptions};

fn spec<const D: usize>(shape: [usize; D], dtype: DType) -> TensorSpec {
    TensorSpec::new(Shape::new(shape), dtype)
}

pub(crate) fn mla_plan(seq_lens: &TensorSpec, plan: &PlanSpec) -> (TensorSpec, TensorSpec, TensorSpec) {
    let [batch] = seq_lens.shape.dims();
    let i32s = |len: usize| spec([len], DType::I32);
    (spec([plan.capacity, 4], DType::I32), i32s(plan.cubes + 1), i32s(batch + 1))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn mla_decode(
    q: &TensorSpec,
    _kv_cache: &TensorSpec,
    _page_table: &TensorSpec,
    _seq_lens: &TensorSpec,
    _items: &TensorSpec,
    _cube_ptr: &TensorSpec,
    _split_ptr: &TensorSpec,
    decode: &DecodeSpec,
) -> (TensorSpec, TensorSpec) {
    let [batch, query_len, heads, _] = q.shape.dims();
    (spec([batch, query_len, heads, decode.value_width], q.dtype), spec([batch, query_len, heads], DType::F32))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn mla_decode_project(
    q: &TensorSpec,
    _kv_cache: &TensorSpec,
    _page_table: &TensorSpec,
    _seq_lens: &TensorSpec,
    _items: &TensorSpec,
    _cube_ptr: &TensorSpec,
    _split_ptr: &TensorSpec,
    value_proj: &TensorSpec,
    _decode: &DecodeSpec,
) -> TensorSpec {
    let ([batch, query_len, heads, _], [_, outputs, _]) = (q.shape.dims(), value_proj.shape.dims());
    spec([batch, query_len, heads, outputs], q.dtype)
}

pub(crate) fn ragged_attention(
    q: &TensorSpec,
    _k: &TensorSpec,
    v: &TensorSpec,
    _cu_seqlens: &TensorSpec,
    _ragged: &RaggedSpec,
) -> (TensorSpec, TensorSpec) {
    let [tokens, heads, _] = q.shape.dims();
    (v.clone(), spec([tokens, heads], DType::F32))
}

pub(crate) fn page_table(
    _req_to_token: &TensorSpec,
    req_rows: &TensorSpec,
    _seq_lens: &TensorSpec,
    _kv_start: &TensorSpec,
    table: &PageTableSpec,
) -> TensorSpec {
    let [batch] = req_rows.shape.dims();
    spec([batch, table.max_pages], DType::I32)
}

pub(crate) fn kv_indices(
    _req_to_token: &TensorSpec,
    req_rows: &TensorSpec,
    _seq_lens: &TensorSpec,
    _kv_start: &TensorSpec,
    list: &KvIndicesSpec,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let [batch] = req_rows.shape.dims();
    let i32s = |len: usize| spec([len], DType::I32);
    (i32s(batch + 1), i32s(list.capacity), i32s(batch), i32s(1))
}

pub(crate) fn vertical_slash_index(
    _q_lens: &TensorSpec,
    _kv_lens: &TensorSpec,
    vertical: &TensorSpec,
    slash: &TensorSpec,
    _vertical_counts: &TensorSpec,
    _slash_counts: &TensorSpec,
    index: &VerticalSlashIndexSpec,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let ([batch, heads, verticals], [_, _, slashes]) = (vertical.shape.dims(), slash.shape.dims());
    let count = || spec([batch, heads, index.rows()], DType::I32);
    let list = |len: usize| spec([batch, heads, index.rows(), len], DType::I32);
    (count(), list(slashes * index.blocks_per_band()), count(), list(verticals))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn vertical_slash_attention(
    q: &TensorSpec,
    _k: &TensorSpec,
    v: &TensorSpec,
    _q_bounds: &TensorSpec,
    _kv_bounds: &TensorSpec,
    _block_count: &TensorSpec,
    _block_offset: &TensorSpec,
    _column_count: &TensorSpec,
    _column_index: &TensorSpec,
    _attention: &VerticalSlashSpec,
) -> (TensorSpec, TensorSpec) {
    let ([tokens, heads, _], [_, _, value_width]) = (q.shape.dims(), v.shape.dims());
    (spec([tokens, heads, value_width], q.dtype), spec([tokens, heads], DType::F32))
}

pub(crate) fn lightning_index(
    q: &TensorSpec,
    _keys: &TensorSpec,
    _page_table: &TensorSpec,
    _head_weights: &TensorSpec,
    _visible: &TensorSpec,
    index: &LightningIndexSpec,
) -> TensorSpec {
    let [batch, query_len, _, _] = q.shape.dims();
    spec([batch, query_len, index.k], DType::I32)
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn compress_kv(
    _kv_gates: &TensorSpec,
    _state: &TensorSpec,
    _state_rows: &TensorSpec,
    _cu_seqlens: &TensorSpec,
    _starts: &TensorSpec,
    _position_bias: &TensorSpec,
    norm_weight: &TensorSpec,
    cos: &TensorSpec,
    _sin: &TensorSpec,
    compress: &CompressKvSpec,
) -> TensorSpec {
    let ([batch, entries, _], [width]) = (cos.shape.dims(), norm_weight.shape.dims());
    spec([batch, entries, width], compress.dtype.into())
}

pub(crate) fn linear(x: &TensorSpec, weight: &TensorSpec, linear: &LinearSpec) -> TensorSpec {
    let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.shape.dims());
    spec([rows, if linear.gated { outputs / 2 } else { outputs }], weight.dtype)
}

pub(crate) fn linear_pair(x: &TensorSpec, first: &TensorSpec, second: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let ([rows, _], [outputs, _], [second_outputs, _]) = (x.shape.dims(), first.shape.dims(), second.shape.dims());
    (spec([rows, outputs], x.dtype), spec([rows, second_outputs], x.dtype))
}

pub(crate) fn linear_by_head(x: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    let ([rows, heads, width], [_, outputs, inputs]) = (x.shape.dims(), weight.shape.dims());
    spec([rows, heads, outputs + width - inputs], x.dtype)
}

pub(crate) fn choose_experts(logits: &TensorSpec, _bias: &TensorSpec, route: &RouteSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, _] = logits.shape.dims();
    (spec([tokens, route.top_k], DType::I32), spec([tokens, route.top_k], DType::F32))
}

pub(crate) fn weigh_experts(
    _logits: &TensorSpec,
    given: &TensorSpec,
    _options: &RouteExpertsOptions,
) -> (TensorSpec, TensorSpec) {
    let [tokens, top_k] = given.shape.dims();
    (given.clone(), spec([tokens, top_k], DType::F32))
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn experts_mlp(
    x: &TensorSpec,
    _indices: &TensorSpec,
    _weights: &TensorSpec,
    _gate_up: &TensorSpec,
    _down: &TensorSpec,
    _shared: &TensorSpec,
    _residual: &TensorSpec,
    _norm_weight: &TensorSpec,
    _spec: &ExpertsSpec,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), x.clone())
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn experts_mlp_of_token(
    x: &TensorSpec,
    _routing: &BackendRoutingMetadata,
    _gate_up: &TensorSpec,
    _down: &TensorSpec,
    _shared_gate_up: &TensorSpec,
    _shared_down: &TensorSpec,
    _residual: &TensorSpec,
    _norm_weight: &TensorSpec,
    first: &TensorSpec,
    second: &TensorSpec,
    spec: &ExpertsSpec,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let (first, second) = if spec.pair { linear_pair(x, first, second) } else { (x.clone(), x.clone()) };
    (x.clone(), x.clone(), first, second)
}

pub(crate) fn norm_rope(
    x: &TensorSpec,
    _weight: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _spec: &NormRopeSpec,
) -> TensorSpec {
    x.clone()
}

pub(crate) fn add_rms_norm(
    x: &TensorSpec,
    _y: &TensorSpec,
    _weight: &TensorSpec,
    _eps: &f32,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), x.clone())
}

pub(crate) fn add_rms_norm_linear(
    x: &TensorSpec,
    _y: &TensorSpec,
    _norm_weight: &TensorSpec,
    weight: &TensorSpec,
    _eps: &f32,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let ([rows, _], [outputs, _]) = (x.shape.dims(), weight.shape.dims());
    (x.clone(), x.clone(), spec([rows, outputs], DType::F32))
}

pub(crate) fn write_latent(
    cache: &TensorSpec,
    _slots: &TensorSpec,
    _latent: &TensorSpec,
    _rope: &TensorSpec,
) -> TensorSpec {
    cache.clone()
}

pub(crate) fn write_rows(cache: &TensorSpec, _slots: &TensorSpec, _rows: &TensorSpec) -> TensorSpec {
    cache.clone()
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn rope_write(
    q: &TensorSpec,
    latent: &TensorSpec,
    _norm_weight: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    cache: &TensorSpec,
    _slots: &TensorSpec,
    _norm_eps: &f32,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (q.clone(), latent.clone(), cache.clone())
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn rope_write_absorb(
    q: &TensorSpec,
    _latent: &TensorSpec,
    _norm_weight: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    cache: &TensorSpec,
    _slots: &TensorSpec,
    weight: &TensorSpec,
    _norm_eps: &f32,
) -> (TensorSpec, TensorSpec) {
    (linear_by_head(q, weight), cache.clone())
}

pub(crate) fn compact_slots(slots: &TensorSpec, lengths: &TensorSpec) -> (TensorSpec, TensorSpec) {
    (slots.clone(), lengths.clone())
}

pub(crate) fn sparse_parts(
    q: &TensorSpec,
    _rows: &TensorSpec,
    _indices: &TensorSpec,
    _lengths: &TensorSpec,
    options: &SparseMlaOptions,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let [batch, query_len, heads, _] = q.shape.dims();
    let number = spec([batch, query_len, heads], DType::F32);
    (spec([batch, query_len, heads, options.value_width], DType::F32), number.clone(), number)
}

pub(crate) fn merge_state(
    out_a: &TensorSpec,
    lse_a: &TensorSpec,
    _out_b: &TensorSpec,
    _lse_b: &TensorSpec,
) -> (TensorSpec, TensorSpec) {
    (out_a.clone(), lse_a.clone())
}

pub(crate) fn merge_states(outs: &TensorSpec, _lses: &TensorSpec) -> (TensorSpec, TensorSpec) {
    let [tokens, _, heads, width] = outs.shape.dims();
    (spec([tokens, heads, width], outs.dtype), spec([tokens, heads], DType::F32))
}

pub(crate) fn merge_state_into(
    acc_out: &TensorSpec,
    acc_lse: &TensorSpec,
    _out: &TensorSpec,
    _lse: &TensorSpec,
) -> (TensorSpec, TensorSpec) {
    (acc_out.clone(), acc_lse.clone())
}

pub(crate) fn matmul(lhs: &TensorSpec, rhs: &TensorSpec) -> TensorSpec {
    let mut out = lhs.clone();
    let last = out.shape.num_dims() - 1;
    out.shape[last] = rhs.shape[last];
    out
}
