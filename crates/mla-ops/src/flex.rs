//! The operations on the CPU: the tensor reference.

use burn::backend::{
    Flex,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use crate::backend::{
    BackendRouting, CompressKvSpec, DecodeSpec, ExpertsSpec, KvIndicesSpec, LightningIndexSpec, LinearSpec, MlaBackend,
    NormRopeSpec, PageTableSpec, PlanSpec, RaggedSpec, RouteSpec, VerticalSlashIndexSpec, VerticalSlashSpec,
};
use crate::{
    Path, RouteExpertsOptions, SparseMlaOptions, SparseScope, linear, linear_by_head, linear_pair, reference, swiglu,
};

impl MlaBackend for Flex {
    fn mla_plan(seq_lens: IntTensor<Self>, spec: PlanSpec) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let (items, cube_ptr, split_ptr) = reference::mla_plan(int(seq_lens), &spec);
        (int_primitive(items), int_primitive(cube_ptr), int_primitive(split_ptr))
    }

    fn mla_decode(
        q: FloatTensor<Self>,
        kv_cache: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        items: IntTensor<Self>,
        _cube_ptr: IntTensor<Self>,
        _split_ptr: IntTensor<Self>,
        spec: DecodeSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        debug_assert!(matches!(spec.path, None | Some(Path::Reference)), "a path that the public function refuses");
        let cache = reference::PagedRows::new(float(kv_cache), int(page_table));
        let (out, lse) = reference::mla_decode(float(q), cache, int(seq_lens), int(items), &spec);
        (float_primitive(out), float_primitive(lse))
    }

    fn mla_decode_project(
        q: FloatTensor<Self>,
        kv_cache: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        items: IntTensor<Self>,
        cube_ptr: IntTensor<Self>,
        split_ptr: IntTensor<Self>,
        value_proj: FloatTensor<Self>,
        spec: DecodeSpec,
    ) -> FloatTensor<Self> {
        let (out, _) = Self::mla_decode(q, kv_cache, page_table, seq_lens, items, cube_ptr, split_ptr, spec);
        let out: Tensor<4> = float(out);
        float_primitive(linear_by_head(out.squeeze_dim::<3>(1), float(value_proj)).unsqueeze_dim::<4>(1))
    }

    fn ragged_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        spec: RaggedSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (out, lse) = reference::ragged_attention(float(q), float(k), float(v), int(cu_seqlens), &spec);
        (float_primitive(out), float_primitive(lse))
    }

    fn page_table(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: PageTableSpec,
    ) -> IntTensor<Self> {
        let (rows, lens, kv_start) = (int(req_rows), int(seq_lens), int(kv_start));
        int_primitive(reference::page_table(int(req_to_token), rows, lens, kv_start, &spec))
    }

    fn kv_indices(
        req_to_token: IntTensor<Self>,
        req_rows: IntTensor<Self>,
        seq_lens: IntTensor<Self>,
        kv_start: IntTensor<Self>,
        spec: KvIndicesSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let (rows, lens, kv_start) = (int(req_rows), int(seq_lens), int(kv_start));
        let csr = reference::kv_indices(int(req_to_token), rows, lens, kv_start, &spec);
        let [indptr, indices, last_page_len, overflow] = csr.map(int_primitive);
        (indptr, indices, last_page_len, overflow)
    }

    fn vertical_slash_index(
        q_lens: IntTensor<Self>,
        kv_lens: IntTensor<Self>,
        vertical: IntTensor<Self>,
        slash: IntTensor<Self>,
        vertical_counts: IntTensor<Self>,
        slash_counts: IntTensor<Self>,
        spec: VerticalSlashIndexSpec,
    ) -> (IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>) {
        let vertical = reference::Entries::new(int(vertical), int(vertical_counts));
        let slash = reference::Entries::new(int(slash), int(slash_counts));
        let ([block_count, column_count], [block_offset, column_index]) =
            reference::vertical_slash_index(int(q_lens), int(kv_lens), &vertical, &slash, &spec);
        (
            int_primitive(block_count),
            int_primitive(block_offset),
            int_primitive(column_count),
            int_primitive(column_index),
        )
    }

    fn vertical_slash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        q_bounds: IntTensor<Self>,
        kv_bounds: IntTensor<Self>,
        block_count: IntTensor<Self>,
        block_offset: IntTensor<Self>,
        column_count: IntTensor<Self>,
        column_index: IntTensor<Self>,
        spec: VerticalSlashSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let index = reference::KeyLists::new(
            (int(block_count), int(block_offset)),
            (int(column_count), int(column_index)),
            spec.block_size_n,
        );
        let (q_bounds, kv_bounds) = (int(q_bounds), int(kv_bounds));
        let (out, lse) =
            reference::vertical_slash_attention([float(q), float(k), float(v)], q_bounds, kv_bounds, &index, &spec);
        (float_primitive(out), float_primitive(lse))
    }

    fn lightning_index(
        q: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        page_table: IntTensor<Self>,
        head_weights: FloatTensor<Self>,
        visible: IntTensor<Self>,
        spec: LightningIndexSpec,
    ) -> IntTensor<Self> {
        let (keys, page_table, weights) = (float(keys), int(page_table), float(head_weights));
        int_primitive(reference::lightning_index(float(q), keys, page_table, weights, int(visible), &spec))
    }

    fn compress_kv(
        kv_gates: FloatTensor<Self>,
        state: FloatTensor<Self>,
        state_rows: IntTensor<Self>,
        cu_seqlens: IntTensor<Self>,
        starts: IntTensor<Self>,
        position_bias: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        spec: CompressKvSpec,
    ) -> FloatTensor<Self> {
        let tokens =
            reference::Tokens::new(float(kv_gates), float(state), int(state_rows), int(cu_seqlens), int(starts));
        let compressor = reference::Compressor {
            position_bias: float(position_bias),
            norm_weight: float(norm_weight),
            cos: float(cos),
            sin: float(sin),
            spec,
        };
        float_primitive(compressor.entries(&tokens))
    }

    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, spec: LinearSpec) -> FloatTensor<Self> {
        let (x, weight) = (float(x), float(weight));
        float_primitive(if spec.gated { swiglu(x, weight, spec.limit) } else { linear(x, weight) })
    }

    fn linear_pair(
        x: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (first, second) = linear_pair(float(x), float(first), float(second));
        (float_primitive(first), float_primitive(second))
    }

    fn linear_by_head(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        float_primitive(linear_by_head(float(x), float(weight)))
    }

    fn choose_experts(
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        route: RouteSpec,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let bias = route.biased.then(|| float(bias));
        let (indices, weights) = reference::choose_experts(float(logits), bias, route.top_k, &route.options);
        (int_primitive(indices), float_primitive(weights))
    }

    fn weigh_experts(
        logits: FloatTensor<Self>,
        given: IntTensor<Self>,
        options: RouteExpertsOptions,
    ) -> (IntTensor<Self>, FloatTensor<Self>) {
        let (indices, weights) = reference::weigh_experts(float(logits), int(given), &options);
        (int_primitive(indices), float_primitive(weights))
    }

    fn experts_mlp(
        x: FloatTensor<Self>,
        indices: IntTensor<Self>,
        weights: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let routing = (int(indices), float(weights));
        let shared = spec.shared.then(|| float(shared));
        let sum = reference::experts_mlp(float(x), routing, float(gate_up), float(down), shared, spec.limit);
        match spec.norm_eps {
            Some(eps) => Self::add_rms_norm(residual, float_primitive(sum), norm_weight, eps),
            None => (float_primitive(sum.clone()), float_primitive(sum)),
        }
    }

    fn experts_mlp_of_token(
        x: FloatTensor<Self>,
        routing: BackendRouting<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        shared_gate_up: FloatTensor<Self>,
        shared_down: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        spec: ExpertsSpec,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let shared = linear(swiglu(float(x.clone()), float(shared_gate_up), spec.limit), float(shared_down));
        let ((indices, weights), shared, pair) = (routing.chosen(), float_primitive(shared), spec.pair);
        let (sum, normed) = Self::experts_mlp(x, indices, weights, gate_up, down, shared, residual, norm_weight, spec);
        let (first, second) =
            if pair { Self::linear_pair(normed.clone(), first, second) } else { (sum.clone(), sum.clone()) };
        (sum, normed, first, second)
    }

    fn norm_rope(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        spec: NormRopeSpec,
    ) -> FloatTensor<Self> {
        let weight = spec.weighted.then(|| float(weight));
        let tables = (spec.pairs > 0).then(|| [float(cos), float(sin)]);
        float_primitive(reference::norm_rope(float(x), weight, tables, &spec))
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sum: Tensor<2> = float(x) + float(y);
        let spec = NormRopeSpec { norm_eps: Some(eps), norm_turned: true, weighted: true, pairs: 0, inverse: false };
        let normed = reference::norm_rope(sum.clone().unsqueeze_dim(1), Some(float(weight)), None, &spec);
        (float_primitive(sum), float_primitive(normed.squeeze_dim::<2>(1)))
    }

    fn add_rms_norm_linear(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (sum, normed) = Self::add_rms_norm(x, y, norm_weight, eps);
        let out = linear(float(normed.clone()), float(weight));
        (sum, normed, float_primitive(out))
    }

    fn write_latent(
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        latent: FloatTensor<Self>,
        rope: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let parts = [float(latent), float(rope)];
        float_primitive(reference::write_latent(float(cache), int(slots), &parts))
    }

    fn write_rows(cache: FloatTensor<Self>, slots: IntTensor<Self>, rows: FloatTensor<Self>) -> FloatTensor<Self> {
        float_primitive(reference::write_latent(float(cache), int(slots), &[float(rows)]))
    }

    fn rope_write(
        q: FloatTensor<Self>,
        latent: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        norm_eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let tables: [Tensor<2>; 2] = [float(cos), float(sin)];
        let [_, pairs] = tables[0].dims();
        let turn = NormRopeSpec { norm_eps: None, norm_turned: false, weighted: false, pairs, inverse: false };
        let norm = NormRopeSpec { norm_eps: Some(norm_eps), weighted: true, ..turn.clone() };
        let q = reference::norm_rope(float(q), None, Some(tables.clone()), &turn);
        let latent = float::<2>(latent).unsqueeze_dim(1);
        let latent = reference::norm_rope(latent, Some(float(norm_weight)), Some(tables), &norm).squeeze_dim::<2>(1);
        let cache = reference::write_latent(float(cache), int(slots), std::slice::from_ref(&latent));
        (float_primitive(q), float_primitive(latent), float_primitive(cache))
    }

    fn rope_write_absorb(
        q: FloatTensor<Self>,
        latent: FloatTensor<Self>,
        norm_weight: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        cache: FloatTensor<Self>,
        slots: IntTensor<Self>,
        weight: FloatTensor<Self>,
        norm_eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (q, _, cache) = Self::rope_write(q, latent, norm_weight, cos, sin, cache, slots, norm_eps);
        (float_primitive(linear_by_head(float(q), float(weight))), cache)
    }

    fn compact_slots(slots: IntTensor<Self>, lengths: IntTensor<Self>) -> (IntTensor<Self>, IntTensor<Self>) {
        let (slots, counts) = reference::compact_slots(int(slots), int(lengths));
        (int_primitive(slots), int_primitive(counts))
    }

    fn sparse_parts(
        q: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        indices: IntTensor<Self>,
        lengths: IntTensor<Self>,
        options: SparseMlaOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let scope = SparseScope { rows: float(rows), indices: int(indices), lengths: Some(int(lengths)) };
        let parts = reference::sparse_mla_parts(float(q), vec![scope], &options);
        (float_primitive(parts.acc), float_primitive(parts.max), float_primitive(parts.row_sum))
    }

    fn merge_state(
        out_a: FloatTensor<Self>,
        lse_a: FloatTensor<Self>,
        out_b: FloatTensor<Self>,
        lse_b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (out, lse) = reference::merge_state(float(out_a), float(lse_a), float(out_b), float(lse_b));
        (float_primitive(out), float_primitive(lse))
    }

    fn merge_states(outs: FloatTensor<Self>, lses: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (out, lse) = reference::merge_states(float(outs), float(lses));
        (float_primitive(out), float_primitive(lse))
    }

    fn merge_state_into(
        acc_out: FloatTensor<Self>,
        acc_lse: FloatTensor<Self>,
        out: FloatTensor<Self>,
        lse: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The accumulator is f32, and a merge has the dtype of its first state.
        Self::merge_state(acc_out, acc_lse, out, lse)
    }

    fn matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }
}

fn float<const D: usize>(primitive: FloatTensor<Flex>) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(primitive)
}

fn int<const D: usize>(primitive: IntTensor<Flex>) -> Tensor<D, Int> {
    Tensor::from_primitive::<Flex>(primitive)
}

fn float_primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
}

fn int_primitive<const D: usize>(tensor: Tensor<D, Int>) -> IntTensor<Flex> {
    tensor.try_into_primitive::<Flex>().expect("computed from tensors of this backend")
}
