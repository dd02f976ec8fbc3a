//! [`linear_by_head`]: a projection of each head by its own matrix.

mod backend;
#[cfg(feature = "_gpu")]
pub(crate) mod cube;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

pub(crate) use self::backend::*;
use super::matmul::product;
use super::small_batch::has_kernel;
use crate::Determinism;
use crate::dispatch::tensors;

/// The product of each head of `x [N, H, d]` with the transpose of its own matrix of `weight [H, out, in]`, of the same float
/// dtype, and behind it the head's channels past the first `in`, as they are: `[N, H, out + d - in]`.
///
/// MLA's absorbed projections: the query against the latents, with its rotary part carried over, and the values of attended
/// latents. As fast as [`linear`](crate::linear()) for a few tokens on a GPU, where matrices may lie apart.
///
/// # Panics
/// As [`Tensor::matmul`] does, where the shapes do not fit.
pub fn linear_by_head(x: Tensor<3>, weight: Tensor<3>, determinism: Determinism) -> Tensor<3> {
    let ([rows, heads, width], [matrices, outputs, inputs]) = (x.dims(), weight.dims());
    let fits = heads == matrices && inputs <= width && x.dtype() == weight.dtype();
    if fits && heads * inputs * outputs > 0 && has_kernel(rows, &x.device(), determinism) {
        let [x, weight] = [x, weight].map(Tensor::into_dispatch);
        return tensors(<Dispatch as LinearByHeadBackend>::linear_by_head(x, weight));
    }
    let by_matmul = |x: Tensor<3>| product(x.swap_dims(0, 1), weight.swap_dims(1, 2), determinism).swap_dims(0, 1);
    match width.saturating_sub(inputs) {
        0 => by_matmul(x),
        rest => {
            let carried = x.clone().narrow(2, inputs, rest);
            Tensor::cat(vec![by_matmul(x.narrow(2, 0, inputs)), carried], 2)
        }
    }
}
