use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::log_probs::{LogProbsArgs, launch};

use super::backend::{LogProbsBackend, LogProbsSpec};
use crate::tensors::{buffers, contiguous, dims, elem, empty};

impl LogProbsBackend for CubeBackend {
    fn log_probs(logits: CubeTensor, tokens: CubeTensor, spec: LogProbsSpec) -> (CubeTensor, CubeTensor, CubeTensor) {
        let (logits, tokens, top) = (contiguous(logits), contiguous(tokens), spec.top);
        let ([batch, width], elem) = (dims(&logits), elem(&logits));
        let chosen = empty(&logits, [batch], DType::F32);
        let ids = empty(&logits, [batch, top], DType::I32);
        let values = empty(&logits, [batch, top], DType::F32);
        let args = buffers!(logits, tokens, chosen, ids, values => LogProbsArgs {
            logits, tokens, chosen, ids, values, batch, width, top, elem,
        });
        launch(&logits.client, args);
        (chosen, ids, values)
    }
}
