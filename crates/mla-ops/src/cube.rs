//! The operations on CubeCL devices: outputs are allocated here, `mla-kernels` computes them.

mod experts;

use burn::backend::cubecl::{dtype_to_elem_type, dtype_to_storage_type};
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::{launch::launch_ref, multi_level};
use cubek::std::InputBinding;
use mla_kernels::linear::{LatentRows, launch_turned, normed, turns};
use mla_kernels::residual_norm::{self, AddRmsNormArgs, Summand};
use mla_kernels::{
    compact_slots, compress_kv, kv_indices, lightning_index, merge_state, mla_decode, mla_plan, norm_rope, page_table,
    ragged_attention, rope_write, sparse_parts, vertical_slash_attention, vertical_slash_index, write_latent,
};

use crate::backend::{
    BackendRouting, CompressKvSpec, DecodeSpec, ExpertsSpec, KvIndicesSpec, LightningIndexSpec, LinearSpec, MlaBackend,
    NormRopeSpec, PageTableSpec, PlanSpec, RaggedSpec, RouteSpec, VerticalSlashIndexSpec, VerticalSlashSpec,
};
use crate::tensors::{contiguous, dims, empty, evenly_spaced, launched, own, row_stride};
use crate::{Path, RouteExpertsOptions, SparseMlaOptions, Splits};

impl MlaBackend for CubeBackend {
    fn mla_plan(seq_lens: CubeTensor, spec: PlanSpec) -> (CubeTensor, CubeTensor, CubeTensor) {
        let seq_lens = contiguous(seq_lens);
        let [batch] = dims(&seq_lens);
        let items = empty(&seq_lens, [spec.capacity, 4], DType::I32);
        let cube_ptr = empty(&seq_lens, [spec.cubes + 1], DType::I32);
        let split_ptr = empty(&seq_lens, [batch + 1], DType::I32);
        let client = seq_lens.client.clone();
        let args = mla_plan::PlanArgs {
            seq_lens: seq_lens.into_buffer_arg(),
            items: items.clone().into_buffer_arg(),
            cube_ptr: cube_ptr.clone().into_buffer_arg(),
            split_ptr: split_ptr.clone().into_buffer_arg(),
            batch,
            cubes: spec.cubes,
            capacity: spec.capacity,
            max_seq_len: spec.max_seq_len,
            tile: spec.tile,
            mode: spec.splits.into(),
        };
        launched(mla_plan::launch(&client, args));
        (items, cube_ptr, split_ptr)
    }

    fn mla_decode(
        q: CubeTensor,
        kv_cache: CubeTensor,
        page_table: CubeTensor,
        seq_lens: CubeTensor,
        items: CubeTensor,
        cube_ptr: CubeTensor,
        split_ptr: CubeTensor,
        spec: DecodeSpec,
    ) -> (CubeTensor, CubeTensor) {
        let client = q.client.clone();
        let decode = Decode::new([q, kv_cache], [page_table, seq_lens, items, cube_ptr, split_ptr], &spec);
        launched(mla_decode::launch_kernel(&client, decode.args, decode.kernel));
        (decode.out, decode.lse)
    }

    fn mla_decode_project(
        q: CubeTensor,
        kv_cache: CubeTensor,
        page_table: CubeTensor,
        seq_lens: CubeTensor,
        items: CubeTensor,
        cube_ptr: CubeTensor,
        split_ptr: CubeTensor,
        value_proj: CubeTensor,
        spec: DecodeSpec,
    ) -> CubeTensor {
        let ([batch, query_len, heads, _], [_, outputs, inputs]) = (dims(&q), dims(&value_proj));
        let out = empty(&q, [batch, query_len, heads, outputs], q.dtype);
        let decode = Decode::new([q, kv_cache], [page_table, seq_lens, items, cube_ptr, split_ptr], &spec);
        let projection = experts::by_head_args(&decode.out, value_proj, &out, [batch * query_len, heads, inputs]);
        launched(mla_decode::launch_projected(&out.client, decode.args, decode.kernel, projection));
        out
    }

