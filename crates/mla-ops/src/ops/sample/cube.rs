use burn::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::sample::{PARAMS, SampleArgs, launch};

use super::backend::SampleBackend;
use super::params::WORDS;
use crate::tensors::{buffers, contiguous, dims, elem, empty, own};

const _: () = assert!(PARAMS == WORDS, "what the host writes is what the kernel reads");

impl SampleBackend for CubeBackend {
    fn sample(logits: CubeTensor, rows: CubeTensor, seen: CubeTensor) -> (CubeTensor, CubeTensor) {
        let (logits, rows) = (contiguous(logits), contiguous(rows));
        let ([batch, width], [masks, _], elem) = (dims(&logits), dims(&seen), elem(&logits));
        let seen = if masks > 0 { own(contiguous(seen)) } else { seen };
        let tokens = empty(&logits, [batch], DType::I32);
        launch(
            &logits.client,
            buffers!(logits, rows, seen, tokens => SampleArgs { logits, rows, seen, tokens, batch, width, masks, elem }),
        );
        (tokens, seen)
    }
}
