use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::BufferArg;
use mla_kernels::sparse_mla::{ScopeArgs, SparseMlaArgs, SparseMlaSizes, launch};

use super::SparseMlaOptions;
use super::backend::{BackendScope, BackendSecond, BackendSink, SparseMlaBackend};
use crate::tensors::{contiguous, dims, elem, empty, launched};

impl SparseMlaBackend for CubeBackend {
    fn sparse_mla(
        q: CubeTensor,
        scope: BackendScope<Self>,
        second: BackendSecond<Self>,
        sink: BackendSink<Self>,
        options: SparseMlaOptions,
    ) -> (CubeTensor, CubeTensor) {
        let q = contiguous(q);
        let ([batch, query_len, heads, key_width], SparseMlaOptions { value_width, softmax_scale, determinism }) =
            (dims(&q), options);
        let out = empty(&q, [batch, query_len, heads, value_width], q.dtype);
        let lse = empty(&q, [batch, query_len, heads], DType::F32);
        let buffer = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        let args = SparseMlaArgs {
            q: buffer(&q),
            first: scope_args(scope),
            second: match second {
                BackendSecond::None => None,
                BackendSecond::Scope(scope) => Some(scope_args(scope)),
            },
            sink: match sink {
                BackendSink::None => None,
                BackendSink::Sink(sink) => Some(buffer(&contiguous(sink))),
            },
            out: buffer(&out),
            lse: buffer(&lse),
            sizes: SparseMlaSizes { tokens: batch * query_len, heads, key_width, value_width, elem: elem(&q) },
            softmax_scale,
            batch_invariant: determinism.is_batch_invariant(),
        };
        launched(launch(&q.client, args));
        (out, lse)
    }
}

fn scope_args(scope: BackendScope<CubeBackend>) -> ScopeArgs {
    let (rows, slots, lengths) = match scope {
        BackendScope::Whole(rows, slots) => (rows, slots, None),
        BackendScope::Lengths(rows, slots, lengths) => (rows, slots, Some(lengths)),
    };
    let [rows, slots] = [rows, slots].map(contiguous);
    let ([pages, page_size, _], [.., most]) = (dims::<3>(&rows), dims::<3>(&slots));
    let buffer = |tensor: CubeTensor| -> BufferArg { tensor.into_buffer_arg() };
    ScopeArgs {
        rows: buffer(rows),
        slots: buffer(slots),
        lengths: lengths.map(|lengths| buffer(contiguous(lengths))),
        row_count: pages * page_size,
        most,
    }
}