    fn ragged_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        cu_seqlens: CubeTensor,
        spec: RaggedSpec,
    ) -> (CubeTensor, CubeTensor) {
        let [q, k, v, cu_seqlens] = [q, k, v, cu_seqlens].map(contiguous);
        let [tokens, heads, key_width] = dims(&q);
        let [_, _, value_width] = dims(&v);
        let [entries] = dims(&cu_seqlens);
        let out = empty(&q, [tokens, heads, value_width], q.dtype);
        let lse = empty(&q, [tokens, heads], DType::F32);
        let (client, elem) = (q.client.clone(), dtype_to_elem_type(q.dtype));
        let args = ragged_attention::RaggedAttentionArgs {
            q: q.into_buffer_arg(),
            k: k.into_buffer_arg(),
            v: v.into_buffer_arg(),
            cu_seqlens: cu_seqlens.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            lse: lse.clone().into_buffer_arg(),
            tokens,
            heads,
            key_width,
            value_width,
            sequences: entries - 1,
            softmax_scale: spec.softmax_scale,
            causal: spec.causal,
            elem,
        };
        launched(ragged_attention::launch(&client, args));
        (out, lse)
    }

    fn page_table(
        req_to_token: CubeTensor,
        req_rows: CubeTensor,
        seq_lens: CubeTensor,
        kv_start: CubeTensor,
        spec: PageTableSpec,
    ) -> CubeTensor {
        let [batch] = dims(&req_rows);
        let table = empty(&req_rows, [batch, spec.max_pages], DType::I32);
        let client = req_rows.client.clone();
        let paged = paged_batch(req_to_token, req_rows, seq_lens, kv_start, spec.page_size);
        page_table::launch_page_table(&client, paged, table.clone().into_buffer_arg(), spec.max_pages);
        table
    }

    fn kv_indices(
        req_to_token: CubeTensor,
        req_rows: CubeTensor,
        seq_lens: CubeTensor,
        kv_start: CubeTensor,
        spec: KvIndicesSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let [batch] = dims(&req_rows);
        let list = |len: usize| empty(&req_rows, [len], DType::I32);
        let (indptr, indices, last_page_len, overflow) = (list(batch + 1), list(spec.capacity), list(batch), list(1));
        let client = req_rows.client.clone();
        let out = kv_indices::KvIndicesOut {
            indptr: indptr.clone().into_buffer_arg(),
            indices: indices.clone().into_buffer_arg(),
            last_page_len: last_page_len.clone().into_buffer_arg(),
            overflow: overflow.clone().into_buffer_arg(),
            capacity: spec.capacity,
        };
        let paged = paged_batch(req_to_token, req_rows, seq_lens, kv_start, spec.page_size);
        kv_indices::launch_kv_indices(&client, paged, out);
        (indptr, indices, last_page_len, overflow)
    }

    fn vertical_slash_index(
        q_lens: CubeTensor,
        kv_lens: CubeTensor,
        vertical: CubeTensor,
        slash: CubeTensor,
        vertical_counts: CubeTensor,
        slash_counts: CubeTensor,
        spec: VerticalSlashIndexSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let [q_lens, kv_lens, vertical, slash] = [q_lens, kv_lens, vertical, slash].map(contiguous);
        let [vertical_counts, slash_counts] = [vertical_counts, slash_counts].map(contiguous);
        let ([batch, heads, verticals], [_, _, slashes]) = (dims(&vertical), dims(&slash));
        let count = || empty(&vertical, [batch, heads, spec.rows()], DType::I32);
        let list = |len: usize| empty(&vertical, [batch, heads, spec.rows(), len], DType::I32);
        let (block_count, column_count) = (count(), count());
        let (block_offset, column_index) = (list(slashes * spec.blocks_per_band()), list(verticals));
        let [sorted_vertical, sorted_slash] = [&vertical, &slash].map(|it| empty(it, dims::<3>(it), DType::I32));
        let client = vertical.client.clone();
        let args = vertical_slash_index::IndexArgs {
            q_lens: q_lens.into_buffer_arg(),
            kv_lens: kv_lens.into_buffer_arg(),
            vertical: vertical.into_buffer_arg(),
            slash: slash.into_buffer_arg(),
            vertical_counts: vertical_counts.into_buffer_arg(),
            slash_counts: slash_counts.into_buffer_arg(),
            sorted_vertical: sorted_vertical.into_buffer_arg(),
            sorted_slash: sorted_slash.into_buffer_arg(),
            block_count: block_count.clone().into_buffer_arg(),
            block_offset: block_offset.clone().into_buffer_arg(),
            column_count: column_count.clone().into_buffer_arg(),
            column_index: column_index.clone().into_buffer_arg(),
            batch,
            heads,
            verticals,
            slashes,
            max_query_len: spec.max_query_len,
            block_size_m: spec.block_size_m,
            block_size_n: spec.block_size_n,
            causal: spec.causal,
        };
        vertical_slash_index::launch(&client, args);
        (block_count, block_offset, column_count, column_index)
    }

    fn vertical_slash_attention(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        q_bounds: CubeTensor,
        kv_bounds: CubeTensor,
        block_count: CubeTensor,
        block_offset: CubeTensor,
        column_count: CubeTensor,
        column_index: CubeTensor,
        spec: VerticalSlashSpec,
    ) -> (CubeTensor, CubeTensor) {
        let [q, k, v, q_bounds, kv_bounds] = [q, k, v, q_bounds, kv_bounds].map(contiguous);
        let [block_count, block_offset] = [block_count, block_offset].map(contiguous);
        let [column_count, column_index] = [column_count, column_index].map(contiguous);
        let ([query_tokens, heads, key_width], [key_tokens, kv_heads, value_width]) = (dims(&q), dims(&v));
        let ([batch, _, rows, max_blocks], [_, _, _, max_columns]) = (dims(&block_offset), dims(&column_index));
        let out = empty(&q, [query_tokens, heads, value_width], q.dtype);
        let lse = empty(&q, [query_tokens, heads], DType::F32);
        let (client, elem) = (q.client.clone(), dtype_to_elem_type(q.dtype));
        let args = vertical_slash_attention::AttentionArgs {
            q: q.into_buffer_arg(),
            k: k.into_buffer_arg(),
            v: v.into_buffer_arg(),
            q_bounds: q_bounds.into_buffer_arg(),
            kv_bounds: kv_bounds.into_buffer_arg(),
            block_count: block_count.into_buffer_arg(),
            block_offset: block_offset.into_buffer_arg(),
            column_count: column_count.into_buffer_arg(),
            column_index: column_index.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            lse: lse.clone().into_buffer_arg(),
            layout: match spec.strides {
                Some([query_stride, key_stride]) => {
                    vertical_slash_attention::Layout::Padded { query_stride, key_stride }
                }
                None => vertical_slash_attention::Layout::Packed,
            },
            batch,
            query_tokens,
            key_tokens,
            heads,
            kv_heads,
            key_width,
            value_width,
            rows,
            max_blocks,
            max_columns,
            block_size_m: spec.block_size_m,
            block_size_n: spec.block_size_n,
            softmax_scale: spec.softmax_scale,
            softcap: spec.softcap,
            causal: spec.causal,
            elem,
        };
        launched(vertical_slash_attention::launch(&client, args));
        (out, lse)
    }

    fn lightning_index(
        q: CubeTensor,
        keys: CubeTensor,
        page_table: CubeTensor,
        head_weights: CubeTensor,
        visible: CubeTensor,
        spec: LightningIndexSpec,
    ) -> CubeTensor {
        let [q, keys, page_table, head_weights, visible] = [q, keys, page_table, head_weights, visible].map(contiguous);
        let [batch, query_len, heads, width] = dims(&q);
        let ([pages, page_size, _], [_, max_pages]) = (dims(&keys), dims(&page_table));
        let elem = dtype_to_elem_type(q.dtype);
        let sizes = lightning_index::LightningIndexSizes {
            batch,
            query_len,
            heads,
            width,
            pages,
            page_size,
            max_pages,
            k: spec.k,
            elem,
        };
        let client = q.client.clone();
        let score_rows = sizes.score_rows(&client);
        let scores = empty(&q, [score_rows, sizes.score_stride()], DType::U32);
        let candidates = empty(&q, [score_rows, sizes.candidate_stride(&client)], DType::U32);
        let indices = empty(&q, [batch, query_len, spec.k], DType::I32);
        let args = lightning_index::LightningIndexArgs {
            q: q.into_buffer_arg(),
            keys: keys.into_buffer_arg(),
            page_table: page_table.into_buffer_arg(),
            head_weights: head_weights.into_buffer_arg(),
            visible: visible.into_buffer_arg(),
            scores: scores.into_buffer_arg(),
            candidates: candidates.into_buffer_arg(),
            score_rows,
            indices: indices.clone().into_buffer_arg(),
            sizes,
            scale: spec.scale,
            slots: spec.slots,
        };
        launched(lightning_index::launch(&client, args));
        indices
    }

    fn compress_kv(
        kv_gates: CubeTensor,
        state: CubeTensor,
        state_rows: CubeTensor,
        cu_seqlens: CubeTensor,
        starts: CubeTensor,
        position_bias: CubeTensor,
        norm_weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        spec: CompressKvSpec,
    ) -> CubeTensor {
        let [kv_gates, state, position_bias, norm_weight, cos, sin] =
            [kv_gates, state, position_bias, norm_weight, cos, sin].map(contiguous);
        let [state_rows, cu_seqlens, starts] = [state_rows, cu_seqlens, starts].map(contiguous);
        let ([tokens, _], [blocks, _, _], [window, _]) = (dims(&kv_gates), dims(&state), dims(&position_bias));
        let ([batch, count, pairs], [width]) = (dims(&cos), dims(&norm_weight));
        let dtype = DType::from(spec.dtype);
        let entries = empty(&cos, [batch, count, width], dtype);
        let client = cos.client.clone();
        let args = compress_kv::CompressKvArgs {
            kv_gates: kv_gates.into_buffer_arg(),
            state: state.into_buffer_arg(),
            state_rows: state_rows.into_buffer_arg(),
            cu_seqlens: cu_seqlens.into_buffer_arg(),
            starts: starts.into_buffer_arg(),
            position_bias: position_bias.into_buffer_arg(),
            norm_weight: norm_weight.into_buffer_arg(),
            cos: cos.into_buffer_arg(),
            sin: sin.into_buffer_arg(),
            entries: entries.clone().into_buffer_arg(),
            sizes: compress_kv::CompressKvSizes {
                tokens,
                batch,
                entries: count,
                blocks,
                window,
                width,
                pairs,
                overlap: spec.overlap,
                elem: dtype_to_elem_type(dtype),
            },
            norm_eps: spec.norm_eps,
        };
        launched(compress_kv::launch(&client, args));
        entries
    }

    fn linear(x: CubeTensor, weight: CubeTensor, spec: LinearSpec) -> CubeTensor {
        experts::linear(x, weight, &spec)
    }

    fn linear_pair(x: CubeTensor, first: CubeTensor, second: CubeTensor) -> (CubeTensor, CubeTensor) {
        experts::linear_pair(x, first, second)
    }

    fn linear_by_head(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
        experts::linear_by_head(x, weight)
    }

    fn choose_experts(logits: CubeTensor, bias: CubeTensor, route: RouteSpec) -> (CubeTensor, CubeTensor) {
        experts::choose(logits, bias, &route)
    }

    fn weigh_experts(logits: CubeTensor, given: CubeTensor, options: RouteExpertsOptions) -> (CubeTensor, CubeTensor) {
        experts::weigh(logits, given, &options)
    }

    fn experts_mlp(
        x: CubeTensor,
        indices: CubeTensor,
        weights: CubeTensor,
        gate_up: CubeTensor,
        down: CubeTensor,
        shared: CubeTensor,
        residual: CubeTensor,
        norm_weight: CubeTensor,
        spec: ExpertsSpec,
    ) -> (CubeTensor, CubeTensor) {
        let norm = spec.norm_eps.map(|eps| (residual, norm_weight, eps));
        experts::mlp(x, (indices, weights), [gate_up, down], shared, norm, &spec)
    }

    fn experts_mlp_of_token(
        x: CubeTensor,
        routing: BackendRouting<Self>,
        gate_up: CubeTensor,
        down: CubeTensor,
        shared_gate_up: CubeTensor,
        shared_down: CubeTensor,
        residual: CubeTensor,
        norm_weight: CubeTensor,
        first: CubeTensor,
        second: CubeTensor,
        spec: ExpertsSpec,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let norm = spec.norm_eps.map(|eps| (residual, norm_weight, eps));
        let pair = spec.pair.then_some([first, second]);
        experts::mlp_of_token(x, routing, [gate_up, down], [shared_gate_up, shared_down], (norm, pair), &spec)
    }

    fn norm_rope(
        x: CubeTensor,
        weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        spec: NormRopeSpec,
    ) -> CubeTensor {
        let [x, weight, cos, sin] = [x, weight, cos, sin].map(contiguous);
        let [tokens, heads, width] = dims(&x);
        let (out, elem, client) =
            (empty(&x, [tokens, heads, width], x.dtype), dtype_to_elem_type(x.dtype), x.client.clone());
        let args = norm_rope::NormRopeArgs {
            x: x.into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            cos: cos.into_buffer_arg(),
            sin: sin.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            tokens,
            heads,
            width,
            pairs: spec.pairs,
            norm: match (spec.norm_eps, spec.weighted) {
                (None, _) => norm_rope::Norm::None,
                (Some(_), false) => norm_rope::Norm::Plain,
                (Some(_), true) => norm_rope::Norm::Weighted,
            },
            norm_turned: spec.norm_turned,
            eps: spec.norm_eps.unwrap_or_default(),
            inverse: spec.inverse,
            elem,
        };
        norm_rope::launch(&client, args);
        out
    }

    fn add_rms_norm(x: CubeTensor, y: CubeTensor, weight: CubeTensor, eps: f32) -> (CubeTensor, CubeTensor) {
        add_norm(x, Summand::Rows(contiguous(y).into_buffer_arg()), weight, eps)
    }

    fn add_rms_norm_linear(
        x: CubeTensor,
        y: CubeTensor,
        norm_weight: CubeTensor,
        weight: CubeTensor,
        eps: f32,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let ([rows, width], [outputs, _]) = (dims(&x), dims(&weight));
        let (elem, client) = (dtype_to_elem_type(x.dtype), x.client.clone());
        if !normed::supported(&client, rows, width, outputs, elem) {
            let (sum, normed) = Self::add_rms_norm(x, y, norm_weight, eps);
            return (sum, normed.clone(), Self::linear(normed, weight, LinearSpec { gated: false, limit: None }));
        }
        let [x, y, norm_weight, weight] = [x, y, norm_weight, weight].map(contiguous);
        let [sum, normed] = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
        let out = empty(&x, [rows, outputs], DType::F32);
        let args = normed::NormLinearArgs {
            x: x.into_buffer_arg(),
            y: y.into_buffer_arg(),
            norm_weight: norm_weight.into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            sum: sum.clone().into_buffer_arg(),
            normed: normed.clone().into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            rows,
            width,
            outputs,
            eps,
            elem,
        };
        normed::launch(&client, args);
        (sum, normed, out)
    }

    fn write_latent(cache: CubeTensor, slots: CubeTensor, latent: CubeTensor, rope: CubeTensor) -> CubeTensor {
        let [slots, latent, rope] = [slots, latent, rope].map(contiguous);
        let cache = own(contiguous(cache));
        let [pages, page_size, _] = dims(&cache);
        let ([tokens, latent_width], [_, rope_width]) = (dims(&latent), dims(&rope));
        if rope_width == 0 {
            return Self::write_rows(cache, slots, latent);
        }
        if latent_width == 0 {
            return Self::write_rows(cache, slots, rope);
        }
        let args = write_latent::WriteLatentArgs {
            cache: cache.clone().into_buffer_arg(),
            slots: slots.into_buffer_arg(),
            latent: latent.into_buffer_arg(),
            rope: rope.into_buffer_arg(),
            slot_count: pages * page_size,
            tokens,
            latent_width,
            rope_width,
            elem: dtype_to_elem_type(cache.dtype),
        };
        write_latent::launch_write_latent(&cache.client, args);
        cache
    }

    fn write_rows(cache: CubeTensor, slots: CubeTensor, rows: CubeTensor) -> CubeTensor {
        let [slots, rows] = [slots, rows].map(contiguous);
        let cache = own(contiguous(cache));
        let [pages, page_size, _] = dims(&cache);
        let [tokens, width] = dims(&rows);
        let args = write_latent::WriteRowsArgs {
            cache: cache.clone().into_buffer_arg(),
            slots: slots.into_buffer_arg(),
            rows: rows.into_buffer_arg(),
            slot_count: pages * page_size,
            tokens,
            width,
            elem: dtype_to_elem_type(cache.dtype),
        };
        write_latent::launch_write_rows(&cache.client, args);
        cache
    }

    fn rope_write(
        q: CubeTensor,
        latent: CubeTensor,
        norm_weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        cache: CubeTensor,
        slots: CubeTensor,
        norm_eps: f32,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let [q, latent, weight, cos, sin, slots] = [q, latent, norm_weight, cos, sin, slots].map(contiguous);
        let cache = own(contiguous(cache));
        let ([tokens, heads, width], [_, pairs]) = (dims(&q), dims(&cos));
        let [pages, page_size, cache_width] = dims(&cache);
        let q_out = empty(&q, [tokens, heads, width], q.dtype);
        let latent_out = empty(&q, [tokens, cache_width], q.dtype);
        let args = rope_write::RopeWriteArgs {
            q: q.into_buffer_arg(),
            latent: latent.into_buffer_arg(),
            weight: weight.into_buffer_arg(),
            cos: cos.into_buffer_arg(),
            sin: sin.into_buffer_arg(),
            slots: slots.into_buffer_arg(),
            q_out: q_out.clone().into_buffer_arg(),
            latent_out: latent_out.clone().into_buffer_arg(),
            cache: cache.clone().into_buffer_arg(),
            tokens,
            heads,
            width,
            cache_width,
            pairs,
            slot_count: pages * page_size,
            eps: norm_eps,
            elem: dtype_to_elem_type(cache.dtype),
        };
        rope_write::launch(&cache.client, args);
        (q_out, latent_out, cache)
    }

    fn rope_write_absorb(
        q: CubeTensor,
        latent: CubeTensor,
        norm_weight: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        cache: CubeTensor,
        slots: CubeTensor,
        weight: CubeTensor,
        norm_eps: f32,
    ) -> (CubeTensor, CubeTensor) {
        let [q, latent, norm_weight, cos, sin, slots] = [q, latent, norm_weight, cos, sin, slots].map(contiguous);
        let cache = own(contiguous(cache));
        let (sizes, [_, pairs], [pages, page_size, cache_width]) = (dims(&q), dims(&cos), dims(&cache));
        let [tokens, heads, _] = sizes;
        let [_, outputs, _] = dims(&weight);
        let out = empty(&q, [tokens, heads, outputs + 2 * pairs], q.dtype);
        let args = experts::by_head_args(&q, weight.clone(), &out, sizes);
        let latents = LatentRows {
            latent: latent.clone().into_buffer_arg(),
            weight: norm_weight.clone().into_buffer_arg(),
            cos: cos.clone().into_buffer_arg(),
            sin: sin.clone().into_buffer_arg(),
            slots: slots.clone().into_buffer_arg(),
            cache: cache.clone().into_buffer_arg(),
            cache_width,
            pairs,
            slot_count: pages * page_size,
            eps: norm_eps,
        };
        if turns(&q.client, &latents, &args) {
            launch_turned(&q.client, latents, args);
            return (out, cache);
        }
        drop(latents);
        let (q, _, cache) = Self::rope_write(q, latent, norm_weight, cos, sin, cache, slots, norm_eps);
        (experts::linear_by_head(q, weight), cache)
    }

    fn compact_slots(slots: CubeTensor, lengths: CubeTensor) -> (CubeTensor, CubeTensor) {
        let [slots, lengths] = [slots, lengths].map(contiguous);
        let [lists, width] = dims(&slots);
        let (compact, counts) = (empty(&slots, [lists, width], DType::I32), empty(&slots, [lists], DType::I32));
        let client = slots.client.clone();
        let args = compact_slots::CompactSlotsArgs {
            slots: slots.into_buffer_arg(),
            lengths: lengths.into_buffer_arg(),
            compact: compact.clone().into_buffer_arg(),
            counts: counts.clone().into_buffer_arg(),
            lists,
            width,
        };
        compact_slots::launch(&client, args);
        (compact, counts)
    }

    fn sparse_parts(
        q: CubeTensor,
        rows: CubeTensor,
        indices: CubeTensor,
        lengths: CubeTensor,
        options: SparseMlaOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let [q, rows, indices, lengths] = [q, rows, indices, lengths].map(contiguous);
        let ([batch, query_len, heads, width], [pages, page_size, _]) = (dims(&q), dims(&rows));
        let ([_, _, most], value_width) = (dims(&indices), options.value_width);
        let acc = empty(&q, [batch, query_len, heads, value_width], DType::F32);
        let [max, row_sum] = [(); 2].map(|()| empty(&q, [batch, query_len, heads], DType::F32));
        let (client, elem) = (q.client.clone(), dtype_to_elem_type(q.dtype));
        let args = sparse_parts::SparsePartsArgs {
            q: q.into_buffer_arg(),
            rows: rows.into_buffer_arg(),
            slots: indices.into_buffer_arg(),
            lengths: lengths.into_buffer_arg(),
            acc: acc.clone().into_buffer_arg(),
            max: max.clone().into_buffer_arg(),
            row_sum: row_sum.clone().into_buffer_arg(),
            tokens: batch * query_len,
            heads,
            row_count: pages * page_size,
            most,
            width,
            value_width,
            softmax_scale: options.softmax_scale,
            elem,
        };
        sparse_parts::launch(&client, args);
        (acc, max, row_sum)
    }

    fn merge_state(
        out_a: CubeTensor,
        lse_a: CubeTensor,
        out_b: CubeTensor,
        lse_b: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let [out_a, lse_a, out_b, lse_b] = [out_a, lse_a, out_b, lse_b].map(contiguous);
        let [tokens, heads, width] = dims(&out_a);
        let out = empty(&out_a, [tokens, heads, width], out_a.dtype);
        let lse = empty(&out_a, [tokens, heads], DType::F32);
        let (client, elem) = (out_a.client.clone(), dtype_to_elem_type(out_a.dtype));
        let args = merge_state::MergeStateArgs {
            out_a: out_a.into_buffer_arg(),
            lse_a: lse_a.into_buffer_arg(),
            out_b: out_b.into_buffer_arg(),
            lse_b: lse_b.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            lse: lse.clone().into_buffer_arg(),
            rows: tokens * heads,
            width,
            elem,
        };
        merge_state::launch_merge_state(&client, args);
        (out, lse)
    }

    fn merge_states(outs: CubeTensor, lses: CubeTensor) -> (CubeTensor, CubeTensor) {
        let [outs, lses] = [outs, lses].map(contiguous);
        let [tokens, parts, heads, width] = dims(&outs);
        let out = empty(&outs, [tokens, heads, width], outs.dtype);
        let lse = empty(&outs, [tokens, heads], DType::F32);
        let (client, elem) = (outs.client.clone(), dtype_to_elem_type(outs.dtype));
        let args = merge_state::MergeStatesArgs {
            outs: outs.into_buffer_arg(),
            lses: lses.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            lse: lse.clone().into_buffer_arg(),
            tokens,
            parts,
            heads,
            width,
            elem,
        };
        merge_state::launch_merge_states(&client, args);
        (out, lse)
    }

    fn merge_state_into(
        acc_out: CubeTensor,
        acc_lse: CubeTensor,
        out: CubeTensor,
        lse: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let [acc_out, acc_lse] = [acc_out, acc_lse].map(|acc| own(contiguous(acc)));
        let [out, lse] = [out, lse].map(contiguous);
        let [tokens, heads, width] = dims(&out);
        let elem = dtype_to_elem_type(out.dtype);
        let args = merge_state::MergeStateIntoArgs {
            acc_out: acc_out.clone().into_buffer_arg(),
            acc_lse: acc_lse.clone().into_buffer_arg(),
            out: out.into_buffer_arg(),
            lse: lse.into_buffer_arg(),
            rows: tokens * heads,
            width,
            elem,
        };
        merge_state::launch_merge_state_into(&acc_out.client, args);
        (acc_out, acc_lse)
    }

    fn matmul(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
        let (out_dtype, rank) = (lhs.dtype, lhs.meta.shape().num_dims());
        let mut shape = lhs.meta.shape().clone();
        shape[rank - 1] = rhs.meta.shape()[rank - 1];
        let out = empty(&lhs, shape, out_dtype);
        let elem = dtype_to_storage_type(out_dtype);
        let input = |tensor: CubeTensor| InputBinding::new(tensor.binding(), elem);
        let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
        let (client, lhs, rhs) = (out.client.clone(), input(lhs), input(rhs));
        // The kernel without matrix units, for those know no f32.
        let unit = multi_level::Strategy::SimpleUnit(Default::default()).into();
        let result = launch_ref(&unit, &client, lhs.clone(), rhs.clone(), out.clone().binding(), &mut elems);
        if result.is_err() {
            let naive = multi_level::Strategy::Naive.into();
            launched(launch_ref(&naive, &client, lhs, rhs, out.clone().binding(), &mut elems));
        }
        out
    }
}

