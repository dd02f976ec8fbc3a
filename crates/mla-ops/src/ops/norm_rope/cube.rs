//! [`norm_rope`](super::norm_rope()) by a kernel.

use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use mla_kernels::norm_rope::{Norm, NormRopeArgs, launch};

use super::backend::{BackendNorm, BackendRope, NormRopeBackend};
use crate::tensors::{buffers, contiguous, dims, elem, empty};

impl NormRopeBackend for CubeBackend {
    fn norm_rope(x: CubeTensor, norm: BackendNorm<Self>, rope: BackendRope<Self>, norm_whole_head: bool) -> CubeTensor {
        let (norm, weight, eps) = match norm {
            BackendNorm::None => (Norm::None, None, 0.0),
            BackendNorm::Plain(eps) => (Norm::Plain, None, eps),
            BackendNorm::Weighted(weight, eps) => (Norm::Weighted, Some(weight), eps),
        };
        // The kernel has a buffer for everything, and does not look at those that its form has no use for.
        let (weight, cos, sin, pairs, inverse) = match rope {
            BackendRope::Tables { cos, sin, inverse } => {
                let [_, pairs] = dims(&cos);
                (weight.unwrap_or_else(|| cos.clone()), cos, sin, pairs, inverse)
            }
            BackendRope::None => {
                let any = weight.unwrap_or_else(|| x.clone());
                (any.clone(), any.clone(), any, 0, false)
            }
        };
        let [x, weight, cos, sin] = [x, weight, cos, sin].map(contiguous);
        let ([tokens, heads, width], elem) = (dims(&x), elem(&x));
        let out = empty(&x, [tokens, heads, width], x.dtype);
        let args = buffers!(x, weight, cos, sin, out => NormRopeArgs {
            x, weight, cos, sin, out, tokens, heads, width, pairs, norm, norm_whole_head, eps, inverse, elem,
        });
        launch(&out.client, args);
        out
    }
}
