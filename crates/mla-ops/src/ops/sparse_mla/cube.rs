use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::BufferArg;
use mla_kernels::sparse_mla::{ScopeArgs, SparseMlaArgs, SparseMlaResults, SparseMlaSizes, SparsePlan, launch};

use super::SparseMlaOptions;
use super::backend::{BackendPlan, BackendScope, BackendSecond, BackendSink, SparseMlaBackend};
use crate::tensors::{contiguous, dims, elem, empty, launched};

impl SparseMlaBackend for CubeBackend {
    fn sparse_mla(
        q: CubeTensor,
        scope: BackendScope<Self>,
        second: BackendSecond<Self>,
        sink: BackendSink<Self>,
        plan: BackendPlan<Self>,
        options: SparseMlaOptions,
    ) -> (CubeTensor, CubeTensor) {
        let q = contiguous(q);
        let [batch, query_len, heads, _] = dims(&q);
        let out = empty(&q, [batch, query_len, heads, options.value_width], q.dtype);
        let lse = empty(&q, [batch, query_len, heads], DType::F32);
        let sink = match sink {
            BackendSink::None => None,
            BackendSink::Sink(sink) => Some(contiguous(sink).into_buffer_arg()),
        };
        let results = SparseMlaResults::Output { out: buffer(&out), lse: buffer(&lse), sink };
        let plan = match plan {
            BackendPlan::None => None,
            BackendPlan::Plan(items, cube_ptr, split_ptr) => {
                let ([capacity, _], [ends]) = (dims(&items), dims(&cube_ptr));
                let [items, cube_ptr, split_ptr] = [items, cube_ptr, split_ptr].map(|it| buffer(&contiguous(it)));
                Some(SparsePlan { items, cube_ptr, split_ptr, cubes: ends - 1, capacity, partials: None })
            }
        };
        attend(q, scope, second, (results, plan), options);
        (out, lse)
    }

    fn sparse_mla_parts(
        q: CubeTensor,
        scope: BackendScope<Self>,
        second: BackendSecond<Self>,
        options: SparseMlaOptions,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let q = contiguous(q);
        let [batch, query_len, heads, _] = dims(&q);
        let acc = empty(&q, [batch, query_len, heads, options.value_width], DType::F32);
        let [max, row_sum] = [(); 2].map(|()| empty(&q, [batch, query_len, heads], DType::F32));
        let results = SparseMlaResults::Parts { acc: buffer(&acc), max: buffer(&max), row_sum: buffer(&row_sum) };
        attend(q, scope, second, (results, None), options);
        (acc, max, row_sum)
    }
}

/// Launches the kernel, where the device has one.
fn attend(
    q: CubeTensor,
    scope: BackendScope<CubeBackend>,
    second: BackendSecond<CubeBackend>,
    (results, plan): (SparseMlaResults, Option<SparsePlan>),
    options: SparseMlaOptions,
) {
    let ([batch, query_len, heads, key_width], SparseMlaOptions { value_width, softmax_scale, determinism }) =
        (dims(&q), options);
    let first = scope_args(scope);
    let second = match second {
        BackendSecond::None => None,
        BackendSecond::Scope(scope) => Some(scope_args(scope)),
    };
    let (rows, second_rows) = (first.rows.format(), second.as_ref().map(|second| second.rows.format()));
    let (tokens, elem) = (batch * query_len, elem(&q));
    let args = SparseMlaArgs {
        q: buffer(&q),
        first,
        second,
        pages: None,
        plan,
        results,
        sizes: SparseMlaSizes { tokens, heads, key_width, value_width, elem, rows, second_rows },
        softmax_scale,
        batch_invariant: determinism.is_batch_invariant(),
    };
    launched(launch(&q.client, args));
}

fn buffer(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

fn scope_args(scope: BackendScope<CubeBackend>) -> ScopeArgs {
    let (rows, slots, lengths) = match scope {
        BackendScope::Whole(rows, slots) => (rows, slots, None),
        BackendScope::Lengths(rows, slots, lengths) => (rows, slots, Some(lengths)),
    };
    let (rows, slots) = (rows.map(contiguous), contiguous(slots));
    let ([pages, page_size, _], [.., most]) = (rows.dims(), dims::<3>(&slots));
    ScopeArgs {
        rows: rows.arg(),
        slots: buffer(&slots),
        lengths: lengths.map(|lengths| buffer(&contiguous(lengths))),
        row_count: pages * page_size,
        most,
    }
}