/// The sum of x `[N, d]` and y, and its norm.
fn add_norm(x: CubeTensor, y: Summand, weight: CubeTensor, eps: f32) -> (CubeTensor, CubeTensor) {
    let client = x.client.clone();
    let (args, outs) = add_norm_args(x, y, weight, eps);
    residual_norm::launch(&client, args);
    outs
}

/// What [`add_norm`] launches, and what that writes.
fn add_norm_args(
    x: CubeTensor,
    y: Summand,
    weight: CubeTensor,
    eps: f32,
) -> (AddRmsNormArgs, (CubeTensor, CubeTensor)) {
    let [x, weight] = [x, weight].map(contiguous);
    let [rows, width] = dims(&x);
    let [sum, normed] = [(); 2].map(|()| empty(&x, [rows, width], x.dtype));
    let elem = dtype_to_elem_type(x.dtype);
    let args = AddRmsNormArgs {
        x: x.into_buffer_arg(),
        y,
        weight: weight.into_buffer_arg(),
        sum: sum.clone().into_buffer_arg(),
        normed: normed.clone().into_buffer_arg(),
        rows,
        width,
        eps,
        elem,
    };
    (args, (sum, normed))
}

/// A decode step, and what it writes.
struct Decode {
    args: mla_decode::DecodeArgs,
    kernel: mla_decode::DecodeKernel,
    out: CubeTensor,
    lse: CubeTensor,
}

