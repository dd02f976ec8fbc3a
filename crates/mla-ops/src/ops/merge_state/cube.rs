use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::merge_state::{self as kernels, MergeStateArgs, MergeStateIntoArgs, MergeStatesArgs};

use super::backend::MergeStateBackend;
use crate::tensors::{buffers, contiguous, dims, elem, empty, own};

impl MergeStateBackend for CubeBackend {
    fn merge_state(
        out_a: CubeTensor,
        lse_a: CubeTensor,
        out_b: CubeTensor,
        lse_b: CubeTensor,
    ) -> (CubeTensor, CubeTensor) {
        let [out_a, lse_a, out_b, lse_b] = [out_a, lse_a, out_b, lse_b].map(contiguous);
        let ([tokens, heads, width], elem) = (dims(&out_a), elem(&out_a));
        let out = empty(&out_a, [tokens, heads, width], out_a.dtype);
        let lse = empty(&out_a, [tokens, heads], DType::F32);
        let rows = tokens * heads;
        let args = buffers!(out_a, lse_a, out_b, lse_b, out, lse => MergeStateArgs {
            out_a, lse_a, out_b, lse_b, out, lse, rows, width, elem,
        });
        kernels::launch_merge_state(&out.client, args);
        (out, lse)
    }

    fn merge_states(outs: CubeTensor, lses: CubeTensor) -> (CubeTensor, CubeTensor) {
        let [outs, lses] = [outs, lses].map(contiguous);
        let ([tokens, parts, heads, width], elem) = (dims(&outs), elem(&outs));
        let out = empty(&outs, [tokens, heads, width], outs.dtype);
        let lse = empty(&outs, [tokens, heads], DType::F32);
        let args = buffers!(outs, lses, out, lse => MergeStatesArgs {
            outs, lses, out, lse, tokens, parts, heads, width, elem,
        });
        kernels::launch_merge_states(&out.client, args);
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
        let ([tokens, heads, width], elem) = (dims(&out), elem(&out));
        let rows = tokens * heads;
        let args = buffers!(acc_out, acc_lse, out, lse => MergeStateIntoArgs {
            acc_out, acc_lse, out, lse, rows, width, elem,
        });
        kernels::launch_merge_state_into(&acc_out.client, args);
        (acc_out, acc_lse)
    }
}
