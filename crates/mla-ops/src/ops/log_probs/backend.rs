//! [`log_probs`](super::log_probs()) as a backend extension.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

/// What [`LogProbsBackend::log_probs`] needs beside its tensors.
#[derive(Debug, Clone)]
pub(crate) struct LogProbsSpec {
    /// Most probable tokens.
    pub(crate) top: usize,
}

#[backend_extension(
    Cube: cfg(feature = "_gpu"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(all(feature = "fusion", feature = "_gpu"))
)]
pub(crate) trait LogProbsBackend: Backend {
    /// [`log_probs`](super::log_probs()) of a row at least: of the tokens, ids, and of the ids.
    #[fusion(meta = |logits, tokens, spec| {
        let (batch, floats) = (logits.shape[0], burn::tensor::DType::F32);
        let ids = crate::fusion::spec([batch, spec.top], tokens.dtype);
        (crate::fusion::spec([batch], floats), ids, crate::fusion::spec([batch, spec.top], floats))
    })]
    fn log_probs(
        logits: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        spec: LogProbsSpec,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);
}