impl Decode {
    /// Of query and cache; page table, lengths, and the plan's items, cube_ptr and split_ptr.
    fn new([q, kv_cache]: [CubeTensor; 2], tables: [CubeTensor; 5], spec: &DecodeSpec) -> Self {
        let [page_table, seq_lens, items, cube_ptr, split_ptr] = tables;
        let [page_table, seq_lens] = [page_table, seq_lens].map(contiguous);
        let [batch, query_len, heads, key_width] = dims(&q);
        let [pages, page_size, _] = dims(&kv_cache);
        let [_, max_pages] = dims(&page_table);
        let [capacity, _] = dims(&items);
        let [cubes_and_one] = dims(&cube_ptr);
        let (rows, value_width, elem) = (query_len * heads, spec.value_width, dtype_to_elem_type(q.dtype));
        let out = empty(&q, [batch, query_len, heads, value_width], q.dtype);
        let lse = empty(&q, [batch, query_len, heads], DType::F32);
        let partial_out = empty(&q, [capacity, rows, value_width], DType::F32);
        let partial_lse = empty(&q, [capacity, rows], DType::F32);
        let sizes = mla_decode::DecodeSizes {
            batch,
            query_len,
            heads,
            key_width,
            value_width,
            pages,
            page_size,
            max_pages,
            cubes: cubes_and_one - 1,
            capacity,
            causal: spec.causal,
            elem,
        };
        let kernel = spec.path.and_then(Path::kernel).unwrap_or_else(|| sizes.kernel(&q.client));
        let [q, kv_cache] =
            [q, kv_cache].map(|rows| if kernel.takes_strides() { evenly_spaced(rows) } else { contiguous(rows) });
        let args = mla_decode::DecodeArgs {
            q_stride: row_stride(&q).unwrap_or(key_width),
            kv_stride: row_stride(&kv_cache).unwrap_or(key_width),
            q: q.into_buffer_arg(),
            kv_cache: kv_cache.into_buffer_arg(),
            page_table: page_table.into_buffer_arg(),
            seq_lens: seq_lens.into_buffer_arg(),
            items: items.into_buffer_arg(),
            cube_ptr: cube_ptr.into_buffer_arg(),
            split_ptr: split_ptr.into_buffer_arg(),
            partial_out: partial_out.into_buffer_arg(),
            partial_lse: partial_lse.into_buffer_arg(),
            out: out.clone().into_buffer_arg(),
            lse: lse.clone().into_buffer_arg(),
            sizes,
            softmax_scale: spec.softmax_scale,
        };
        Self { args, kernel, out, lse }
    }
}

fn paged_batch(
    req_to_token: CubeTensor,
    req_rows: CubeTensor,
    seq_lens: CubeTensor,
    kv_start: CubeTensor,
    page_size: usize,
) -> page_table::PagedBatch {
    let ([requests, tokens], [batch]) = (dims(&req_to_token), dims(&req_rows));
    let arg = |tensor: CubeTensor| contiguous(tensor).into_buffer_arg();
    page_table::PagedBatch {
        req_to_token: arg(req_to_token),
        req_rows: arg(req_rows),
        seq_lens: arg(seq_lens),
        kv_start: arg(kv_start),
        requests,
        tokens,
        batch,
        page_size,
    }
}

impl From<Splits> for mla_plan::SplitMode {
    fn from(splits: Splits) -> Self {
        match splits {
            Splits::Auto => Self::Auto,
            Splits::Count(n) => Self::Count(n),
            Splits::Tokens(n) => Self::Tokens(n),
        }
    }
}
